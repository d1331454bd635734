"""Which variables of a function may be read before they are assigned again: live variables, by its bytecode.

What an iteration leaves in a variable counts for the next one only if that reads it. `out = model(inputs)` at the head of each iteration
is not read again; a hidden state that is given to the model is.

What variables held where passes over data were over: a restarted script runs the lines behind these passes again. Pure.
"""

from __future__ import annotations

import bisect
import dis
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any, Final

from psjob.api import values

_READ: Final = ("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
_WRITTEN: Final = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "DELETE_FAST", "DELETE_NAME", "DELETE_GLOBAL")
_LEAVES: Final = frozenset(
    ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")
)
"""What follows such an instruction is not what runs next."""
_READS_ALL: Final = frozenset(("locals", "vars", "globals", "eval", "exec"))
_JUMPS: Final = frozenset((*dis.hasjrel, *dis.hasjabs))
_PASS_ERRORS_ON: Final = frozenset((
    "no_grad", "enable_grad", "set_grad_enabled", "inference_mode", "autocast", "amp", "no_sync", "accumulate", "device", "stream",
    "record_function", "profile", "Profile", "sdpa_kernel", "parallelize", "anomaly_mode", "detect_anomaly", "open", "tqdm", "Progress",
))  # fmt: skip
"""Context managers by which no error ends, so that what follows the block has what was assigned in it. Others may end one."""


@dataclass(frozen=True)
class Reads:
    """Names that may be read, from one instruction of a function on."""

    later: frozenset[str]
    goes_on: frozenset[str]
    """The same; if the instruction is the head of a `for` loop, only if that is given something more."""


@cache
def reads(code: CodeType, at: int) -> Reads:
    """What a function reads that calls another one at byte `at` of its code, before it assigns it again.

    Handlers of exceptions count. So do names that functions within it use. If it asks for all names, as `locals()` does, all are.
    """
    flow = _flow(code)
    if flow.asks_for_all:
        return Reads(flow.names, flow.names)
    number = bisect.bisect_right(flow.offsets, at) - 1
    after = flow.after[number]
    kept = flow.captured
    later = kept.union(*(flow.before[one] for one in after))
    goes_on = kept | flow.before[after[0]] if flow.heads[number] and after else later
    return Reads(later, goes_on)


@dataclass(frozen=True)
class _Flow:
    """Of a function, by the number of an instruction."""

    offsets: list[int]
    after: list[tuple[int, ...]]
    """What may run next; of the head of a `for` loop its body first."""
    before: list[frozenset[str]]
    """Names that are read from here on."""
    heads: list[bool]
    captured: frozenset[str]
    names: frozenset[str]
    asks_for_all: bool


@cache
def _flow(code: CodeType) -> _Flow:
    instructions = list(dis.get_instructions(code))
    offsets = [one.offset for one in instructions]
    number_at = {offset: number for number, offset in enumerate(offsets)}
    entries: list[Any] = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    handlers = [(entry.start, entry.end, number_at[entry.target]) for entry in entries]
    after = [
        (*_next(one, number, number_at), *(target for start, end, target in handlers if start <= one.offset < end))
        for number, one in enumerate(instructions)
    ]
    for jump in _after_errors(instructions, entries, number_at):
        after[jump] = after[jump][:1]
    uses = list(_uses_of_all(instructions))
    before: list[frozenset[str]] = [frozenset()] * len(instructions)
    changed = True
    while changed:
        changed = False
        for number in range(len(instructions) - 1, -1, -1):
            live = frozenset[str]().union(*(before[one] for one in after[number]))
            for name, is_read in reversed(uses[number]):
                live = live | {name} if is_read else live - {name}
            changed |= live != before[number]
            before[number] = live
    captured = frozenset((*code.co_cellvars, *code.co_freevars, *_globals_within(code)))
    names = frozenset((*code.co_varnames, *code.co_names)) | captured
    heads = [one.opname == "FOR_ITER" for one in instructions]
    asks_for_all = any(is_read and name in _READS_ALL for using in uses for name, is_read in using)  # `model.eval` is no such name
    return _Flow(offsets, after, before, heads, captured, names, asks_for_all)


def _next(one: dis.Instruction, number: int, number_at: dict[int, int]) -> Iterator[int]:
    if one.opname not in _LEAVES and number + 1 < len(number_at):
        yield number + 1
    if one.opcode in _JUMPS:
        yield number_at[int(one.argval)]


def _after_errors(instructions: list[dis.Instruction], entries: Iterable[Any], number_at: dict[int, int]) -> Iterator[int]:
    """Jumps to what follows a `with` block that has ended an error, of managers that end none."""
    starts: dict[int, int] = {}
    for entry in entries:
        starts[number_at[entry.target]] = min(number_at[entry.start], starts.get(number_at[entry.target], len(instructions)))
    for handler, start in starts.items():
        if [one.opname for one in instructions[handler : handler + 2]] != ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]:
            continue
        names = set(_names_in_head(instructions, start - 1))
        if _PASS_ERRORS_ON & names and "suppress" not in names:
            yield next(number for number in range(handler, len(instructions)) if instructions[number].opcode in _JUMPS)


