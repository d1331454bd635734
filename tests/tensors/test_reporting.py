"""`export` outside a job: any name that the system takes, whole or not at all, and errors that a script can catch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

import psjob as ps
from psjob.checkpoint import disk


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


@pytest.mark.parametrize(
    "name",
    [
        "w.safetensors",
        "my weights.safetensors",
        ".hidden",
        "-x",
        "gewichte-ü.safetensors",
        "größe 权重",
        "a\nb",
        "x" * 255,
        "a.part",
        "$(x)*?",
    ],
)
def test_any_file_name_is_taken(tmp_path: Path, model: torch.nn.Module, name: str) -> None:
    (tmp_path / f"{name[:200]}.tmp").write_text("the user's own")
    for _ in range(2):
        ps.export(tmp_path / name, model)
        loaded = safetensors.torch.load((tmp_path / name).read_bytes())
        assert loaded.keys() == model.state_dict().keys()
        assert all(torch.equal(loaded[key], value) for key, value in model.state_dict().items())
    assert sorted(os.listdir(tmp_path)) == sorted([name, f"{name[:200]}.tmp"])


@pytest.mark.parametrize("name", ["x" * 256, "folder", "missing/w.safetensors", "file/w.safetensors"])
def test_what_the_system_refuses_is_an_os_error_and_leaves_nothing(tmp_path: Path, model: torch.nn.Module, name: str) -> None:
    (tmp_path / "folder" / "full").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot "):
        ps.export(tmp_path / name, model)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_what_has_no_name_or_no_form_is_a_value_error(tmp_path: Path, model: torch.nn.Module) -> None:
    with pytest.raises(ValueError, match=r"null (byte|character)"):
        ps.export(tmp_path / "a\0b", model)
    with pytest.raises(ValueError, match="needs the model"):
        ps.export(tmp_path / "a")
    model.register_buffer("wave", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ValueError, match=r"cannot write w\.safetensors in .*complex128"):
        ps.export(tmp_path / "w.safetensors", model)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", ["_sync", "_rename", "_write"])
def test_a_disk_that_fails_leaves_the_file_of_before(
    tmp_path: Path, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    (tmp_path / "my weights").write_text("before")

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk, call, broken)
    with pytest.raises(OSError, match="the disk reported an error"):
        ps.export(tmp_path / "my weights", model)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("my weights", "before")]


def test_rows_are_in_the_file_by_the_names_of_a_plain_module(tmp_path: Path) -> None:
    rows = ps.Embedding(5, 3, init="uniform")
    model = torch.nn.ModuleDict({"page": rows, "again": rows, "user": ps.Embedding(None, 2, init="zeros"), "head": torch.nn.Linear(3, 1)})
    with pytest.raises(ValueError, match=r"the rows of page begin with ps\.attach: call it before ps\.export"):
        ps.export(tmp_path / "w", model)
    assert os.listdir(tmp_path) == []
    model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.5))
    (model["page"](torch.tensor([1, 4])).sum() + model["user"](torch.tensor([9, -4, 1 << 40])).sum()).backward()
    optimizer.step()
    ps.export(tmp_path / "w", model)
    found = safetensors.torch.load_file(tmp_path / "w")
    assert sorted(found) == ["again.weight", "head.bias", "head.weight", "page.weight", "user.ids", "user.weight"]
    with torch.no_grad():
        assert torch.equal(found["page.weight"], model["page"](torch.arange(5))) and torch.equal(
            found["again.weight"], found["page.weight"]
        )
    assert found["user.ids"].tolist() == [-4, 9, 1 << 40] and found["user.weight"].tolist() == [[-0.5, -0.5]] * 3
    torch.nn.Embedding(5, 3).load_state_dict({"weight": found["page.weight"]})


def test_a_model_that_is_a_table_has_no_word_before_its_names(tmp_path: Path) -> None:
    model, stepper = ps.attach(ps.Table(None, 1, dtype=torch.int32))
    model.push(torch.tensor([3, 3, 7]), torch.ones(3, 1, dtype=torch.int32))
    stepper.step()
    ps.export(tmp_path / "w", model)
    found = safetensors.torch.load_file(tmp_path / "w")
    assert sorted(found) == ["ids", "weight"] and found["weight"].dtype == torch.int32
    assert found["ids"].tolist() == [3, 7] and found["weight"].tolist() == [[2], [1]]
