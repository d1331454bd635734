"""Variables of a script's loop, in its resume records: a loop that does not keep them in `ps.state` finds them again at its place.

Those count that have changed since the script first asked for data, in the functions that are under way, and in objects of the script's own
classes there. Plain ones are put back: numbers, texts, small tensors, and lists, dicts and the like of these. Of others, such as a second
model, the record holds the names only, and a script that is started again is refused where they would be others than they were.
"""

from __future__ import annotations

import copy
import ctypes
import random
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Final

import torch

from psjob.api import advice, asking
from psjob.api.state import State, renewed, the_state
from psjob.process.errors import Refused

NAME: Final = "variables"
"""Of them in a resume record."""
SIMPLE: Final = (bool, int, float, complex, type(None))
SEVERAL: Final = (list, dict, tuple, set, deque, OrderedDict, Counter)
MOST: Final = 1000
"""Numbers and texts that one variable may hold."""
LONGEST: Final = 4096
"""Characters or bytes of one text, numbers of one tensor or array."""
LOOKED_AT: Final = 2000
"""Tensors whose versions are compared at each edge; where there are more, at the beginning of passes only."""
DEEP: Final = 3
"""Objects within objects, lists within lists."""
_NOT_PLAIN: Final = (torch.nn.Module, torch.optim.Optimizer, torch.utils.data.Dataset, torch.utils.data.DataLoader, torch.Tensor, State)
Found = dict[str, dict[str, Any]]
"""By function under way, and by name in it: `epoch`, `stopper.best`."""
Kept = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""What a record holds: `plain` values, of `lost` things the class, and how long lists are that became too `long`."""


class Variables:
    """Of one script. `kept`: objects that are in its records by themselves."""

    counts_again = True
    """They are put back where their functions are under way only."""

    def __init__(self, kept: Collection[object]) -> None:
        self._kept = {id(thing) for thing in kept}
        trained = [thing for thing in kept if isinstance(thing, torch.nn.Module)]
        self._shared = {id(tensor) for model in trained for tensor in (*model.parameters(), *model.buffers())}
        """Tensors of the models that are trained."""
        self._first: Found | None = None
        self._carried: dict[str, frozenset[str]] = {}
        """Names that were there then."""
        self._back: dict[str, set[str]] = {}
        """By function, names of what was put back: they have changed, whatever they were when this process began."""
        self._things: dict[tuple[str, str], tuple[Any, Any]] = {}
        """By function and name: what is not plain, and its versions at first."""
        self._objects: dict[str, dict[str, Any]] = {}
        """By function and name, what objects of libraries with a `state_dict`, such as a scheduler, gave at first."""
        self._lost: dict[str, dict[str, str]] = {}
        """Those of them that have changed."""
        self._functions: dict[str, FrameType] = {}
        """Those of the script that are under way, by file and name."""
        self._asks = False
        """The script asks for data now."""

    def begin_pass(self, frame: FrameType | None) -> None:
        """A pass over data begins in this frame; None: in a loop of a library, which keeps its own."""
        if frame is None:
            return
        self._functions = self._under_way(frame)
        if self._first is None:
            now = self._now()
            self._first = {function: {name: _copied(value) for name, value in values.items()} for function, values in now.items()}
            self._carried = {function: frozenset(values) for function, values in now.items()}
            others = ((function, *other) for function, at in self._functions.items() for other in self._others(at.f_locals))
            self._things = {(function, name): (thing, self._versions(thing)) for function, name, thing in others}
            self._objects = self._states()
        self._compare(every=True)
        self.at(None)

    def at_step(self, frame: FrameType) -> None:
        """The script makes a step in this frame, and only its steps say where it is."""
        if self._first is None:
            self.begin_pass(frame)
        self.at(frame)

    def at(self, frame: FrameType | None) -> None:
        """The script asks for data in this frame; None: it no longer does."""
        self._asks, self._functions = frame is not None, self._under_way(frame)
        if self._asks:
            self._compare(every=False)

    def state_dict(self) -> Kept:
        """What has changed since the script first asked; nothing where it does not ask now."""
        if not self._asks or self._first is None:
            return {}
        now = self._now()
        known = {
            function: {name: value for name, value in values.items() if name not in self._back.get(function, set())}
            for function, values in self._first.items()
        }
        plain = {function: {name: _held(value) for name, value in values.items()} for function, values in _changed(now, known).items()}
        long = self._no_longer_plain(now)
        objects = _changed(self._states(), self._objects)
        return {"plain": plain, "objects": objects, "lost": {function: dict(names) for function, names in self._lost.items()}, "long": long}

    def load_state_dict(self, state: Kept) -> None:
        """Put back what `state_dict` gave, in the functions of these names that are under way; all others to what they were at first.

        Raises Refused where the record says that something else has changed.
        """
        if not state:
            return
        lost = [f"{name} ({kind})" for names in state.get("lost", {}).values() for name, kind in names.items()]
        if lost:
            raise Refused(
                f"{', '.join(lost[:5])}{' …' if len(lost) > 5 else ''} had changed since the script began to train, and nobody keeps it, "
                f"so that this start cannot go on as the lost process would have. Give it to attach or to ps.state, such as "
                f"ps.state({lost[0].partition(' ')[0].rpartition('.')[2]}=…), and begin a new run"
            )
        if long := sorted(name for names in state.get("long", {}).values() for name in names):
            advice.tell(
                "long", f"{', '.join(long)} had more than {MOST} values, and holds only those since this start. Keep it in ps.state"
            )
        plain, first = state.get("plain", {}), self._first or {}
        changed = _changed(self._now(), first)
        self._put({function: _only(first.get(function, {}), names) for function, names in changed.items()})
        self._put(plain)
        self._load(state.get("objects", {}))
        for function, values in plain.items():
            self._back.setdefault(function, set()).update(values)

    def lend(self, frame: FrameType, state: Kept) -> None:
        """A pass that was finished before a restart is given nothing: what follows it reads values as they are at the script's place.

        So a mean over the pass has numbers, and the last loss has a value. The variable of a `for` loop keeps its own.
        """
        self._functions = self._under_way(frame)
        plain = state.get("plain", {})
        lent = {}
        for function, at in self._functions.items():
            own = asking.site(at.f_code, at.f_lasti).targets & at.f_locals.keys()
            lent[function] = _only(plain.get(function, {}), plain.get(function, {}).keys() - own)
        self._put(lent)
        self.at(None)

    def _compare(self, every: bool) -> None:
        """Find out which things have changed."""
        if not every and sum(len(versions) for _, versions in self._things.values()) > LOOKED_AT:
            return
        changed = [key for key, (thing, versions) in self._things.items() if self._versions(thing) != versions]
        for function, name in changed:
            thing, _ = self._things.pop((function, name))
            self._lose(function, name, thing)

    def _lose(self, function: str, name: str, thing: Any) -> None:
        if not self._is_kept(thing) and name not in self._lost.setdefault(function, {}):
            self._lost[function][name] = type(thing).__name__
            word = name.rpartition(".")[2]
            advice.tell(
                "lost",
                f"{name} ({type(thing).__name__}) changes as the script trains, and nobody keeps it: after a restart the job would be "
                f"refused. Give it to attach, or declare it: ps.state({word}=…)",
            )

    def _put(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        for function, frame in self._functions.items():
            names = frame.f_locals
            assigned: dict[str, Any] = {}
            for path, value in values.get(function, {}).items():
                way, _, last = path.rpartition(".")
                held = getattr(_at(names, way), "__dict__", None) if way else assigned
                if held is not None:
                    held[last] = renewed(_at(names, path), _copied(value))
            if assigned:
                _assign(frame, names, assigned)

    def _load(self, objects: Mapping[str, Mapping[str, Any]]) -> None:
        """Give objects of libraries the states of a record, and those that have changed since but not in the record their first ones."""
        changed = _changed(self._states(), self._objects)
        for function, frame in self._functions.items():
            first = self._objects.get(function, {})
            back = {name: first[name] for name in changed.get(function, {}) if name in first} | dict(objects.get(function, {}))
            for path, whole in back.items():
                thing = _at(frame.f_locals, path)
                if thing is not None and _is_stateful(thing):
                    _load_state(thing, copy.deepcopy(whole))

    def _states(self) -> Found:
        """Copies of what the objects of libraries give that are under way."""
        found: Found = {}
        for function, frame in self._functions.items():
            for path, thing in self._stateful(frame.f_locals):
                whole = _state_of(thing)
                if whole is not None:
                    found.setdefault(function, {})[path] = whole
        return found

    def _stateful(self, names: Mapping[str, Any], way: str = "") -> Iterator[tuple[str, Any]]:
        for name, value in list(names.items()):
            if name.startswith("__") or self._is_kept(value):
                continue
            if self._is_own(value):
                if way.count(".") < DEEP:
                    yield from self._stateful(vars(value), f"{way}{name}.")
            elif _is_stateful(value):
                yield way + name, value

    def _no_longer_plain(self, now: Found) -> dict[str, dict[str, int]]:
        """By function and name, how long a list is that has become too long. What holds tensors now, as the best weights, is lost."""
        long: dict[str, dict[str, int]] = {}
        for function, frame in self._functions.items():
            for path in self._carried.get(function, frozenset()).difference(now.get(function, {})):
                value = _at(frame.f_locals, path)
                if isinstance(value, torch.nn.Module) or self._versions(value):
                    self._lose(function, path, value)
                elif type(value) in SEVERAL and len(value) > MOST:
                    long.setdefault(function, {})[path] = len(value)
                elif type(value) in SEVERAL:
                    self._lose(function, path, value)
        return long

    def _now(self) -> Found:
        return {
            function: dict(self._plain(frame.f_locals, None if self._first is None else self._carried.get(function, frozenset())))
            for function, frame in self._functions.items()
        }

    def _under_way(self, frame: FrameType | None) -> dict[str, FrameType]:
        """The script's functions from this frame on, the outermost first."""
        frames = []
        while frame is not None:
            if asking.is_script(frame.f_code):
                frames.append(frame)
            frame = frame.f_back
        found: dict[str, FrameType] = {}
        for frame in reversed(frames):
            name = f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_qualname}"
            while name in found:  # it calls itself
                name += " again"
            found[name] = frame
        return found

    def _plain(self, names: Mapping[str, Any], carried: Collection[str] | None, way: str = "") -> Iterator[tuple[str, Any]]:
        """By path; `carried`: those that were there at first, None: it is now."""
        for name, value in list(names.items()):
            if name.startswith("__"):
                continue
            if _is_plain(value, carried is None or way + name in carried) or (type(value) in SEVERAL and _count(value) <= MOST):
                yield way + name, value
            elif way.count(".") < DEEP and self._is_own(value):
                yield from self._plain(vars(value), carried, f"{way}{name}.")

    def _others(self, names: Mapping[str, Any], way: str = "") -> Iterator[tuple[str, Any]]:
        """By path, what is not plain and holds tensors."""
        for name, value in list(names.items()):
            if name.startswith("__") or id(value) in self._kept or _is_plain(value, True):
                continue
            if isinstance(value, torch.nn.Module):
                if not any(id(p) in self._shared for p in value.parameters()):
                    yield way + name, value
            elif type(value) in (torch.Tensor, *SEVERAL) and self._versions(value):
                yield way + name, value
            elif way.count(".") < DEEP and self._is_own(value):
                yield from self._others(vars(value), f"{way}{name}.")

    def _versions(self, thing: Any) -> list[tuple[int, int]]:
        """Of each tensor in it that is not trained, which one it is and how often it was written; of no other object.

        Of a list of more than `MOST` things it is the length, and the tensors of its last one.
        """
        if isinstance(thing, torch.nn.Module):
            found: Any = [*thing.parameters(), *thing.buffers()]
        else:
            found = _tensors(thing)
        versions = [(id(tensor), tensor._version) for tensor in found if not tensor.is_inference() and id(tensor) not in self._shared]
        return [*versions, (0, len(thing))] if versions and type(thing) in SEVERAL else versions

    def _is_kept(self, value: object) -> bool:
        return id(value) in self._kept or any(value is kept for kept in the_state()._things)

    def _is_own(self, value: object) -> bool:
        """Is it an object of a class of the script, whose state nobody else keeps?"""
        kind = type(value)
        if self._is_kept(value) or isinstance(value, (type, *_NOT_PLAIN)) or not hasattr(value, "__dict__"):
            return False
        if kind in (SimpleNamespace, Namespace) or kind.__module__ == "__main__":
            return True
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        return file is not None and not file.startswith(asking.FOREIGN)