def _names_in_head(instructions: list[dis.Instruction], last: int) -> Iterator[str]:
    """Names in the line of a `with` whose block begins behind the instruction `last`."""
    line = _line(instructions[last])
    for number in range(last, -1, -1):
        if _line(instructions[number]) < line:
            return
        if instructions[number].opname.startswith("LOAD_"):
            yield str(instructions[number].argval)


def _line(one: dis.Instruction) -> int:
    return (one.positions.lineno or 0) if one.positions is not None else 0


def _uses_of_all(instructions: list[dis.Instruction]) -> Iterator[tuple[tuple[str, bool], ...]]:
    """Of each instruction, `_uses`. Variables of a comprehension are its own, though its code may be within the function's (PEP 709)."""
    within: list[list[str]] = []
    """Of comprehensions, those that are not yet what they were."""
    ends = False
    for number, one in enumerate(instructions):
        if one.opname == "LOAD_FAST_AND_CLEAR":
            if number == 0 or instructions[number - 1].opname != one.opname:
                within.append([])
            within[-1].append(one.argval)
            yield ()
            continue
        ends = one.opname == "END_FOR" or (ends and one.opname.startswith(_BEHIND))
        found: list[tuple[str, bool]] = []
        for name, is_read in _uses(one) if not _is_after_an_error(instructions, number) else ():
            if ends and within and name in within[-1]:
                within[-1].remove(name)
            elif "_FAST" in one.opname and any(name in names for names in within):
                found.append((f"{name} of a comprehension", is_read))
            else:
                found.append((name, is_read))
        if within and not within[-1]:
            within.pop()
        yield tuple(found)


_BEHIND: Final = ("POP_TOP", "POP_ITER", "SWAP", "STORE_")
"""What is between the end of a comprehension's loop and the variables that it gives back, or is one of these."""


def _is_after_an_error(instructions: list[dis.Instruction], number: int) -> bool:
    """Does this give back a variable after an error in a comprehension?"""
    first, last = number, number
    while first and instructions[first].opname.startswith("STORE_FAST"):
        first -= 1
    while last + 1 < len(instructions) and instructions[last].opname.startswith("STORE_FAST"):
        last += 1
    return first < number and instructions[first].opname in _BEHIND[:3] and instructions[last].opname == "RERAISE"


def _uses(one: dis.Instruction) -> Iterator[tuple[str, bool]]:
    """The names that an instruction reads (True) or writes, in its order. `STORE_FAST_LOAD_FAST` has two."""
    names: Iterable[str] = one.argval if isinstance(one.argval, tuple) else (one.argval,)
    if one.opname == "STORE_FAST_LOAD_FAST":
        first, second = names
        yield from ((first, False), (second, True))
    elif one.opname.startswith(_READ):
        yield from ((str(name), True) for name in names)
    elif one.opname.startswith(_WRITTEN):
        yield from ((str(name), False) for name in names)


def _globals_within(code: CodeType) -> Iterator[str]:
    """Global names that functions within this one read, at any depth."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from (str(one.argval) for one in dis.get_instructions(inner) if one.opname.startswith(_READ[1:]))
            yield from _globals_within(inner)


NEWEST: Final = 32
"""Passes of one place in the script of which numbers are kept."""
Found = dict[str, dict[str, Any]]
"""By function under way, and by name in it: `epoch`, `stopper.best`."""
Kept = Mapping[str, Mapping[str, Any]]
"""That of a record."""


class PassEnds:
    """By place in the script: all plain values as its last pass was over or left, and the numbers as each of its newest passes was."""

    def __init__(self) -> None:
        self._last: dict[str, Found] = {}
        self._numbers: dict[str, dict[int, Found]] = {}

    def note(self, site: str, number: int, found: Found, runs_again: bool) -> None:
        """Pass `number` is over, or left. `runs_again`: so do the lines behind it after a restart."""
        self._last[site] = {function: {name: values.copied(value) for name, value in those.items()} for function, those in found.items()}
        ends = self._numbers.setdefault(site, {})
        if runs_again:
            ends[number] = {function: _numbers(those) for function, those in found.items()}
        if len(ends) > NEWEST:
            del ends[min(ends)]

    def take(self, site: str, number: int, state: Mapping[str, Any], plain: Kept) -> Found:
        """What the lines behind pass `number` of this place find, by what a record holds: its `state`, and the script's `plain` values."""
        last = self._last.setdefault(site, over(plain, state.get("ended", {}).get(site, {})))
        ends = self._numbers.setdefault(site, {int(each): found for each, found in state.get("ends", {}).get(site, [])})
        if not ends:
            return last
        return over(last, ends.get(number, ends[min(ends)] if number < min(ends) else {}))

    def state(self, changed: Found, held: Callable[[Found], Found]) -> dict[str, Any]:
        """For a record. Values that are as in `changed`, the script's own of now, are left out."""
        return {
            "ended": {site: held(values.changed(found, changed)) for site, found in self._last.items()},
            "ends": {site: [[number, found] for number, found in ends.items()] for site, ends in self._numbers.items()},
        }


def over(found: Kept, newer: Kept) -> Found:
    """The values of both; those of `newer` where both have one."""
    return {function: {**found.get(function, {}), **newer.get(function, {})} for function in {*found, *newer}}


def _numbers(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if type(value) in (int, float, bool)}
