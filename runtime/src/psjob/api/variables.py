"""Variables of a script's loop, in its resume records: a loop that does not keep them in `ps.state` finds them again at its place.

Those count that have changed since the script first asked for data, in the functions that are under way, and in objects of the script's own
classes there. Plain ones are put back: numbers, texts, small tensors, and lists, dicts and the like of these. Of others, such as a second
model, the record holds the names only, and a script that is started again is refused where they would be others than they were. What the
script assigns again before it reads it does not count.
"""

from __future__ import annotations

import copy
import ctypes
import enum
import sys
import weakref
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Final

import torch

from psjob.api import advice, asking, liveness, values
from psjob.api.state import renewed, the_state
from psjob.process.errors import Refused

NAME: Final = "variables"
"""Of them in a resume record."""
DEEP: Final = 3
"""Objects within objects."""
LOOKED_AT: Final = 2000
"""Tensors whose versions are compared at each edge; where there are more, at the beginning of passes only."""
Found = dict[str, dict[str, Any]]
"""By function under way, and by name in it: `epoch`, `stopper.best`."""
Kept = Mapping[str, Mapping[str, Any]]
"""What a record holds, by function: `plain` values, which of them were `assigned`, and states of `objects`.

Of `lost` things it is the class, of `other` tensors than at first the class and a checksum, and of `long` lists the length."""
OFTEN: Final = 3
"""Changes from one record to the next, after which a thing is not summed again."""
_OF_MODULES: Final = frozenset(vars(torch.nn.Module()))
"""Attributes that each module has."""


_Parts = tuple[bool, "list[tuple[str, weakref.ref[torch.nn.Module]]]"]


@dataclass(frozen=True)
class _Summed:
    """A checksum, of which tensors, and in how many records one after the other it was another one each time."""

    versions: values.Versions
    checksum: int
    changes: int


