"""What objects of libraries hold that changes as a script trains: numbers, arrays, random generators, by path.

A loop whose place is found by its steps makes its lines again with later weights. What they play or draw by these weights is other than it
was: the game of an environment, the rollout of an agent. So its records hold what objects of libraries hold. In other loops they hold what
an object with a `state_dict` has besides that, since many a `load_state_dict` works out a part of it anew.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from psjob.api import objects, values
from psjob.resume import tagged

BESIDE: Final = 2
"""Objects within an object that has a state, as the state of an engine."""
DEEP: Final = 14
"""The same for one of a loop whose place is found by its steps: an environment lies in some wrappers, and these in a list."""
ENTERED: Final = 1000
"""Objects and lists that are looked into."""
_TEXTS: Final = (str, bytes, *tagged.WRITTEN)
"""They may name a file or an address of this process."""
_NO_STATE: Final = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_OTHERS: Final = frozenset((*sys.stdlib_module_names, "numpy", "psjob", "torch"))
"""Packages whose objects are not looked into: threads, files and locks are of this process."""


def is_entered(value: Any) -> bool:
    """Is it an object of a library's own class, that is no model, optimizer, dataset or loader?"""
    return _is_looked_into(value) and not objects.is_of_script(type(value))


def parts(thing: Any, way: str, deep: int, seen: set[int], kept: Collection[int]) -> Iterator[tuple[str, Any]]:
    """By path, the numbers, arrays, tensors, and objects with a state that it holds. No texts.

    `seen` are objects that another path has led to, and gets those of this one. `kept` are looked at by others.
    """
    todo = deque([(way, thing, deep)])
    while todo:
        path, holder, left = todo.popleft()
        if id(holder) in seen or len(seen) >= ENTERED:
            continue
        seen.add(id(holder))
        for name, part in list(objects.parts(holder).items()):
            if name.startswith("__") or "." in name or id(part) in kept or objects.is_dead(part):
                continue
            if _is_value(part):
                yield f"{path}.{name}", part
            elif left and (objects.is_mixed(part) or _is_looked_into(part)):
                todo.append((f"{path}.{name}", part, left - 1))


def _is_looked_into(value: Any) -> bool:
    """Is it of a library's class, or of the script's?"""
    kind = type(value)
    if issubclass(kind, (*_NO_STATE, *values.NOT_PLAIN, BaseException)) or kind in values.SEVERAL:
        return False
    return kind.__module__.partition(".")[0] not in _OTHERS


def _is_value(part: Any) -> bool:
    """Is it looked at by itself?"""
    if type(part) in _TEXTS:
        return False
    return objects.is_copied(part) or values.is_wide(part) or (values.is_stateful(part) and not _is_looked_into(part))
