"""What a script's own code says, by its frames and bytecode.

How it asks for its data: by a `for` loop over it, whose passes a restart can skip, or by calls of `next`. A restarted script is given
nothing for passes that were finished, so loops around them come to the same values again. A loop that advances within one pass does not:
`for step in range(1000): batch = next(batches)`. What such a script has done is found again by its steps only.

Which variables of a function may be read before they are assigned again: live variables (`reads`). What an iteration leaves in a variable
counts for the next one only if that reads it. `out = model(inputs)` at the head of each iteration is not read again; a hidden state that
is given to the model is. `PassEnds` has what variables held where passes over data were over: a restarted script runs the lines behind
these passes again.
"""

from __future__ import annotations

import ast
import bisect
import ctypes
import dis
import gc
import inspect
import itertools
import linecache
import multiprocessing.process
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, GeneratorType
from typing import Any, Final

from psjob.api import values
from psjob.process import errors
from psjob.process.errors import HERE

_DROPS: Final = ("POP_TOP", "POP_ITER", "END_FOR")
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
    own: frozenset[str]
    """Those of the loop whose head it is."""
    looped: bool
    """It lies in a loop, of any kind; the head of a loop lies in that one only if there is another around it."""


@cache
def site(code: CodeType, at: int) -> Site:
    """What lies at byte `at` of a function's code."""
    instructions = list(dis.get_instructions(code))
    targets, around, own = set[str](), set[str](), set[str]()
    drives = looped = False
    for number, one in enumerate(instructions):
        if one.opname == "FOR_ITER" and one.offset <= at < int(one.argval):
            head = at < instructions[number + 1].offset
            names = frozenset(_assigned(instructions[number + 1 :]))
            targets |= names
            drives |= head
            (own if head else around).update(names)
            looped |= not head
        elif one.opname == "SEND" and one.offset <= at < instructions[number + 1].offset:  # `yield from`
            drives = True
        elif "JUMP_BACKWARD" in one.opname and "NO_INTERRUPT" not in one.opname and int(one.argval) <= at < one.offset:
            # The jump of a loop's own end leads to its head, and that of a loop around it to somewhere before that.
            start = _meant(instructions, int(one.argval))
            looped |= not any(it.opname == "FOR_ITER" and it.offset == start <= at for it in instructions)
    return Site(drives, frozenset(targets), frozenset(around), frozenset(own), looped)


def _meant(instructions: list[dis.Instruction], target: int) -> int:
    """The instruction that a jump leads to, behind what only extends its argument."""
    return next(one.offset for one in instructions if one.offset >= target and one.opname != "EXTENDED_ARG")


def _assigned(instructions: list[dis.Instruction]) -> Iterator[str]:
    for one in instructions:
        if one.opname.startswith("STORE_"):
            yield from one.argval if isinstance(one.argval, tuple) else (str(one.argval),)
        elif one.opname not in _UNPACKS:
            return


@cache
def is_script_code(code: CodeType) -> bool:
    """Is the function the script's, and not of an installed package?"""
    return not code.co_filename.startswith(("<frozen", *errors.package_folders()))


def is_begin(frame: FrameType) -> bool:
    """Is it the script itself, or a process of multiprocessing? What has started it may be another thing after a restart."""
    own = frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"
    return own or frame.f_code is multiprocessing.process.BaseProcess._bootstrap.__code__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class BatchRequest:
    """How the script asks for a batch."""

    called: bool
    """By a call, such as `next(batches)`; a restart may not answer that with the end of a pass."""
    endless: bool
    """A generator asks that goes over its data again and again, for loops that a restart cannot advance."""
    site: str
    """Where, from the innermost function of the script on: `train.py: step: 12+40 < train.py: <module>: 30+6`."""
    values: dict[tuple[int, str], Any]
    """Of the `for` loops that lie around this pass, by frame and name; of what is no number or text its identity."""
    reused: frozenset[tuple[int, str]]
    """Those of them that the loop over the data assigns too: `for _ in range(epochs): for x, _ in loader`."""

    def advances(self, first: BatchRequest, made_by_loop: bool) -> bool:
        """Has a loop around the pass advanced since it was asked the first time? None can that has made the iterator in its own body."""
        told = {at: value for at, value in self.values.items() if not self._is_own(at, value, first, made_by_loop)}
        return told != {at: value for at, value in first.values.items() if at in told or at not in self.values}

    def _is_own(self, at: tuple[int, str], value: Any, first: BatchRequest, made_by_loop: bool) -> bool:
        """Has the loop over the data assigned it? A value of another kind than a loop around gave at first is not of that one."""
        return (made_by_loop and at[0] == 0) or (at in self.reused and type(value) is not type(first.values.get(at)))