class Variables:
    """Of one script. `kept`: objects that are in its records by themselves."""

    counts_again = True
    """They are put back where their functions are under way only."""

    def __init__(self, kept: Collection[object]) -> None:
        self._kept = {id(thing) for thing in kept}
        trained = [thing for thing in kept if isinstance(thing, torch.nn.Module)]
        self._shared = {id(tensor) for model in trained for tensor in (*model.parameters(), *model.buffers())}
        """Tensors of the models that are trained."""
        self._parts: weakref.WeakKeyDictionary[torch.nn.Module, _Parts] = weakref.WeakKeyDictionary()
        """Of models, whether all attributes of their modules count, and those modules, each with its path."""
        self._first: Found | None = None
        """Copies of plain values when the script first asked for data."""
        self._held: dict[str, dict[str, Any]] = {}
        """By function and name, the objects that held them."""
        self._back: dict[str, set[str]] = {}
        """By function, names of what was put back: they have changed, whatever they were when this process began."""
        self._things: dict[tuple[str, str], tuple[Any, Any]] = {}
        """By function and name: what is not plain, and its versions at first."""
        self._objects: Found = {}
        """By function and name, what objects of libraries with a `state_dict`, such as a scheduler, gave at first."""
        self._lost: dict[str, dict[str, str]] = {}
        """What has changed and is not plain, by its class."""
        self._sums: dict[tuple[str, str], _Summed] = {}
        """By function and name, checksums of what is other than at first."""
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
            self._held = self._plain(list(self._walked()))
            self._first = {function: {name: values.copied(value) for name, value in held.items()} for function, held in self._held.items()}
            others = ((function, path, thing) for function, path, thing in self._walked() if self._is_other(thing))
            self._things = {
                (function, path): (thing, self._versions(thing)) for function, path, thing in others if not values.is_stateful(thing)
            }
            self._objects = self._states(self._walked())
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
        walked = list(self._walked())
        now = self._plain(walked)
        known = {
            function: {name: value for name, value in first.items() if name not in self._back.get(function, set())}
            for function, first in self._first.items()
        }
        changed = _changed(now, known)
        other = self._other(walked)
        long, lost = self._no_longer_plain(now)
        return {
            "plain": {function: {name: values.held(value) for name, value in found.items()} for function, found in changed.items()},
            "assigned": {
                function: [name for name in found if self._is_assigned(function, name, now)] for function, found in changed.items()
            },
            "objects": _changed(self._states(walked), self._objects),
            "lost": lost,
            "long": long,
            "other": other,
        }

    def load_state_dict(self, state: Kept) -> None:
        """Put back what `state_dict` gave, in the functions of these names that are under way; all others to what they were at first.

        Raises Refused where the record says that something else has changed, and this start has not made it again.
        """
        if not state:
            return
        lost = [f"{name} ({kind})" for names in state.get("lost", {}).values() for name, kind in names.items()]
        for function, names in state.get("other", {}).items():
            at = self._functions.get(function)
            sums = [(f"{path} ({kind})", path, checksum) for path, (kind, checksum) in names.items() if at is not None]
            lost += [told for told, path, checksum in sums if at and values.checksum(_at(at.f_locals, path)) != checksum]
        if lost:
            raise Refused(
                f"{', '.join(lost[:5])}{' …' if len(lost) > 5 else ''} had changed since the script began to train, and nobody keeps it, "
                f"so that this start cannot go on as the lost process would have. Give it to attach or to ps.state, such as "
                f"ps.state({lost[0].partition(' ')[0].rpartition('.')[2]}=…), and begin a new run"
            )
        if long := sorted(name for names in state.get("long", {}).values() for name in names):
            told = f"{', '.join(long)} had more than {values.MOST} values, and holds only those since this start. Keep it in ps.state"
            advice.tell("long", told)
        plain, first = state.get("plain", {}), self._first or {}
        changed = _changed(self._plain(list(self._walked())), first)
        self._put({function: _only(first.get(function, {}), names) for function, names in changed.items()})
        self._put(plain, state.get("assigned", {}))
        self._load(state.get("objects", {}))
        for function, found in plain.items():
            self._back.setdefault(function, set()).update(found)

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
        self._put(lent, state.get("assigned", {}))
        self.at(None)

    # -- what has changed ------------------------------------------------------------------------

    def _compare(self, every: bool) -> None:
        """Find out which things have changed."""
        if not every and sum(len(versions) for _, versions in self._things.values()) > LOOKED_AT:
            return
        for (function, path), (thing, versions) in list(self._things.items()):
            if self._is_read(function, path) and self._versions(thing) != versions:
                del self._things[function, path]
                if not self._is_kept(thing):
                    self._lose(function, path, thing, "after a restart the job would be")

    def _lose(self, function: str, path: str, thing: Any, when: str) -> None:
        self._lost.setdefault(function, {})[path] = type(thing).__name__
        _tell_lost(path, thing, when)

    def _is_read(self, function: str, path: str, further: bool = False) -> bool:
        """Does the function read it again before it assigns it anew? `further`: in a further iteration of its loop."""
        at = self._functions.get(function)
        if at is None:
            return True
        read = liveness.reads(at.f_code, at.f_lasti)
        return path.partition(".")[0] in (read.goes_on if further else read.later)

    def _is_assigned(self, function: str, path: str, now: Found) -> bool:
        """Does the name stand for another object than at first? Then others that stood for that one keep it."""
        held = self._held.get(function, {})
        return path in held and held[path] is not now[function][path]

    def _other(self, walked: Collection[tuple[str, str, Any]]) -> dict[str, dict[str, list[Any]]]:
        """By function and name, what holds other tensors than at first and is read again: its class, and a checksum."""
        found: dict[str, dict[str, list[Any]]] = {}
        given = {function: asking.site(frame.f_code, frame.f_lasti).targets for function, frame in self._functions.items()}
        for function, path, thing in walked:
            was, _ = self._things.get((function, path), (None, None))
            if was is thing or path in self._lost.get(function, {}) or path.partition(".")[0] in given[function]:
                continue
            carried = was is not None or path in self._held.get(function, {}) or values.is_stateful(thing)
            if (carried or "." not in path) and self._is_read(function, path, further=not carried) and self._is_other(thing):
                checksum = self._summed(function, path, thing)
                if checksum is not None:
                    found.setdefault(function, {})[path] = [type(thing).__name__, checksum]
        return found

    def _summed(self, function: str, path: str, thing: Any) -> int | None:
        """Its checksum; None if it has changed so often that it is lost, which costs less."""
        tensors = values.tensors_of(thing)
        before = self._sums.get((function, path))
        if before is not None and before.versions.are(tensors):
            self._sums[function, path] = _Summed(before.versions, before.checksum, 0)
            return before.checksum
        checksum = values.checksum(thing)
        changes = 0 if before is None or before.checksum == checksum else before.changes + 1
        self._sums[function, path] = _Summed(values.Versions(tensors), checksum, changes)
        if changes > OFTEN:
            self._lose(function, path, thing, "after a restart the job would be")
            return None
        return checksum

    def _no_longer_plain(self, now: Found) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, str]]]:
        """By function and name, how long a list is that has become too long, and the class of what is lost."""
        long: dict[str, dict[str, int]] = {}
        lost = {
            function: {path: kind for path, kind in names.items() if self._is_read(function, path)}
            for function, names in self._lost.items()
        }
        for function, frame in self._functions.items():
            for path in self._held.get(function, {}).keys() - now.get(function, {}):
                value = _at(frame.f_locals, path)
                if type(value) not in values.SEVERAL or self._tensors(value) or not self._is_read(function, path):
                    continue  # tensors have checksums
                if len(value) > values.MOST:
                    long.setdefault(function, {})[path] = len(value)
                elif values.count(value) > values.MOST:
                    lost.setdefault(function, {})[path] = type(value).__name__
                    _tell_lost(path, value, "after a restart the job would be")
        return long, {function: names for function, names in lost.items() if names}

    # -- putting back ----------------------------------------------------------------------------

    def _put(self, plain: Mapping[str, Mapping[str, Any]], assigned: Mapping[str, Collection[str]] | None = None) -> None:
        """Assign these; those that are not `assigned` keep their object and get its content, so that other names of it see that."""
        for function, frame in self._functions.items():
            names = frame.f_locals
            local: dict[str, Any] = {}
            anew = (assigned or {}).get(function, ())
            for path, value in plain.get(function, {}).items():
                way, _, last = path.rpartition(".")
                holder = _attributes(_at(names, way)) if way else local
                if holder is not None:
                    now = _at(names, path)
                    holder[last] = _like(now, value) if path in anew else renewed(now, values.copied(value))
            if local:
                _assign(frame, names, local)

    def _load(self, objects: Mapping[str, Mapping[str, Any]]) -> None:
        """Give objects of libraries the states of a record, and those that have changed since but not in the record their first ones."""
        changed = _changed(self._states(self._walked()), self._objects)
        for function, frame in self._functions.items():
            first = self._objects.get(function, {})
            back = {name: first[name] for name in changed.get(function, {}) if name in first} | dict(objects.get(function, {}))
            for path, whole in back.items():
                thing = _at(frame.f_locals, path)
                if thing is not None and values.is_stateful(thing):
                    values.load_state(thing, copy.deepcopy(whole))

    # -- what there is ---------------------------------------------------------------------------

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

    def _walked(self) -> Iterator[tuple[str, str, Any]]:
        """Function, name and value of all that the functions under way have."""
        for function, frame in self._functions.items():
            for path, value in self._walk(frame.f_locals):
                yield function, path, value

    def _walk(self, names: Mapping[str, Any], way: str = "", deep: int = 0) -> Iterator[tuple[str, Any]]:
        """By path, values of variables, and of attributes of objects of the script's own classes."""
        for name, value in list(names.items()):
            if not isinstance(name, str) or name.startswith("__") or _is_dead(value):
                continue
            if issubclass(type(value), torch.nn.Module):
                yield way + name, value
                yield from self._walk_model(value, f"{way}{name}.")
            elif not self._is_own(value):
                yield way + name, value
            elif deep < DEEP:
                yield from self._walk(vars(value), f"{way}{name}.", deep + 1)

    def _walk_model(self, model: torch.nn.Module, way: str) -> Iterator[tuple[str, Any]]:
        """Of its modules that are of the script's own classes, numbers and texts; all, where it has no parameters, as metrics."""
        if model not in self._parts:
            every = next(model.parameters(), None) is None
            found = [(name, part) for name, part in model.named_modules() if every or _is_of_script(type(part))]
            paths = ["".join(f"_modules.{each}." for each in name.split(".") if each) for name, _ in found]
            self._parts[model] = every, [(path, weakref.ref(part)) for path, (_, part) in zip(paths, found, strict=True)]
        every, parts = self._parts[model]
        for inner, ref in parts:
            part = ref()
            own = {} if part is None else {name: value for name, value in vars(part).items() if name not in _OF_MODULES}
            yield from ((f"{way}{inner}{name}", value) for name, value in own.items() if every or values.is_plain(value))

    def _plain(self, walked: Collection[tuple[str, str, Any]]) -> Found:
        """Of these, what can be copied. A tensor of several numbers can, if it was there at first or is read again."""
        found: Found = {}
        read: dict[str, frozenset[str]] = {}
        if self._first is not None:
            read = {function: liveness.reads(frame.f_code, frame.f_lasti).goes_on for function, frame in self._functions.items()}
        for function, path, value in walked:
            carried = self._first is None or path in self._held.get(function, {}) or path in read[function]
            if values.is_plain(value, carried) or (type(value) in values.SEVERAL and values.count(value) <= values.MOST):
                found.setdefault(function, {})[path] = value
        return found

    def _states(self, walked: Iterator[tuple[str, str, Any]] | Collection[tuple[str, str, Any]]) -> Found:
        """Copies of what the objects of libraries among these give."""
        found: Found = {}
        for function, path, thing in walked:
            if values.is_stateful(thing) and not self._is_kept(thing):
                whole = values.state_of(thing)
                if whole is not None:
                    found.setdefault(function, {})[path] = whole
        return found

    def _is_other(self, value: Any) -> bool:
        """Does it hold tensors or arrays that nobody keeps, and that are not plain?"""
        if self._is_kept(value) or values.is_plain(value, True):
            return False
        if isinstance(value, torch.nn.Module):
            return not any(id(p) in self._shared for p in value.parameters())
        return bool(self._tensors(value))

    def _versions(self, thing: Any) -> list[tuple[int, int]]:
        """Of each tensor in it that is not trained, which one it is and which version; of no other object.

        Of a list of more than `MOST` things it is the length, and the tensors of its last one.
        """
        versions = [(id(tensor), values.version(tensor)) for tensor in self._tensors(thing)]
        return [*versions, (0, len(thing))] if versions and type(thing) in values.SEVERAL else versions

    def _tensors(self, thing: Any) -> list[Any]:
        """Those in it that are not trained; a tensor made in `inference_mode` has no versions."""
        found = [tensor for tensor in values.tensors_of(thing) if id(tensor) not in self._shared]
        return [tensor for tensor in found if not (isinstance(tensor, torch.Tensor) and tensor.is_inference())]

    def _is_kept(self, value: object) -> bool:
        return id(value) in self._kept or any(value is kept for kept in the_state()._things)

    def _is_own(self, value: object) -> bool:
        """Is it an object of a class of the script, whose state nobody else keeps?"""
        kind = type(value)
        if issubclass(kind, (type, enum.Enum, *values.NOT_PLAIN)) or not _is_of_script(kind) or self._is_kept(value):
            return False
        try:
            return isinstance(vars(value), dict)
        except Exception:  # it has none, or a property of that name
            return False


