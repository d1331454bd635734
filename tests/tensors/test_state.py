"""`ps.state` outside a job, and what a record puts back of it."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import pytest
import torch

from psjob.api.state import State
from psjob.process.errors import Refused


def declared(**values: Any) -> State:
    state = State()
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
    state = State()
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