def way(frame: FrameType | None) -> BatchRequest:
    """How data is asked for in the first frame from this one on that is not psjob's."""
    while frame is not None and frame.f_code.co_filename.startswith(HERE):
        frame = frame.f_back
    if frame is None:
        return BatchRequest(False, False, "", {}, frozenset())
    at = site(frame.f_code, frame.f_lasti)
    endless = at.drives and at.looped and bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
    values: dict[tuple[int, str], Any] = {}
    reused = set[tuple[int, str]]()
    direct, depth = frame, 0
    sites = []
    while frame is not None:
        if frame is direct or is_script_code(frame.f_code):
            sites.append(_named(frame.f_code, frame.f_lasti))
        if is_script_code(frame.f_code):
            here = site(frame.f_code, frame.f_lasti)
            names = here.around if frame is direct or at.drives else here.targets
            held = frame.f_locals if names else {}
            values.update({(depth, name): _compared(held[name]) for name in names if name in held})
            reused.update((depth, name) for name in here.around & here.own if name in names and at.drives)
        if is_begin(frame):
            break
        frame, depth = frame.f_back, depth + 1
    return BatchRequest(not at.drives, endless, " < ".join(sites), values, frozenset(reused))


def call_site(frame: FrameType) -> str:
    """The call that is made in this frame, such as `train.py: main: 12+8`: the same wherever the script lies."""
    return _named(frame.f_code, frame.f_lasti)


