"""Values that a stranger may send, made of right ones by small changes, and what every reader of them must keep to.

A reader gives a value or raises what it promises. It takes at most SECONDS of processor time, and allocates no more than a stated limit.
"""

from __future__ import annotations

import copy
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.heaps import small_heap

SECONDS = 1.0
"""Of this thread's processor time, for one case: a busy machine makes no difference."""
SOAK_SECONDS = 7200
"""For one test of `make soak`."""
BATCH, CHUNK = 25, 2000
"""Cases of one random generator, and generators of one run of hypothesis, which remembers all of a run."""
USUAL = 9000
"""Cases at most of one test in `make test`."""
T = TypeVar("T")


def counts(usual: int, soak: int) -> pytest.MarkDecorator:
    """Parameter `cases`: so many in `make test`, and so many in `make soak`."""
    marks = (pytest.mark.soak, pytest.mark.timeout(SOAK_SECONDS))
    return pytest.mark.parametrize("cases", [pytest.param(usual, id="usual"), pytest.param(soak, id="soak", marks=marks)])


def fuzz(cases: int, make: Callable[[Random], T], read: Callable[[T], int | None], most: int) -> None:
    """`read` what `make` makes. It raises where a reader broke its word. `most`: bytes that it may allocate for one.

    A `read` that reads several says how many. Hypothesis draws the seeds alone: to draw each change would take longer than to read it.
    The few cases of `make test` are the same each time, so that it fails only by a change; those of a soak are others each time.
    """
    done = turn = 0

    @settings(
        max_examples=min(CHUNK, -(-cases // BATCH)), database=None, deadline=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,), derandomize=cases <= USUAL,
    )  # fmt: skip
    @given(st.integers(0, 1 << 64))
    def chunk(seed: int) -> None:
        nonlocal done
        random = Random(f"{turn} {seed}")
        for _ in range(BATCH):
            if done >= cases:
                return
            value = make(random)
            try:
                done += _measured(value, read, most)
            except Exception as error:
                error.add_note(f"after {done} cases, of {value!r:.3000}")
                raise

    with small_heap():
        while done < cases:
            chunk()
            turn += 1


def _measured(value: T, read: Callable[[T], int | None], most: int) -> int:
    tracemalloc.start()
    began = time.thread_time()
    try:
        count = read(value)
    finally:
        took, peak = time.thread_time() - began, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert took <= SECONDS, f"one case took {took:.2f} s of processor time, at most {SECONDS} s are allowed"
    assert peak <= most, f"one case allocated {peak} bytes, at most {most} are allowed"
    return 1 if count is None else count


# -- bytes -----------------------------------------------------------------------------------------

EDGES = (0, 1, 2, 7, 8, 16, 255, 256, (1 << 16) - 1, 1 << 16, (1 << 20) + 1, 1 << 26, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32,
         (1 << 48) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2, -(1 << 31), -(1 << 63))  # fmt: skip
"""Numbers at which a field of bytes, or a limit, ends."""
Change = tuple[str, int, int]
"""How, where, and with what."""
_HOW = ("flip", "set", "cut", "repeat", "insert", "remove", "number", "number", "splice")
_PLACES = 1 << 16


def byte_changes(random: Random) -> list[Change]:
    """One to four, as `changed_bytes` takes them."""
    return [
        (random.choice(_HOW), random.randrange(_PLACES), random.choice(EDGES) if random.random() < 0.5 else random.randrange(256))
        for _ in range(random.choice((1, 1, 2, 4)))
    ]


def changed_bytes(raw: bytes, changes: list[Change]) -> bytes:
    """`raw` after these changes."""
    made = bytearray(raw)
    for how, place, value in changes:
        at = place % (len(made) + 1)
        match how:
            case "flip":
                made[at : at + 1] = bytes(byte ^ (value & 0xFF or 1) for byte in made[at : at + 1])
            case "set":
                made[at : at + 1] = bytes([value & 0xFF])
            case "cut":
                del made[at:]
            case "repeat":
                made[at:at] = made[at : at + 1 + value % 64] * (1 + value % 7)
            case "insert":
                made[at:at] = bytes([value & 0xFF]) * (1 + value % 9)
            case "remove":
                del made[at : at + 1 + value % 16]
            case "number":
                size = (1, 2, 4, 8)[place % 4]
                made[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
            case "splice":
                made[at:] = made[(at + value) % (len(made) + 1) :]
    return bytes(made)


# -- JSON ------------------------------------------------------------------------------------------

DROP, TWICE = object(), object()
_DEEP: Any = []
for _ in range(60):
    _DEEP = [_DEEP]
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 1.5, -0.0, 1e308, 1e999, float("nan"), (1 << 31), (1 << 53) + 1, (1 << 63) - 1,
    1 << 63, 1 << 64, -(1 << 63), 10**400, "", "x", "0", "-1", "nan", "../x", "a b", "\ud800", "é", "\0", "\x1b[2J", "~float", "x" * 600,
    [], {}, [[]], [None],
    [0, 0], [1, "x"], {"": 0}, {"x": None}, _DEEP, DROP, DROP, DROP, TWICE, TWICE,
)  # fmt: skip
"""What stands in the place of a right value."""
JsonChange = tuple[int, Any]


def json_changes(random: Random) -> list[JsonChange]:
    """One to three, as `changed_json` takes them."""
    return [(random.randrange(_PLACES), random.choice(ODD)) for _ in range(random.choice((1, 1, 2, 3)))]


def changed_json(body: Any, changes: list[JsonChange]) -> Any:
    """A copy of `body` after these changes, each at a place in it."""
    made = [copy.deepcopy(body)]
    for place, value in changes:
        places = list(_places(made))
        holder, key = places[place % len(places)]
        if value is DROP:
            if holder is not made:
                del holder[key]
        elif value is TWICE:
            if isinstance(holder, list) and holder is not made:
                holder.insert(key, copy.deepcopy(holder[key]))
            elif isinstance(holder, dict):
                holder[f"{key}x"] = copy.deepcopy(holder[key])
        else:
            holder[key] = copy.deepcopy(value)
    return made[0]


def written(body: Any) -> bytes:
    """As JSON, with what JSON does not have where it is there."""
    return json.dumps(body).encode()


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in list(enumerate(holder)) if isinstance(holder, list) else list(holder.items()):
        yield holder, key
        if isinstance(value, list | dict):
            yield from _places(value)
