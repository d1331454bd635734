"""`export` outside a job: any name that the system takes, whole or not at all, and errors that a script can catch.

- `ps.state` outside a job, and what a record puts back of it.
- What a script reports is written to the TensorBoard files that it has open.
"""

from __future__ import annotations

import copy
import gc
import os
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import psjob as ps
from psjob.api import trackers
from psjob.api.values import ScriptState
from psjob.checkpoint import disk
from psjob.process.errors import Refused


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


def declared(**values: Any) -> ScriptState:
    state = ScriptState()
    state._declare(values)
    return state


def test_attributes_are_read_assigned_and_deleted() -> None:
    state = declared(best=0.5, history=[])
    state.best += 1
    state.new = "x"
    assert (state.best, state.new, dir(state)) == (1.5, "x", ["best", "history", "new"])
    del state.new
    assert repr(state) == "ps.state(best=1.5, history=[])"
    with pytest.raises(AttributeError, match=r"ps.state has no 'new'; declared are: best, history"):
        _ = state.new
    with pytest.raises(AttributeError, match="has no 'new'"):
        del state.new


def test_what_is_put_back_keeps_its_identity() -> None:
    history, named, seen, last, vector = [1], {"a": 1}, {1}, deque([1], maxlen=3), torch.ones(2)
    state = declared(history=history, named=named, seen=seen, last=last, vector=vector, text="a")
    kept = copy.deepcopy(state.state_dict())
    history.append(2)
    named["b"] = 2
    seen.add(2)
    last.append(2)
    vector.zero_()
    state.text = "b"
    state.load_state_dict(kept)
    assert (history, named, seen, list(last), vector.tolist(), state.text) == ([1], {"a": 1}, {1}, [1], [1.0, 1.0], "a")
    assert state.history is history and state.vector is vector


class Meter:
    """An object with a state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_an_object_is_kept_by_its_own_state() -> None:
    meter = Meter()
    state = declared(meter=meter)
    kept = state.state_dict()
    meter.count = 3
    state.load_state_dict(kept)
    assert state.meter is meter and meter.count == 0
    state.meter = None
    with pytest.raises(Refused, match="where the record has the state of an object"):
        state.load_state_dict(kept)


def test_a_record_that_comes_before_the_declaration_wins() -> None:
    state = ScriptState()
    state.load_state_dict({"best": {"value": 0.9}, "later": {"value": 3}})
    state._declare({"best": 0.0})
    assert state.best == 0.9
    assert state.state_dict() == {"later": {"value": 3}, "best": {"value": 0.9}}, "what is not declared again yet is not lost"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("lock", object(), "ps.state.lock: a builtins.object cannot be kept"),
        ("_hidden", 1, "begins with _"),
        ("state_dict", 1, "is a word of the namespace itself"),
        ("f", lambda: 0, "cannot be kept in a resume record"),
    ],
)
def test_what_could_not_come_back_is_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(Refused, match=words):
        declared(**{name: value})


def test_a_name_is_declared_once() -> None:
    with pytest.raises(Refused, match="was given twice"):
        declared(best=1)._declare({"best": 2})


def test_of_names_with_one_that_is_refused_none_is_declared() -> None:
    state = declared(best=1)
    with pytest.raises(Refused, match="odd"):
        state._declare({"bad": 0, "odd": object()})
    state._declare({"bad": 0})
    assert (state.best, state.bad) == (1, 0)


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_looked", 0)
    monkeypatch.setattr(trackers, "_told", 0)
    monkeypatch.setattr(trackers, "_broken", set())
    trackers._writers.clear()


@pytest.mark.usefixtures("forgotten")
def test_an_open_summary_writer_is_told(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    closed, writer = SummaryWriter(str(tmp_path / "closed")), SummaryWriter(str(tmp_path / "open"))
    closed.close()
    for step in range(4):
        trackers.tell_trackers({"loss": 1.0 / (step + 1)}, step)
    late = SummaryWriter(str(tmp_path / "late"))
    for step in range(4, 12):
        trackers.tell_trackers({"loss": 1.0}, step)
    writer.close()
    late.close()
    events = EventAccumulator(str(tmp_path / "open"))
    events.Reload()
    assert [(event.step, round(event.value, 3)) for event in events.Scalars("psjob/loss")][:3] == [(0, 1.0), (1, 0.5), (2, 0.333)]
    other = EventAccumulator(str(tmp_path / "late"))
    other.Reload()
    assert other.Scalars("psjob/loss"), "one that is opened later is found"
    assert len(list((tmp_path / "closed").iterdir())) == 1, "a closed one is not opened again"
    del closed, writer, late
    gc.collect()
