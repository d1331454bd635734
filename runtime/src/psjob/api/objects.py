"""Objects that variables hold: what is in them by path, and a mark of what cannot be copied.

A path is a variable's name and the parts below it: `stopper.best`, `meters.loss.sum`, `stages.1.lr`. Parts are attributes, keys of dicts,
items of lists, and variables that a function has taken along from where it was defined.

Objects of libraries hold numbers, arrays and random generators that change as a script trains. A loop whose place is found by its steps
makes its lines again with later weights. What they play or draw by these weights is other than it was: the game of an environment, the
rollout of an agent. So its records hold what objects of libraries hold. In other loops they hold what an object with a `state_dict` has
besides that, since many a `load_state_dict` works out a part of it anew.

What is said of a start that is not what the one before it was: what it has lost, what it made otherwise, where its loop begins.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import queue
import sys
import zlib
from argparse import Namespace
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from operator import length_hint
from subprocess import Popen
from types import (
    BuiltinFunctionType,
    CellType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Final

import torch

from psjob.api import advice, script_code, values
from psjob.process import errors
from psjob.process.errors import Refused
from psjob.resume import tagged

MOST: Final = 100
"""Items of a list or dict that are looked into one by one."""
DEEP: Final = 8
"""Objects within objects, in a mark."""
BUDGET: Final = 2000
"""Values in a mark; there is none of what holds more."""
_WRITTEN: Final = (*tagged.WRITTEN, bytearray, array, itertools.count, slice)
"""Classes whose `repr` says all of a value."""
_PASS_ON: Final = (GeneratorType, enumerate, zip, map, filter, itertools.islice, itertools.chain, tuple)
_ADVANCE: Final[tuple[type, ...]] = (
    type(iter([])),
    type(iter(())),
    type(iter({})),
    type(iter({}.values())),
    type(iter({}.items())),
    type(iter(range(0))),
)
"""Iterators that know how much is left."""


def is_of_script(kind: type) -> bool:
    """Is it a class of the script's, and not of an installed package?"""
    if kind in (SimpleNamespace, Namespace) or kind.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and not file.startswith(errors.package_folders())


def is_dead(value: Any) -> bool:
    """Is it a proxy of what is no longer there?"""
    try:
        isinstance(value, torch.Tensor)
    except Exception:
        return True
    return False


def is_record(value: Any) -> bool:
    """Is it an object of a library that holds only plain values, such as a meter of a mean?"""
    inner = _attributes(value)
    return type(inner) is dict and bool(inner) and all(is_copied(item) for item in inner.values())


def is_copied(value: Any) -> bool:
    """Can a record hold a copy of it? Tensors of several numbers are another matter."""
    return values.is_plain(value) or (type(value) in values.SEVERAL and values.count(value) <= values.MOST)


def parts_of_value(value: Any) -> dict[str, Any]:
    """What it holds, by name."""
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if type(key) is str and "." not in key}
    if isinstance(value, list | tuple):
        return {str(number): item for number, item in enumerate(value)}
    if isinstance(value, MethodType):
        return {"self": value.__self__}
    found = {**dict(_slots(value)), **(_attributes(value) or {})}
    if type(value) is FunctionType:
        found |= {name: cell.cell_contents for name, cell in _cells(value) if _is_full(cell)}
        found |= {f"{name}=": default for name, default in _defaults(value) if type(default) in values.SEVERAL}
    return found


def is_mixed(value: Any) -> bool:
    """Is it a list or dict of which no copy can be made, but perhaps of its parts?"""
    if not isinstance(value, dict | list | tuple) or len(value) > MOST:
        return False
    items = value.values() if isinstance(value, dict) else value
    return not all(issubclass(type(item), torch.Tensor) for item in items)


def within(value: Any, deep: int = 0) -> Iterator[tuple[str, Any]]:
    """Lists, dicts and the like in one, by path: those that others may share."""
    if isinstance(value, list | dict | tuple) and len(value) <= MOST and deep <= values.DEEP:
        for name, item in parts_of_value(value).items():
            if type(item) in values.SEVERAL:
                yield name, item
                yield from ((f"{name}.{path}", inner) for path, inner in within(item, deep + 1))