@cache
def _named(code: CodeType, at: int) -> str:
    """The call at byte `at`, by line and column: interpreters make one instruction of several, as they learn."""
    line, _, column, _ = next(itertools.islice(code.co_positions(), at // 2, None), (None,) * 4)
    return f"{Path(code.co_filename).name}: {code.co_qualname}: {line or code.co_firstlineno}+{column or 0}"


def _compared(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bytes | None) else ("id", id(value))


_PASS_ON: Final = (enumerate, zip, map, filter, itertools.islice, itertools.cycle, itertools.chain, GeneratorType, tuple)
_ONE_BY_ONE: Final = (enumerate, zip, map, tuple)
_SHOW_PROGRESS: Final = ("tqdm", "rich")
_LONGEST_CHAIN: Final = 8


@dataclass(frozen=True)
class Holder:
    """What goes over an iterator, such as an `enumerate`, or over what goes over it."""

    thing: object
    joins: bool
    """It goes over a `zip`, and so over other iterators too."""


def is_looped(frame: FrameType | None) -> bool:
    """Is an iterator made in this frame by a `for` loop itself, so that nothing else goes over it? Something may go over a generator."""
    return frame is not None and not frame.f_code.co_flags & inspect.CO_GENERATOR and _made_by(frame.f_code, frame.f_lasti) == "GET_ITER"


def left_by(frame: FrameType | None) -> FrameType | None:
    """The script's frame if a `for` loop there drops what it goes over, by `break` or `return`. A library's generator may lie between."""
    while frame is not None and not is_script_code(frame.f_code):
        if frame.f_code.co_filename.startswith(HERE):
            return None  # what was dropped long ago is cleared away while psjob works
        frame = frame.f_back
    return frame if frame is not None and _made_by(frame.f_code, frame.f_lasti) in _DROPS else None


def has_else(frame: FrameType) -> bool:
    """Has the loop in which this frame stands an `else`? A pass that was left is given nothing after a restart, so the `else` runs then."""
    path, line = frame.f_code.co_filename, frame.f_lineno
    around = [(first, whether) for first, last, whether in _loops(path) if first <= line <= last]
    return bool(around) and max(around)[1]


@cache
def _loops(path: str) -> tuple[tuple[int, int, bool], ...]:
    """First and last line of each `for` loop's body, and whether an `else` follows; nothing of what is no file or does not parse."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return ()
    loops = (node for node in ast.walk(tree) if isinstance(node, ast.For))
    return tuple((node.lineno, node.body[-1].end_lineno or node.lineno, bool(node.orelse)) for node in loops)


@cache
def _made_by(code: CodeType, at: int) -> str:
    return next((one.opname for one in dis.get_instructions(code) if one.offset == at), "")


def holders(iterator: object, frame: FrameType | None) -> list[Holder]:
    """What goes over an iterator that was asked in this frame, nearest first: `enumerate`, `zip`, generators such as tqdm's.

    The heap is looked through. A generator that is running does not show there what it goes over: those are found by the frames.
    """
    found: list[Holder] = []
    running = _running(frame)
    known = [Holder(iterator, False)]
    for _ in range(_LONGEST_CHAIN):
        known = _over(known, [iterator, *(each.thing for each in found)])
        found += known
        if not known:
            seen = {id(each.thing) for each in found}
            known = [Holder(each, any(type(below.thing) is zip for below in found)) for each in running if id(each) not in seen][:1]
            found += known
        if not known:
            break
    return [each for each in found if type(each.thing) is not tuple]


def _over(known: Sequence[Holder], seen: Sequence[object]) -> list[Holder]:
    things = tuple(each.thing for each in known)
    mine = {id(things), *map(id, seen)}  # Python 3.13 finds the tuple of arguments too
    above = [each for each in gc.get_referrers(*things) if type(each) in _PASS_ON and id(each) not in mine]
    joined = {id(each.thing) for each in known if each.joins or type(each.thing) is zip}
    return [Holder(each, any(id(below) in joined for below in gc.get_referents(each))) for each in above]


def _running(frame: FrameType | None) -> list[object]:
    """Generators of these frames that are not psjob's, the innermost first."""
    frames = []
    while frame is not None:
        if frame.f_code.co_flags & inspect.CO_GENERATOR and not frame.f_code.co_filename.startswith(HERE):
            frames.append(frame)
        frame = frame.f_back
    if not frames:
        return []
    there = [each for each in gc.get_objects() if type(each) is GeneratorType and each.gi_running]
    return [each for frame in frames for each in there if each.gi_frame is frame]


def keeps_count(iterator: object, chain: Sequence[Holder], own: Callable[[object], bool]) -> str:
    """What in a chain of `holders` counts or keeps batches, so that it could not continue in the middle; empty: nothing.

    `own` are iterators that find their places by themselves.
    """
    ours = {id(iterator), *(id(each.thing) for each in chain)}
    counts = any(type(each.thing) is enumerate for each in chain)
    for thing in (each.thing for each in chain):
        if isinstance(thing, itertools.cycle | itertools.islice):
            return f"itertools.{type(thing).__name__} counts or keeps what it was given"
        if isinstance(thing, zip):
            beside = [other for other in thing.__reduce__()[1] if id(other) not in ours and not own(other)]
            if beside:
                return f"zip goes over a {type(beside[0]).__name__} beside the data"
        if counts and not (isinstance(thing, _ONE_BY_ONE) or _shows_progress(thing)):
            return f"enumerate counts what a {type(thing).__name__} makes of the data"
    return ""


def _shows_progress(thing: object) -> bool:
    """A generator that gives each thing that it was given, and none else."""
    shows = tuple(f"{place}{name}/" for place in errors.package_folders() for name in _SHOW_PROGRESS)
    return isinstance(thing, GeneratorType) and thing.gi_code.co_filename.startswith(shows)


def count_on(counter: object, more: int) -> bool:
    """Let an `enumerate` continue, as if it had counted `more` already. False: it is of another form than this Python's is known to be."""
    if type(counter) is not enumerate:
        return False
    before = counter.__reduce__()[1][1]
    index = ctypes.c_ssize_t.from_address(id(counter) + object.__basicsize__)
    if index.value != before:
        return False
    index.value += more
    return bool(counter.__reduce__()[1][1] == before + more)


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