def _changed(now: Found, first: Found) -> Found:
    """Values of `now` that are others than at first, or were not there."""
    found: Found = {}
    for function, values in now.items():
        was = first.get(function, {})
        changed = {name: value for name, value in values.items() if name not in was or not _same(value, was[name])}
        if changed:
            found[function] = changed
    return found


def _only(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


def _at(names: Mapping[str, Any], path: str) -> Any:
    """The value at a path; None where there is none."""
    name, *inner = path.split(".")
    value = names.get(name)
    for part in inner:
        value = getattr(value, "__dict__", {}).get(part)
    return value


def _is_plain(value: Any, carried: bool = False) -> bool:
    """Is it one number, or a text that is not long? A tensor of several numbers is, where it was `carried` into the loop."""
    kind = type(value)
    if kind in SIMPLE:
        return True
    if kind in (str, bytes):
        return len(value) <= LONGEST
    if kind is torch.Tensor:  # several numbers of a GPU would have to be waited for
        small = value.numel() == 1 or (carried and value.numel() <= LONGEST and value.device.type == "cpu")
        return small and value.layout is torch.strided and not value.is_quantized
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    several = carried and type(value) is numpy.ndarray and value.size <= LONGEST
    return (isinstance(value, numpy.generic) or several) and value.dtype.kind in "biufc"


def _tensors(thing: Any, deep: int = 0) -> list[torch.Tensor]:
    """Those in a list or the like, and in lists in it."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if type(thing) not in SEVERAL or deep > DEEP:
        return []
    items = list(thing.values() if isinstance(thing, dict) else thing)
    return [tensor for item in (items if len(items) <= MOST else items[-1:]) for tensor in _tensors(item, deep + 1)]


def _is_stateful(value: Any) -> bool:
    """Has it a state, and keeps nobody else that? Schedulers, and random generators of the script's own."""
    kind = type(value)
    if kind.__module__.partition(".")[0] == "psjob" or issubclass(kind, (type, *_NOT_PLAIN)):
        return False
    return _generates(value) or (callable(getattr(kind, "state_dict", None)) and hasattr(kind, "load_state_dict"))


def _generates(value: Any) -> bool:
    """Is it a generator of random numbers?"""
    numpy = sys.modules.get("numpy")
    kinds = (
        (torch.Generator, random.Random)
        if numpy is None
        else (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
    )
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def _state_of(thing: Any) -> dict[str, Any] | None:
    """A copy of its state; None where that holds more than numbers and texts."""
    if _generates(thing):
        return _generator_state(thing)
    try:
        whole = thing.state_dict()
    except Exception:  # a class of a library may want to be asked at other times
        return None
    plain = type(whole) in (dict, OrderedDict) and _count(whole) <= MOST
    return copy.deepcopy(dict(whole)) if plain else None


def _generator_state(thing: Any) -> dict[str, Any]:
    if isinstance(thing, torch.Generator):
        return {"state": bytes(thing.get_state().tolist())}
    if isinstance(thing, random.Random):
        return {"state": thing.getstate()}
    return {"state": _listed(thing.bit_generator.state if hasattr(thing, "bit_generator") else thing.get_state(legacy=False))}


def _listed(state: Any) -> Any:
    """A state of numpy's, with lists of numbers in place of arrays."""
    if isinstance(state, dict):
        return {key: _listed(value) for key, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def _load_state(thing: Any, whole: dict[str, Any]) -> None:
    if isinstance(thing, torch.Generator):
        thing.set_state(torch.frombuffer(bytearray(whole["state"]), dtype=torch.uint8))
    elif isinstance(thing, random.Random):
        thing.setstate(whole["state"])
    elif hasattr(thing, "bit_generator"):
        thing.bit_generator.state = whole["state"]
    elif _generates(thing):
        thing.set_state(whole["state"])
    else:
        thing.load_state_dict(whole)


def _count(several: Any, deep: int = 0) -> int:
    """Numbers and texts in it; more than `MOST` where anything else is in it."""
    if len(several) > MOST or deep > DEEP:
        return MOST + 1
    total = 0
    for item in (*several, *several.values()) if isinstance(several, dict) else several:
        if _is_plain(item):
            total += 1
        elif type(item) in SEVERAL:
            total += 1 + _count(item, deep + 1)
        else:
            return MOST + 1
    return total


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value if type(value) in (*SIMPLE, str) else copy.deepcopy(value)


def _held(value: Any) -> Any:
    """For a record that is packed at once."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def _same(one: Any, other: Any) -> bool:
    """Are two plain values the same? NaN is itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if hasattr(one, "tobytes"):
        return bool(one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes())
    return bool(one == other or (one != one and other != other))


def _assign(frame: FrameType, names: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Assign local variables of a function that is under way (PEP 667; before Python 3.13 by the call that debuggers use)."""
    names.update(values)
    if names is not frame.f_globals and sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
