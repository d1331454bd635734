"""How a script asks for its data: by a `for` loop over it, whose passes a restart can skip, or by calls of `next`. Read from its frames.

A restarted script is given nothing for passes that were finished, so loops around them come to the same values again. A loop that advances
within one pass does not: `for step in range(1000): batch = next(batches)`. What such a script has done is found again by its steps only.
"""

from __future__ import annotations

import ctypes
import dis
import gc
import inspect
import itertools
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, GeneratorType
from typing import Any, Final

HERE: Final = f"{Path(__file__).parents[1]}/"
FOREIGN: Final = (HERE, *(f"{Path(sysconfig.get_path(name))}/" for name in ("stdlib", "purelib", "platlib")))
_UNPACKS: Final = ("UNPACK_SEQUENCE", "UNPACK_EX", "EXTENDED_ARG", "CACHE", "NOP")


@dataclass(frozen=True)
class Site:
    """An instruction of a function, and the loops that it lies in."""

    drives: bool
    """It is the head of a `for` loop, or `yield from`: the end of what it goes over does not end the function."""
    targets: frozenset[str]
    """Names that the `for` loops assign in which it lies, or whose head it is."""
    around: frozenset[str]
    """Those of the loops in which it lies."""
    looped: bool
    """It lies in a loop, of any kind; the head of a loop lies in that one only if there is another around it."""


@cache
def site(code: CodeType, at: int) -> Site:
    """What lies at byte `at` of a function's code."""
    instructions = list(dis.get_instructions(code))
    targets, around = set[str](), set[str]()
    drives = looped = False
    for number, one in enumerate(instructions):
        if one.opname == "FOR_ITER" and one.offset <= at < int(one.argval):
            head = at < instructions[number + 1].offset
            names = frozenset(_assigned(instructions[number + 1 :]))
            targets |= names
            drives |= head
            around |= frozenset() if head else names
            looped |= not head
        elif one.opname == "SEND" and one.offset <= at < instructions[number + 1].offset:  # `yield from`
            drives = True
        elif "JUMP_BACKWARD" in one.opname and "NO_INTERRUPT" not in one.opname and int(one.argval) <= at < one.offset:
            # The jump of a loop's own end leads to its head, and that of a loop around it to somewhere before that.
            looped |= not any(it.opname == "FOR_ITER" and it.offset == int(one.argval) and it.offset <= at for it in instructions)
    return Site(drives, frozenset(targets), frozenset(around), looped)


def _assigned(instructions: list[dis.Instruction]) -> Iterator[str]:
    for one in instructions:
        if one.opname.startswith("STORE_"):
            yield from one.argval if isinstance(one.argval, tuple) else (str(one.argval),)
        elif one.opname not in _UNPACKS:
            return


@cache
def is_script(code: CodeType) -> bool:
    """Is the function the script's, and not of an installed package?"""
    return not code.co_filename.startswith(("<frozen", *FOREIGN))


@dataclass(frozen=True)
class Way:
    """How the script asks for a batch."""

    called: bool
    """By a call, such as `next(batches)`; a restart may not answer that with the end of a pass."""
    endless: bool
    """A generator asks that goes over its data again and again, for loops that a restart cannot advance."""
    site: str
    """Where: `train.py: main: 12`."""
    values: dict[tuple[int, str], Any]
    """Of the `for` loops that lie around this pass, by frame and name; of what is no number or text its identity."""


def way(frame: FrameType | None) -> Way:
    """How data is asked for in the first frame from this one on that is not psjob's."""
    while frame is not None and frame.f_code.co_filename.startswith(HERE):
        frame = frame.f_back
    if frame is None:
        return Way(False, False, "", {})
    at = site(frame.f_code, frame.f_lasti)
    endless = at.drives and at.looped and bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
    values: dict[tuple[int, str], Any] = {}
    direct, depth = frame, 0
    place = f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_qualname}: {frame.f_lineno}"
    while frame is not None:
        if is_script(frame.f_code):
            here = site(frame.f_code, frame.f_lasti)
            names = here.around if frame is direct or at.drives else here.targets
            held = frame.f_locals if names else {}
            values.update({(depth, name): _compared(held[name]) for name in names if name in held})
        frame, depth = frame.f_back, depth + 1
    return Way(not at.drives, endless, place, values)


def _compared(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bytes | None) else ("id", id(value))


_PASS_ON: Final = (enumerate, zip, map, filter, itertools.islice, itertools.cycle, itertools.chain, GeneratorType, tuple)
_LONGEST_CHAIN: Final = 6


def holders(iterator: object) -> list[object]:
    """The iterators that go over this one, nearest first: `enumerate`, `zip`, generators such as tqdm's. The heap is looked through."""
    found: list[object] = []
    known = [iterator]
    for _ in range(_LONGEST_CHAIN):
        mine = {id(each) for each in (*known, *found)}
        known = [each for each in gc.get_referrers(*known) if type(each) in _PASS_ON and id(each) not in mine]
        if not known:
            break
        found += known
    return [each for each in found if type(each) is not tuple]


def keeps_count(iterator: object, chain: Sequence[object], own: Callable[[object], bool]) -> str:
    """What in a chain of `holders` counts or keeps batches, so that it could not go on in the middle; empty: nothing.

    `own` are iterators that find their places by themselves.
    """
    ours = {id(each) for each in (iterator, *chain)}
    for each in chain:
        if isinstance(each, itertools.cycle | itertools.islice):
            return f"itertools.{type(each).__name__} counts or keeps what it was given"
        if isinstance(each, zip):
            beside = [other for other in each.__reduce__()[1] if id(other) not in ours and not own(other)]
            if beside:
                return f"zip goes over a {type(beside[0]).__name__} beside the data"
    return ""


def count_on(counter: object, more: int) -> bool:
    """Let an `enumerate` go on, as if it had counted `more` already. False: it is of another form than this Python's is known to be."""
    if type(counter) is not enumerate:
        return False
    before = counter.__reduce__()[1][1]
    index = ctypes.c_ssize_t.from_address(id(counter) + object.__basicsize__)
    if index.value != before:
        return False
    index.value += more
    return bool(counter.__reduce__()[1][1] == before + more)