def set_part(holder: Any, name: str, value: Any) -> None:
    """Assign what `parts_of_value` gives under this name. A tuple keeps what it has."""
    if isinstance(holder, dict):
        holder[name] = value
    elif isinstance(holder, list):
        if int(name) < len(holder):
            holder[int(name)] = value
    elif isinstance(holder, MethodType):
        pass  # it is always of the same object
    elif type(holder) is FunctionType and name.endswith("="):
        holder.__defaults__ = tuple(value if f"{each}=" == name else default for each, default in _defaults(holder))
    elif type(holder) is FunctionType and name in holder.__code__.co_freevars:
        dict(_cells(holder))[name].cell_contents = value
    elif isinstance(holder, type):
        setattr(holder, name, value)
    elif not isinstance(holder, tuple):
        inner = _attributes(holder)
        if isinstance(inner, dict) and name not in dict(_slots(holder)):
            inner[name] = value
        else:
            object.__setattr__(holder, name, value)


def assign_locals(frame: FrameType, names: dict[str, Any], assigned: Mapping[str, Any]) -> None:
    """Assign local variables of a function that is under way (PEP 667; before Python 3.13 by the call that debuggers use)."""
    names.update(assigned)
    if names is not frame.f_globals and sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def at(names: Mapping[str, Any], path: str) -> Any:
    """The value at a path; None where there is none."""
    name, *inner = path.split(".")
    value = names.get(name)
    for part in inner:
        value = None if value is None else parts_of_value(value).get(part)
    return value