def _is_of_script(kind: type) -> bool:
    if kind in (SimpleNamespace, Namespace) or kind.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and not file.startswith(asking.FOREIGN)


def _is_dead(value: Any) -> bool:
    """Is it a proxy of what is no longer there?"""
    try:
        isinstance(value, torch.Tensor)
    except Exception:
        return True
    return False


def _like(now: Any, value: Any) -> Any:
    """A copy of a value, on the device of what is there now."""
    made = values.copied(value)
    return made.to(now.device) if isinstance(made, torch.Tensor) and isinstance(now, torch.Tensor) else made


def _tell_lost(name: str, thing: Any, when: str) -> None:
    word = name.rpartition(".")[2]
    advice.tell(
        "lost",
        f"{name} ({type(thing).__name__}) changes as the script trains, and nobody keeps it: {when} refused. Give it to attach, or "
        f"declare it: ps.state({word}=…)",
    )


def _changed(now: Found, first: Found) -> Found:
    """Values of `now` that are others than at first, or were not there."""
    found: Found = {}
    for function, those in now.items():
        was = first.get(function, {})
        changed = {name: value for name, value in those.items() if name not in was or not values.same(value, was[name])}
        if changed:
            found[function] = changed
    return found


def _only(those: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in those.items() if name in names}


def _at(names: Mapping[str, Any], path: str) -> Any:
    """The value at a path; None where there is none."""
    name, *inner = path.split(".")
    value = names.get(name)
    for part in inner:
        value = (_attributes(value) or {}).get(part)
    return value


def _attributes(value: Any) -> dict[str, Any] | None:
    """Of an object; the modules that a module holds are in a dict of it, `_modules`."""
    return value if isinstance(value, dict) else getattr(value, "__dict__", None)


def _assign(frame: FrameType, names: dict[str, Any], assigned: Mapping[str, Any]) -> None:
    """Assign local variables of a function that is under way (PEP 667; before Python 3.13 by the call that debuggers use)."""
    names.update(assigned)
    if names is not frame.f_globals and sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
