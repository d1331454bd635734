"""Which variables a function may read again, from the place on at which it calls."""

from __future__ import annotations

import contextlib
import sys
from types import FrameType
from typing import Any

import pytest

from psjob.api.script_code import Reads, reads

PLACES: list[Reads] = []


def ask(frame: FrameType | None = None) -> int:
    frame = frame or sys._getframe(1)
    PLACES.append(reads(frame.f_code, frame.f_lasti))
    return 1


class Three:
    """Asks at the head of the loop over it."""

    def __init__(self) -> None:
        self.left = 3

    def __iter__(self) -> Three:
        return self

    def __next__(self) -> int:
        ask(sys._getframe(1))
        self.left -= 1
        if self.left < 0:
            raise StopIteration
        return self.left


LOOPS: dict[str, tuple[str, set[str], set[str]]] = {
    "a hidden state": ("hidden = 0\nfor x in Three():\n    hidden = hidden + x", {"hidden"}, {"hidden"}),
    "an output": ("out = None\nfor x in Three():\n    out = x + 1\n    y = out", set(), set()),
    "read behind the loop": ("out = None\nfor x in Three():\n    out = x + 1\nprint(out)", {"out"}, set()),
    "the loop's own variable": ("for x in Three():\n    y = x", set(), set()),
    "made in the first iteration": ("for x in Three():\n    if x == 2:\n        made = 1\n    y = made", {"made"}, {"made"}),
    "assigned sometimes": ("best = 0\nfor x in Three():\n    if x > 5:\n        best = x\ny = best", {"best"}, {"best"}),
    "two loops": ("total = 0\nfor epoch in [1, 2]:\n    for x in Three():\n        total += x\n    mean = total / 3", {"total"}, {"total"}),
    "begun anew": ("for epoch in [1, 2]:\n    total = 0\n    for x in Three():\n        y = x\n    print(epoch)", {"epoch"}, {"epoch"}),
    "a while loop": ("number = 0\nheld = 0\nwhile number < 3:\n    x = ask()\n    held = x\n    number += x", {"number"}, {"number"}),
    "deleted": ("out = 0\nfor x in Three():\n    out = x\n    del out", set(), set()),
    "a comprehension": ("scale = 2\nfor x in Three():\n    y = [scale * z for z in [x]]", {"scale"}, {"scale"}),
    "a variable of the name of a comprehension's": (
        "for x in Three():\n    y = [p for p in [x]]\n    for p in y:\n        z = [p for p in y if p]\n    p = [p for p in y]\n    z = p",
        set(),
        set(),
    ),
    "one that a comprehension leaves": ("p = 0\nfor x in Three():\n    y = [p for p in [x]]\nprint(p)", {"p"}, {"p"}),
    "one that a comprehension reads": (
        "q = r = 0\nfor x in Three():\n    r = [[(u, v) for u, v in [(p, q)]] for p in [x] for v in [p] if v]\n    q = {1: u for u in [r]}",
        {"q"},
        {"q"},
    ),
    "a comprehension in try": (
        "p = 0\nfor x in Three():\n    try:\n        y = max([p for p in [1 / x]])\n    except ZeroDivisionError:\n        y = p",
        {"p"},
        {"p"},
    ),
    "a function within": ("count = 0\ndef more():\n    return count\nfor x in Three():\n    count = x", {"count"}, {"count"}),
    "asked in a call": ("held = 0\nheld = held + ask()\nprint(held)", set(), set()),
    "two at once": ("a = b = 0\nfor x in Three():\n    a, b = b, x", {"b"}, {"b"}),
    "read by a handler": (
        "best = 0\ntry:\n    for x in Three():\n        if x > 5:\n            best = x\nexcept ValueError:\n    print(best)",
        {"best"},
        {"best"},
    ),
    "a block that passes errors on": ("for x in Three():\n    with no_grad():\n        moves = [x]\n    y = moves", set(), set()),
    "a block that may end errors": (
        "moves = 0\nfor x in Three():\n    with suppress(ValueError), no_grad():\n        moves = [x]\n    y = moves",
        {"moves"},
        {"moves"},
    ),
    "an attribute of the name of a function": ("out = 0\nfor x in Three():\n    out = ask.eval()", set(), set()),
    "in try": ("held = 0\nfor x in Three():\n    try:\n        held = held + x\n    except ValueError:\n        pass", {"held"}, {"held"}),
}
ALWAYS = {"no_grad", "suppress", "Three", "ask", "print", "range", "ValueError", "ZeroDivisionError", "max"}


ask.eval = lambda: 0  # type: ignore[attr-defined]
NAMES: dict[str, Any] = {"Three": Three, "ask": ask, "suppress": contextlib.suppress, "no_grad": contextlib.nullcontext}


@pytest.mark.parametrize("within", ["a function", "a module"])
@pytest.mark.parametrize("name", LOOPS)
def test_what_is_read_again(name: str, within: str) -> None:
    body, later, goes_on = LOOPS[name]
    if within == "a function":
        body = "def train():\n    " + body.replace("\n", "\n    ") + "\ntrain()"
    PLACES.clear()
    exec(compile(body, "train.py", "exec"), NAMES | {"print": lambda *_: None})  # noqa: S102
    for found in PLACES:
        assert found.later - ALWAYS == later
        assert found.goes_on - ALWAYS == goes_on


@pytest.mark.parametrize("asks", ["locals()", "eval('out')", "vars()"])
def test_who_asks_for_all_names_may_read_all(asks: str) -> None:
    PLACES.clear()
    names: dict[str, Any] = {"ask": ask}
    exec(f"def train():\n    out = 1\n    ask()\n    out = 2\n    return {asks}\ntrain()", names)  # noqa: S102
    assert "out" in PLACES[0].later