def _attributes(value: Any) -> Mapping[str, Any] | None:
    try:
        inner = vars(value)
    except Exception:  # it has none, or a property of that name
        return None
    return inner if isinstance(inner, Mapping) else None


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            held = f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            member = vars(kind).get(held)
            if isinstance(member, MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # nothing was assigned yet
                    yield held, member.__get__(value)


def _cells(function: FunctionType) -> Iterator[tuple[str, CellType]]:
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def _defaults(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Values of its parameters that stay from call to call, by name; not those of keywords only."""
    code, given = function.__code__, function.__defaults__ or ()
    return zip(code.co_varnames[code.co_argcount - len(given) : code.co_argcount], given, strict=True)


def _is_full(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def mark_of(thing: Any, known: Collection[int] = (), trained: Mapping[int, int] | None = None) -> int | None:
    """A checksum of the class of something and of what it holds, for what no record can copy; None if it holds too much.

    Of objects of libraries it is that of the class. So it is of those that are `known` by their identity, since others look at their parts.
    Of a list or dict among these it is that of the length and of what has no path, too. Of tensors that are `trained`, by their identity,
    it is that of the number: their values change with each step.
    """
    try:
        return _sum(_words(thing, _Marking(frozenset(known), trained or {}), 0))
    except Exception:  # _TooMuchError, and what odd classes raise
        return None


class _TooMuchError(Exception):
    """It holds more than is looked at."""


@dataclass
class _Marking:
    known: frozenset[int]
    trained: Mapping[int, int]
    seen: dict[int, int] = field(default_factory=dict)
    """Objects, by identity, in the order in which they were met."""
    left: int = BUDGET


def _sum(words: Iterable[str]) -> int:
    return zlib.crc32("\0".join(words).encode())


def _words(thing: Any, marking: _Marking, deep: int) -> Iterator[str]:
    kind, seen = type(thing), marking.seen
    name = f"{kind.__module__}.{kind.__qualname__}"
    marking.left -= 1
    if marking.left < 0:
        raise _TooMuchError
    if kind is int:
        yield hex(thing)
    elif kind in (*values.SIMPLE, str, bytes) or isinstance(thing, _WRITTEN):
        yield repr(thing)
    elif id(thing) in marking.trained:
        yield f"trained {marking.trained[id(thing)]}"
    elif isinstance(thing, torch.Tensor):
        yield f"{name} {values.checksum(thing)}"
    elif isinstance(thing, FunctionType | BuiltinFunctionType | MethodType | type):
        yield f"{name} {thing.__module__}.{thing.__qualname__}"
    elif id(thing) in seen:
        yield f"again {seen[id(thing)]}"
    elif isinstance(thing, ModuleType) or deep > DEEP:
        yield name
    elif id(thing) in marking.known:
        yield name
        if not deep:
            for inner in _apart(thing):
                yield from _words(inner, marking, deep + 1)
    else:
        seen[id(thing)] = len(seen)
        yield name
        if isinstance(thing, set | frozenset):
            yield from sorted(str(_sum(_words(item, marking, deep + 1))) for item in thing)
        else:
            for inner in _inner(thing):
                yield from _words(inner, marking, deep + 1)


def _apart(thing: Any) -> Iterator[Any]:
    """What a mark is made of if others look at the parts: what no part says, and all of a tuple, whose parts cannot be assigned."""
    if isinstance(thing, tuple):
        yield from thing
    elif isinstance(thing, list | dict):
        yield len(thing)
    if isinstance(thing, dict):
        named = parts_of_value(thing)
        yield from named
        yield from itertools.chain.from_iterable((key, item) for key, item in thing.items() if type(key) is not str or key not in named)


def gives_data(thing: Any) -> bool:
    """Is it a generator of the script's that goes over data of psjob, so that its place is found by that?"""
    return isinstance(thing, GeneratorType) and script_code.is_script_code(thing.gi_code) and _gives_data(thing)


def _gives_data(generator: Any, deep: int = 0) -> bool:
    within = gc.get_referents(generator)
    if any(type(each).__module__.partition(".")[0] == "psjob" for each in within):
        return True
    return deep < DEEP and any(_gives_data(each, deep + 1) for each in within if isinstance(each, _PASS_ON))


def _inner(thing: Any) -> Iterator[Any]:
    """What a mark is made of besides the class."""
    if isinstance(thing, dict):
        yield from itertools.chain.from_iterable(thing.items())
    elif isinstance(thing, list | tuple | deque):
        yield from thing
    elif isinstance(thing, torch.optim.Optimizer):
        for group in thing.param_groups:
            yield {name: value for name, value in group.items() if name != "params"}
        yield [list(state.values()) for state in thing.state.values()]
    elif isinstance(thing, functools.partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, queue.Queue):
        yield list(thing.queue)
    elif type(thing) in _ADVANCE:
        yield length_hint(thing)
    elif isinstance(thing, GeneratorType):
        if thing.gi_frame is not None and script_code.is_script_code(thing.gi_code) and not thing.gi_running and not _gives_data(thing):
            yield thing.gi_frame.f_lasti
            yield dict(thing.gi_frame.f_locals)
    elif is_of_script(type(thing)):
        yield parts_of_value(thing)


BESIDE: Final = 2
"""Objects within an object that has a state, as the state of an engine."""
LIBRARY_DEEP: Final = 14
"""The same for one of a loop whose place is found by its steps: an environment lies in some wrappers, and these in a list."""
ENTERED: Final = 1000
"""Objects and lists that are looked into."""
Found = Mapping[str, Mapping[str, Any]]
"""By function and path."""
_TEXTS: Final = (str, bytes, *tagged.WRITTEN)
"""They may name a file or an address of this process."""
_NO_STATE: Final = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_OTHERS: Final = frozenset((*sys.stdlib_module_names, "numpy", "psjob", "torch", "_pytest", "pluggy", "hypothesis"))
"""Packages whose objects are not looked into: threads, files and locks are of this process, and what runs tests keeps what it undoes."""


def is_entered(value: Any) -> bool:
    """Is it an object of a library's own class, that is no model, optimizer, dataset or loader?"""
    return _is_looked_into(value) and not is_of_script(type(value))


@dataclass
class Met:
    """What was met as the objects of all variables were looked through."""

    entered: set[int] = field(default_factory=set)
    """Those that a path has led to already, by identity."""
    hidden: list[str] = field(default_factory=list)
    """Those that hold a state which no attribute shows, such as a simulator in C++ or another process: path and class."""


def library_parts(thing: Any, way: str, deep: int, met: Met, kept: Collection[int]) -> Iterator[tuple[str, Any]]:
    """By path, the numbers, arrays, tensors, and objects with a state that it holds. No texts. `kept` are looked at by others."""
    todo = deque([(way, thing, deep)])
    while todo:
        path, holder, left = todo.popleft()
        if id(holder) in met.entered or len(met.entered) >= ENTERED:
            continue
        met.entered.add(id(holder))
        for name, part in list(parts_of_value(holder).items()):
            if name.startswith("__") or "." in name or id(part) in kept or is_dead(part):
                continue
            if _is_value(part):
                yield f"{path}.{name}", part
            elif _is_hidden(part):
                met.hidden.append(f"{path}.{name} ({type(part).__name__})")
            elif left and (is_mixed(part) or _is_looked_into(part)):
                todo.append((f"{path}.{name}", part, left - 1))


def _is_looked_into(value: Any) -> bool:
    """Is it of a library's class, or of the script's?"""
    kind = type(value)
    if issubclass(kind, (*_NO_STATE, *values.NOT_PLAIN, BaseException)) or kind in values.SEVERAL:
        return False
    return kind.__module__.partition(".")[0] not in _OTHERS


def _is_hidden(value: Any) -> bool:
    """Does it hold a state that no attribute shows?"""
    kind = type(value)
    if issubclass(kind, (BaseProcess, Popen)):
        return True
    foreign = kind.__module__.partition(".")[0] not in (*_OTHERS, "builtins")
    return foreign and _is_looked_into(value) and not hasattr(value, "__dict__") and not parts_of_value(value)


def tell_hidden(hidden: Sequence[str], now: Found, then: Found) -> None:
    """Say that what a restarted script has played otherwise than the lost one continues in objects that cannot be put back.

    `now` and `then` are values in objects of libraries, by function and path. Times differ from start to start.
    """
    others = [
        path
        for function, those in then.items()
        for path, value in those.items()
        if type(value) is not float and path in now.get(function, {}) and not values.same_value(now[function][path], value)
    ]
    if hidden and others:
        advice.tell_once(
            "hidden",
            f"{hidden[0]} holds a state that is not seen. Before its place this start has come to another {others[0]} than the lost one, "
            "and so that state may be another one too. Begin each game anew behind a step, so that a restart changes nothing",
        )


def _is_value(part: Any) -> bool:
    """Is it looked at by itself?"""
    if type(part) in _TEXTS:
        return False
    return is_copied(part) or values.is_wide(part) or (values.is_stateful(part) and not _is_looked_into(part))


def refuse_lost(found: Sequence[str]) -> None:
    """Raises Refused if this start has not made again what had changed: names with their classes."""
    lost = list(dict.fromkeys(found))
    if lost:
        raise Refused(
            f"{', '.join(lost[:5])}{' …' if len(lost) > 5 else ''} had changed since the script began to train, and nobody keeps it, "
            f"so that this start cannot continue as the lost process would have. Give it to attach or to ps.state, such as "
            f"ps.state({lost[0].partition(' ')[0].rpartition('.')[2]}=…), and begin a new run"
        )


def tell_lost(name: str, thing: Any, when: str) -> None:
    """Say once that something changes which nobody keeps. `when`: what will be refused then."""
    word = name.rpartition(".")[2]
    advice.tell_once(
        "lost",
        f"{name} ({type(thing).__name__}) changes as the script trains, and nobody keeps it: {when} refused. Give it to attach, or "
        f"declare it: ps.state({word}=…)",
    )


def check_loops(loops: Mapping[str, Mapping[str, int]], now: Mapping[str, Mapping[str, int]]) -> None:
    """Raises Refused if the script has begun its loop further on, as one that continues from a file of its own.

    By function and variable, the numbers at which `for` loops were as the script first asked for data.
    """
    for function, names in loops.items():
        for name, began in names.items():
            begins = now.get(function, {}).get(name, began)
            if begins != began:
                raise Refused(
                    f"the loop over {name} began at {begins} in this start, and at {began} in the one before. The script continues from a "
                    f"file of its own, and so does psjob. Write `for {name} in ps.epochs(n)`, which gives what is left of it wherever "
                    "the script begins. Or do not read that file in a job"
                )


def check_made(made: Mapping[str, Mapping[str, Collection[Any]]], now: Mapping[tuple[str, str], int]) -> None:
    """Raises Refused if what had not changed when the record was made is not what it was: by function and name, class and checksum."""
    for function, names in made.items():
        for path, (kind, sample) in names.items():
            if now.get((function, path), sample) != sample:
                raise Refused(
                    f"{path} ({kind}) is made anew in this start, and is not what it was in the one before. It is made of the model's "
                    "weights, or of random numbers without a seed. Give it to attach or to ps.state, such as "
                    f"ps.state({path.rpartition('.')[2]}=…)"
                )


def check_counts(path: str, thing: Any, given: Mapping[str, Any]) -> None:
    """Raises Refused if an object gives other counts than those that it was given by `load_state_dict`: it works them out anew."""
    now, again = values.plain_state(thing) or {}, values.plain_state(thing) or {}
    for key, wanted in given.items() if now else ():
        found = now.get(key)
        if type(wanted) in (bool, int, str) and not values.same_value(found, wanted) and values.same_value(found, again.get(key)):
            raise Refused(
                f"{path} ({type(thing).__name__}) was given {key} = {wanted!r} by its load_state_dict, and its state_dict says "
                f"{found!r} after that. Keep what it counts in ps.state, such as ps.state({key}=…), and begin a new run"
            )
