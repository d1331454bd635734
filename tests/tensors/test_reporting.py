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
