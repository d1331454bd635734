"""What objects of libraries hold that changes as a script trains: numbers, arrays, random generators, by path.

A loop whose place is found by its steps makes its lines again with later weights. What they play or draw by these weights is other than it
was: the game of an environment, the rollout of an agent. So its records hold what objects of libraries hold. In other loops they hold what
an object with a `state_dict` has besides that, since many a `load_state_dict` works out a part of it anew.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from subprocess import Popen
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from psjob.api import advice, objects, values
from psjob.resume import tagged

BESIDE: Final = 2
"""Objects within an object that has a state, as the state of an engine."""
DEEP: Final = 14
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
    return _is_looked_into(value) and not objects.is_of_script(type(value))


@dataclass
class Met:
    """What was met as the objects of all variables were looked through."""

    entered: set[int] = field(default_factory=set)
    """Those that a path has led to already, by identity."""
    hidden: list[str] = field(default_factory=list)
    """Those that hold a state which no attribute shows, such as a simulator in C++ or another process: path and class."""


def parts(thing: Any, way: str, deep: int, met: Met, kept: Collection[int]) -> Iterator[tuple[str, Any]]:
    """By path, the numbers, arrays, tensors, and objects with a state that it holds. No texts. `kept` are looked at by others."""
    todo = deque([(way, thing, deep)])
    while todo:
        path, holder, left = todo.popleft()
        if id(holder) in met.entered or len(met.entered) >= ENTERED:
            continue
        met.entered.add(id(holder))
        for name, part in list(objects.parts(holder).items()):
            if name.startswith("__") or "." in name or id(part) in kept or objects.is_dead(part):
                continue
            if _is_value(part):
                yield f"{path}.{name}", part
            elif _is_hidden(part):
                met.hidden.append(f"{path}.{name} ({type(part).__name__})")
            elif left and (objects.is_mixed(part) or _is_looked_into(part)):
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
    return foreign and _is_looked_into(value) and not hasattr(value, "__dict__") and not objects.parts(value)


def tell_hidden(hidden: Sequence[str], now: Found, then: Found) -> None:
    """Say that what a restarted script has played otherwise than the lost one goes on in objects that cannot be put back.

    `now` and `then` are values in objects of libraries, by function and path. Times differ from start to start.
    """
    others = [
        path
        for function, those in then.items()
        for path, value in those.items()
        if type(value) is not float and path in now.get(function, {}) and not values.same(now[function][path], value)
    ]
    if hidden and others:
        advice.tell(
            "hidden",
            f"{hidden[0]} holds a state that is not seen. Before its place this start has come to another {others[0]} than the lost one, "
            "and so that state may be another one too. Begin each game anew behind a step, so that a restart changes nothing",
        )


def _is_value(part: Any) -> bool:
    """Is it looked at by itself?"""
    if type(part) in _TEXTS:
        return False
    return objects.is_copied(part) or values.is_wide(part) or (values.is_stateful(part) and not _is_looked_into(part))
