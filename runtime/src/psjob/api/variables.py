"""Variables of a script's loop, in its resume records: a loop that does not keep them in `ps.state` finds them again at its place.

Those count that have changed since the script first asked for data, in the functions that are under way, and in objects of the script's own
classes there. Plain ones are put back: numbers, texts, small tensors, and lists, dicts and the like of these. So is which object a variable
stands for, if another path leads to that one too. Of others, such as a second model, the record holds a checksum only, and a script that is
started again is refused where they would be others than they were. What the script assigns again before it reads it does not count.
"""

from __future__ import annotations

import copy
import enum
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import torch

from psjob.api import advice, objects, script_code, values
from psjob.api.script_code import Found, PassEnds
from psjob.api.values import renewed, the_state
from psjob.layout import packing
from psjob.process import own_files
from psjob.process.startup import integration_of

NAME: Final = "variables"
"""Of them in a resume record."""
DEEP: Final = 4
"""Objects within objects."""
ENTERED: Final = 200
"""Objects and lists that are looked into."""
LOOKED_AT: Final = 2000
"""Tensors whose versions are compared at each step boundary; where there are more, at the beginning of passes only."""
Kept = Mapping[str, Mapping[str, Any]]
"""What a record holds, by function: `plain` values, which of them were `assigned`, and states of `objects`.

Small values that are as at `first` are there too: what made them, such as an evaluation before the loop, runs again on other weights. Of
models and tensors that are as they were `made` it is the class and a checksum. `loops` are the numbers at which `for` loops were when the
script first asked for data.
Of `alike` paths it is the function and path that lead to the same object. Of `lost` things it is the class, of `other` ones than at first
the class and a checksum, and of `long` lists the length."""
OFTEN: Final = 3
"""Changes from one record to the next, after which the script is warned."""
_CHANGEABLE: Final = (list, dict, set, deque, OrderedDict, Counter, defaultdict)
_OF_MODULES: Final = frozenset(vars(torch.nn.Module()))
"""Attributes that each module has."""


_Parts = tuple[bool, "list[tuple[str, weakref.ref[torch.nn.Module]]]"]


class _Part(NamedTuple):
    """A variable or a part of one."""

    path: str
    thing: Any
    entered: bool
    """Its parts are seen by themselves."""
    copied: bool
    """A record can hold a copy, as of a number or a list of some."""
    of_library: bool = False
    """It lies in an object of a library."""


class _Seen(NamedTuple):
    """The same, with its function."""

    function: str
    path: str
    thing: Any
    entered: bool
    copied: bool
    of_library: bool


_Place = tuple[str, str]
"""A function under way and a path in it."""


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

    def __init__(self, kept: Collection[object], resumed: bool = False) -> None:
        self._resumed = resumed
        """The script may have been edited since its record was made: what it begins with is as it says now."""
        self._kept = {id(thing) for thing in kept}
        trained = [thing for thing in kept if isinstance(thing, torch.nn.Module)]
        shared = [tensor for model in trained for tensor in packing.tensors(model)]
        self._shared = {id(tensor): number for number, tensor in enumerate(shared)}
        """Tensors of the models that are trained, and their numbers."""
        self._later: list[object] = []
        """Of those that came later, so that their identities stay theirs."""
        self._parts: weakref.WeakKeyDictionary[torch.nn.Module, _Parts] = weakref.WeakKeyDictionary()
        """Of models, whether all attributes of their modules count, and those modules, each with its path."""
        self._first: Found | None = None
        """Copies of plain values when the script first asked for data."""
        self._held: dict[str, dict[str, Any]] = {}
        """By function and name, the objects that held them."""
        self._back: dict[str, set[str]] = {}
        """By function, names of what was put back: they have changed, whatever they were when this process began."""
        self._ends = PassEnds()
        self._things: dict[_Place, tuple[Any, Any]] = {}
        """By function and name: what is not plain, and its versions at first."""
        self._samples: dict[tuple[str, str, bool], int] = {}
        """Of these a checksum of some numbers at first; and of fewer."""
        self._large: dict[_Place, str] = {}
        """By function and name, the class of plain values that are not small."""
        self._objects: Found = {}
        """By function and name, what objects of libraries with a `state_dict`, such as a scheduler, gave at first."""
        self._alike_at_first: dict[_Place, _Place] = {}
        """Paths, and the first one that led to the same object at first."""
        self._marks: dict[_Place, int | None] = {}
        """Of what neither is plain nor has tensors or a state, the mark at first."""
        self._lost: dict[str, dict[str, str]] = {}
        """What has changed and is not plain, by its class."""
        self._sums: dict[tuple[str, str], _Summed] = {}
        """By function and name, checksums of what is other than at first."""
        self._functions: dict[str, FrameType] = {}
        """Those of the script that are under way, by file and name."""
        self._reads: dict[str, script_code.Reads] = {}
        """What they read from here on."""
        self._loops: dict[str, dict[str, int]] = {}
        """By function and variable, the numbers at which `for` loops were as the script first asked for data."""
        self._files: own_files.Read = {}
        """What the script had read as it first asked for data."""
        self.by_epochs = False
        """A loop over `ps.epochs` has begun, which gives what is left of it."""
        self._left = ENTERED
        self._met = objects.Met()
        self._asks = False
        """The script asks for data now."""
        self._by_steps = False
        """Only its steps say where the script is, so that what it has played and drawn by its weights is not made again."""
        self._of_library: set[_Place] = set()
        """Parts of objects of libraries: a method of theirs may be under way, so that they are read whatever the script's lines say."""

    def keep(self, *things: object) -> None:
        """These are in records by themselves from now on."""
        self._later += things
        self._kept |= {id(thing) for thing in things}

    def begin_pass(self, frame: FrameType | None) -> None:
        """A pass over data begins in this frame; None: in a loop of a library, which keeps its own."""
        if frame is None:
            return
        self._look(frame)
        if self._first is None:
            self._begin()
        self._compare(every=True)
        self.at(None)

    def _begin(self) -> None:
        """Keep what there is as the script first asks for data."""
        walked = self._walked()
        self._held = self._plain(walked)
        self._first = {function: {name: values.copied(value) for name, value in held.items()} for function, held in self._held.items()}
        self._things = {
            (function, path): (thing, self._versions(thing))
            for function, path, thing, _, copied, of_library in walked
            if not (copied or of_library) and self._is_other(thing) and not values.is_stateful(thing)
        }
        for place, (thing, _) in self._things.items():
            self._is_sample(place, thing, few=True), self._is_sample(place, thing, few=False)
        for function, held in self._held.items():
            for path, value in held.items():
                if not values.is_small(value) and (function, path) not in self._of_library:
                    self._large[function, path] = type(value).__name__
                    self._samples[function, path, False] = values.sample_of(value)
        self._objects = self._states(walked)
        self._alike_at_first = self._alike(walked)
        self._marks = self._marked(walked)
        self._loops = {} if self.by_epochs else self._looped()
        self._files = own_files.read_so_far()
        own_files.begin_training()

    def _looped(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for function, frame in self._functions.items():
            names = script_code.site(frame.f_code, frame.f_lasti).around
            found[function] = {name: value for name in names if type(value := frame.f_locals.get(name)) is int}
        return {function: names for function, names in found.items() if names}

    def at_step(self, frame: FrameType) -> None:
        """The script makes a step in this frame, and only its steps say where it is."""
        self._by_steps = True
        if self._first is None:
            self.begin_pass(frame)
        self.at(frame)

    def at(self, frame: FrameType | None) -> None:
        """The script asks for data in this frame; None: it no longer does."""
        self._asks = frame is not None
        self._look(frame)
        if self._asks:
            self._compare(every=False)

    def state_dict(self) -> Kept:
        """What has changed since the script first asked; nothing where it does not ask now."""
        if not self._asks or self._first is None:
            return {}
        walked = self._walked()
        now = self._plain(walked)
        changed = values.changed(now, self._known())
        wide = [(function, path) for function, found in changed.items() for path, value in found.items() if values.is_wide(value)]
        for function, path in wide:  # lines that run again after a pass may read numbers that the script no longer reads here
            if not self._is_read(function, path):
                del changed[function][path]
        states = self._states(walked)
        other = self._other(walked, states)
        long, lost = self._no_longer_plain(now)
        return {
            "plain": _held(changed),
            "first": _held(self._unchanged(now, changed)),
            "made": self._made(changed),
            "loops": self._loops,
            "files": self._files,
            "assigned": {
                function: [name for name in found if self._is_assigned(function, name, now)] for function, found in changed.items()
            },
            "alike": self._changed_alike(walked),
            "objects": values.changed(states, self._objects),
            "lost": lost,
            "long": long,
            "other": other,
            **self._ends.state(changed, _held),
        }

    def _unchanged(self, now: Found, changed: Found) -> Found:
        """Copies of small values that are as at first, may be of weights, and will be read. Another thread may change a list meanwhile."""
        found = {
            function: {
                path: value
                for path, value in those.items()
                if path in now.get(function, {})
                and path not in changed.get(function, {})
                and self._is_read(function, path)
                and (values.is_small(value) or (function, path) in self._of_library)
                and values.may_be_of_weights(value)
            }
            for function, those in (self._first or {}).items()
        }
        return {function: those for function, those in found.items() if those}

    def _made(self, changed: Found) -> dict[str, dict[str, list[Any]]]:
        """By function and name, of models and tensors that are as at first and will be read, the class and a checksum of some numbers."""
        found: dict[str, dict[str, list[Any]]] = {}
        for (function, path), (thing, _) in self._things.items():
            if self._is_read(function, path) and not self._is_summed(function, path):
                found.setdefault(function, {})[path] = [type(thing).__name__, self._samples[function, path, False]]
        for (function, path), kind in self._large.items():
            if self._is_read(function, path) and path not in changed.get(function, {}):
                found.setdefault(function, {})[path] = [kind, self._samples[function, path, False]]
        return found

    def _is_summed(self, function: str, path: str) -> bool:
        """Is it other than at first, in this record?"""
        return (function, path) in self._sums or path in self._lost.get(function, {})

    def _known(self) -> Found:
        """What was there at first, but for what was put back."""
        first = self._first or {}
        return {function: _only(those, those.keys() - self._back.get(function, set())) for function, those in first.items()}

    def load_state_dict(self, state: Kept) -> None:
        """Put back what `state_dict` gave, in the functions of these names that are under way; all others to what they were at first.

        Raises Refused if the record says that something else has changed, and this start has not made it again.
        """
        if not state:
            return
        lost = [f"{name} ({kind})" for names in state.get("lost", {}).values() for name, kind in names.items()]
        lost += self._stand_for(state.get("alike", {}))
        walked = self._walked()
        marks = self._marked(walked)
        for function, names in state.get("other", {}).items():
            at = self._functions.get(function)
            for path, (kind, checksum) in names.items():
                if at is not None:
                    mark = marks[function, path] if (function, path) in marks else values.checksum(objects.at(at.f_locals, path))
                    lost += [f"{path} ({kind})"] if mark != checksum else []
        objects.refuse_lost(lost)
        objects.check_loops(state.get("loops", {}), self._loops)
        objects.check_made(
            state.get("made", {}), {(function, path): each for (function, path, few), each in self._samples.items() if not few}
        )
        if long := sorted(name for names in state.get("long", {}).values() for name in names):
            told = f"{', '.join(long)} had more than {values.MOST} values, and holds only those since this start. Keep it in ps.state"
            advice.tell_once("long", told)
        plain, first = state.get("plain", {}), self._first or {}
        others = {} if self._resumed else values.changed(dict(state.get("first", {})), first)
        plain = {function: {**others.get(function, {}), **plain.get(function, {})} for function in {*others, *plain}}
        now = self._plain(walked)
        objects.tell_hidden(self._met.hidden, now, plain)
        changed = values.changed(now, first)
        self._put({function: _only(first.get(function, {}), names) for function, names in changed.items()}, {})
        lost = self._put(plain, state)
        self._stand_for(state.get("alike", {}))  # lists in lists are other ones now
        objects.refuse_lost(lost)
        self._load(state.get("objects", {}), plain, state)
        for function, found in plain.items():
            self._back.setdefault(function, set()).update(found)

    def ended(self, frame: FrameType, site: str, number: int) -> None:
        """A pass over data that began at this place in the script is over, or was just left by its loop.

        In that frame the lines follow that are made of it.
        """
        if self._first is None:
            return
        self._look(frame)
        changed = values.changed(self._plain(self._walked()), self._known())
        self._ends.note(site, number, changed, runs_again=not self.by_epochs)
        self.at(None)

    def lend(self, frame: FrameType, state: Kept, site: str, number: int) -> None:
        """A pass that was finished before a restart is given nothing. What follows reads values as the last pass at this place left them,
        or else as they are at the script's place. Numbers are as this pass left them: a `while` may read them.

        So a mean over the pass has numbers, and the last loss has a value. The variable of a `for` loop keeps its own.
        """
        self._look(frame)
        there = self._ends.take(site, number, state, state.get("plain", {}))
        lent = {}
        for function, at in self._functions.items():
            own = script_code.site(at.f_code, at.f_lasti).targets.intersection(at.f_locals)
            lent[function] = _only(there.get(function, {}), there.get(function, {}).keys() - own)
        self._put(lent, state)
        self.at(None)

    # -- what has changed ------------------------------------------------------------------------

    def _compare(self, every: bool) -> None:
        """Find out which things have changed."""
        if not every and sum(len(versions) for _, versions in self._things.values()) > LOOKED_AT:
            return
        for place, (thing, versions) in list(self._things.items()):
            function, path = place
            if self._is_read(function, path) and (self._versions(thing) != versions or not self._is_sample(place, thing, few=not every)):
                del self._things[place]
                if not self._is_kept(thing):
                    self._lose(function, path, thing, "after a restart the job would be")

    def _is_sample(self, place: _Place, thing: Any, few: bool) -> bool:
        """Does it hold the numbers that it held at first?"""
        now = values.sample_sum(self._tensors(thing), few)
        return self._samples.setdefault((*place, few), now) == now

    def _lose(self, function: str, path: str, thing: Any, when: str) -> None:
        self._lost.setdefault(function, {})[path] = type(thing).__name__
        objects.tell_lost(path, thing, when)

    def _is_read(self, function: str, path: str, further: bool = False) -> bool:
        """Does the function read it again before it assigns it anew? `further`: in a further iteration of its loop."""
        read = self._reads.get(function)
        if read is None or (function, path) in self._of_library:
            return True
        return path.partition(".")[0] in (read.goes_on if further else read.later)

    def _is_assigned(self, function: str, path: str, now: Found) -> bool:
        """Does the name stand for another object than at first? Then others that stood for that one keep it."""
        held = self._held.get(function, {})
        return path in held and held[path] is not now[function][path]

    def _other(self, walked: Collection[_Seen], states: Found) -> dict[str, dict[str, list[Any]]]:
        """By function and name, what is read again and is other than at first, and is not among the `states`: its class and a checksum."""
        found: dict[str, dict[str, list[Any]]] = {}
        given = {function: script_code.site(frame.f_code, frame.f_lasti).targets for function, frame in self._functions.items()}
        marks, summed = self._marked(walked), set[_Place]()
        for function, path, thing, _, copied, of_library in walked:
            place = function, path
            was, _ = self._things.get(place, (None, None))
            as_at_first = was is thing or (place in marks and marks[place] == self._marks.get(place))
            kept = path in self._lost.get(function, {}) or path in states.get(function, {})
            if copied or as_at_first or kept or path.partition(".")[0] in given[function] or objects.gives_data(thing):
                continue
            carried = of_library or was is not None or path in self._held.get(function, {}) or place in self._marks
            carried = carried or values.is_stateful(thing)
            within = function, path.rpartition(".")[0]
            if within not in summed and self._is_read(function, path, further=not carried):
                checksum = marks[place] if place in marks else self._summed(function, path, thing) if self._is_other(thing) else None
                if checksum is not None:
                    summed |= {place} - marks.keys()
                    found.setdefault(function, {})[path] = [type(thing).__name__, checksum]
        return found

    def _marked(self, walked: Collection[_Seen]) -> dict[_Place, int | None]:
        """Marks of these, if they neither are plain nor have tensors or a state; None of what is too large for one."""
        known = self._kept | {id(each.thing) for each in walked if each.entered}
        return {
            (function, path): objects.mark_of(thing, known, self._shared)
            for function, path, thing, _, copied, of_library in walked
            if not (copied or of_library or self._is_kept(thing) or isinstance(thing, (ModuleType, torch.nn.Module)))
            and not (values.is_plain(thing, True) or (type(thing) in values.SEVERAL and len(thing) > values.MOST))
            and not (values.is_stateful(thing) or self._tensors(thing))
        }

    def _alike(self, walked: Collection[_Seen]) -> dict[_Place, _Place]:
        """Paths that are read again, and the first of them that leads to the same object."""
        found: dict[_Place, _Place] = {}
        first: dict[int, _Place] = {}
        for function, path, thing, _, copied, _ in walked:
            if isinstance(thing, torch.Tensor) or not self._is_read(function, path):
                continue
            for inner, part in ((path, thing), *((f"{path}.{inner}", part) for inner, part in (objects.within(thing) if copied else ()))):
                if type(part) in _CHANGEABLE or not (copied or isinstance(part, tuple)):
                    found[function, inner] = first.setdefault(id(part), (function, inner))
        return found

    def _changed_alike(self, walked: Collection[_Seen]) -> dict[str, dict[str, list[str]]]:
        """By function and path, the function and path that lead to the same object, if that was another one at first."""
        found: dict[str, dict[str, list[str]]] = {}
        for place, other in self._alike(walked).items():
            if self._alike_at_first.get(place, place) != other:
                found.setdefault(place[0], {})[place[1]] = list(other)
        return found

    def _summed(self, function: str, path: str, thing: Any) -> int:
        """Its checksum."""
        tensors = values.tensors_of(thing)
        before = self._sums.get((function, path))
        told = all(isinstance(tensor, torch.Tensor) for tensor in tensors)  # arrays do not tell of each write
        if told and before is not None and before.versions.are(tensors):
            self._sums[function, path] = _Summed(before.versions, before.checksum, 0)
            return before.checksum
        checksum = values.checksum(thing)
        changes = 0 if before is None or before.checksum == checksum else before.changes + 1
        self._sums[function, path] = _Summed(values.Versions(tensors), checksum, changes)
        if changes > OFTEN:
            objects.tell_lost(path, thing, "a restart that does not make it again is")
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
                value = objects.at(frame.f_locals, path)
                if type(value) not in values.SEVERAL or self._tensors(value) or not self._is_read(function, path):
                    continue  # tensors have checksums
                if len(value) > values.MOST:
                    long.setdefault(function, {})[path] = len(value)
                elif values.count(value) > values.MOST and (function, path) not in self._of_library:
                    lost.setdefault(function, {})[path] = type(value).__name__
                    objects.tell_lost(path, value, "after a restart the job would be")
        return long, {function: names for function, names in lost.items() if names}

    # -- putting back ----------------------------------------------------------------------------

    def _stand_for(self, alike: Mapping[str, Mapping[str, Collection[str]]]) -> list[str]:
        """Let each of these paths lead to the object that another one leads to, and all others to those of first. Gives what cannot."""
        walked = self._walked()
        now, there = self._alike(walked), {(function, path): thing for function, path, thing, *_ in walked}
        wanted = {place: other for place, other in self._alike_at_first.items() if place in now}
        wanted |= {(function, path): _place(other) for function, names in alike.items() for path, other in names.items()}
        lost = []
        for place, other in wanted.items():
            if place == other:
                shared = now.get(place, place)
                if shared != place and wanted.get(shared) != place and place in there and not objects.is_copied(there[place]):
                    lost.append(f"{place[1]} (no longer {shared[1]})")
            elif place[0] in self._functions and other[0] in self._functions:
                thing = objects.at(self._functions[other[0]].f_locals, other[1])
                if thing is not None and objects.at(self._functions[place[0]].f_locals, place[1]) is not thing:
                    self._assign(place[0], {place[1]: thing})
        return lost

    def _put(self, plain: Mapping[str, Mapping[str, Any]], record: Kept) -> list[str]:
        """Assign these. Those that are not assigned in the record keep their object and get its content, so that other names see that.

        What leads to an object that has another path gets its content by that. Gives what is read again and has no holder.
        """
        lost = []
        for function, frame in self._functions.items():
            names = frame.f_locals
            anew = record.get("assigned", {}).get(function, ())
            others = tuple(
                f"{path}." for path, place in record.get("alike", {}).get(function, {}).items() if _place(place) != (function, path)
            )
            own = {path: value for path, value in plain.get(function, {}).items() if not f"{path}.".startswith(others)}
            there = {path: objects.at(names, path) for path in own}
            made = {
                path: values.like(there[path], value) if path in anew else renewed(there[path], values.copied(value))
                for path, value in own.items()
            }
            lost += [f"{path} ({type(own[path]).__name__})" for path in self._assign(function, made) if self._is_read(function, path)]
        return lost

    def _assign(self, function: str, made: Mapping[str, Any]) -> list[str]:
        """Assign these, by path. Gives the paths that have no holder."""
        frame = self._functions[function]
        names = frame.f_locals
        lost = []
        for path, value in made.items():
            way, _, last = path.rpartition(".")
            holder = objects.at(names, way) if way else None
            if holder is not None:
                objects.set_part(holder, last, value)
            elif way:
                lost.append(path)
        local = {path: value for path, value in made.items() if "." not in path}
        if local:
            objects.assign_locals(frame, names, local)
        return lost

    def _load(self, states: Mapping[str, Mapping[str, Any]], plain: Mapping[str, Mapping[str, Any]], record: Kept) -> None:
        """Give objects of libraries the states of a record, and those that have changed since but not in the record their first ones.

        Their attributes get what is `plain` after that. Raises Refused if one gives another state than it was given.
        """
        changed = values.changed(self._states(self._walked()), self._objects)
        loaded: list[tuple[str, str, Any, dict[str, Any]]] = []
        for function, frame in self._functions.items():
            first = self._objects.get(function, {})
            back = {name: first[name] for name in changed.get(function, {}) if name in first} | dict(states.get(function, {}))
            for path, whole in back.items():
                thing = objects.at(frame.f_locals, path)
                if thing is not None and values.is_stateful(thing):
                    values.load_state(thing, copy.deepcopy(whole))
                    loaded.append((function, path, thing, whole))
        for function, those in plain.items():  # each part has one path, and an object may have been loaded by several
            ways = tuple(f"{path}." for at, path, *_ in loaded if at == function)
            self._put({function: {path: value for path, value in those.items() if path.startswith(ways)}}, record)
        for _, path, thing, whole in loaded:
            objects.check_counts(path, thing, whole)

    # -- what there is ---------------------------------------------------------------------------

    def _look(self, frame: FrameType | None) -> None:
        """Find the script's functions from this frame on, the outermost first."""
        frames = []
        while frame is not None:
            if script_code.is_script_code(frame.f_code):
                frames.append(frame)
            frame = None if script_code.is_begin(frame) else frame.f_back
        found: dict[str, FrameType] = {}
        for frame in reversed(frames):
            name = f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_qualname}"
            while name in found:  # it calls itself
                name += " again"
            found[name] = frame
        self._functions = found
        self._reads = {function: script_code.reads(frame.f_code, frame.f_lasti) for function, frame in found.items()}

    def _walked(self) -> list[_Seen]:
        """All that the functions under way have."""
        self._left, self._met = ENTERED, objects.Met()
        found = [_Seen(function, *part) for function, frame in self._functions.items() for part in self._walk(frame.f_locals)]
        self._of_library |= {(each.function, each.path) for each in found if each.of_library}
        return found

    def _walk(self, names: Mapping[str, Any], way: str = "", deep: int = 0) -> Iterator[_Part]:
        """Variables, and what objects of the script's own classes and mixed lists hold."""
        for name, value in list(names.items()):
            if not isinstance(name, str) or name.startswith("__") or objects.is_dead(value):
                continue
            try:
                yield from self._walk_value(value, way + name, deep)
            except Exception as error:  # a class may answer its own way to what is asked of each object
                told = f"{way}{name} ({type(value).__name__}) cannot be looked at: {type(error).__name__}: {str(error)[:100]}"
                advice.tell_once("odd", f"{told}. If it changes as the script trains, declare it in ps.state")

    def _walk_value(self, value: Any, path: str, deep: int) -> Iterator[_Part]:
        copied = objects.is_copied(value)
        if issubclass(type(value), torch.nn.Module):
            yield _Part(path, value, False, False)
            yield from (_Part(inner, part, False, objects.is_copied(part)) for inner, part in self._walk_model(value, f"{path}."))
        elif (
            not copied and deep < DEEP and self._left > 0 and not self._is_kept(value) and (self._is_own(value) or objects.is_mixed(value))
        ):
            self._left -= 1
            parts = objects.parts_of_value(value)
            yield _Part(path, value, True, False)
            if type(value) is FunctionType:  # what it has taken along from functions that are under way is theirs
                parts = {each: part for each, part in parts.items() if not any(each in at.f_locals for at in self._functions.values())}
            yield from self._walk(parts, f"{path}.", deep + 1)
        else:
            yield _Part(path, value, False, copied)
            if not copied and objects.is_entered(value) and (self._by_steps or values.is_stateful(value)):
                yield from self._walk_library(value, path)

    def _walk_library(self, value: Any, way: str) -> Iterator[_Part]:
        """What an object of a library holds; beside its state only what a record can hold a copy of."""
        deep = objects.LIBRARY_DEEP if self._by_steps else objects.BESIDE
        for path, part in objects.library_parts(value, way, deep, self._met, self._kept):
            copied = objects.is_copied(part)
            if copied or self._by_steps:
                yield _Part(path, part, False, copied, True)

    def _walk_model(self, model: torch.nn.Module, way: str) -> Iterator[tuple[str, Any]]:
        """Of itself and its modules that are of the script's own classes, what a record can hold a copy of; all, where it has no
        parameters, as metrics."""
        if model not in self._parts:
            every = not any(packing.named_parameters(model))
            found = [(name, part) for name, part in model.named_modules() if every or not name or objects.is_of_script(type(part))]
            paths = ["".join(f"_modules.{each}." for each in name.split(".") if each) for name, _ in found]
            self._parts[model] = every, [(path, weakref.ref(part)) for path, (_, part) in zip(paths, found, strict=True)]
        every, parts = self._parts[model]
        for inner, ref in parts:
            part = ref()
            own = {} if part is None else {name: value for name, value in vars(part).items() if name not in _OF_MODULES}
            yield from ((f"{way}{inner}{name}", value) for name, value in own.items() if every or objects.is_copied(value))

    def _plain(self, walked: Collection[_Seen]) -> Found:
        """Of these, what can be copied. A tensor of several numbers can, if it was there at first or is read again."""
        found: Found = {}
        for function, path, value, _, copied, _ in walked:
            carried = self._first is None or path in self._held.get(function, {}) or path in self._reads[function].later
            if copied or values.is_plain(value, carried):
                found.setdefault(function, {})[path] = value
        return found

    def _states(self, walked: Collection[_Seen]) -> Found:
        """Copies of what the objects of libraries among these give."""
        found: Found = {}
        for function, path, thing, *_ in walked:
            if values.is_stateful(thing) and not self._is_kept(thing):
                whole = values.plain_state(thing)
                if whole is not None:
                    found.setdefault(function, {})[path] = whole
        return found

    def _is_other(self, value: Any) -> bool:
        """Does it hold tensors or arrays that nobody keeps, and that are not plain?"""
        if self._is_kept(value) or values.is_plain(value, True):
            return False
        if isinstance(value, torch.nn.Module):
            return not any(id(p) in self._shared for p in packing.tensors(value))
        return bool(self._tensors(value))

    def _versions(self, thing: Any) -> list[tuple[int, int]]:
        """Of each tensor in it that is not trained, which one it is and which version; of no other object.

        Of a list of more than `MOST` things it is the length, and the tensors of its last one.
        """
        versions = [(id(tensor), values.version_of(tensor)) for tensor in self._tensors(thing)]
        return [*versions, (0, len(thing))] if versions and type(thing) in values.SEVERAL else versions

    def _tensors(self, thing: Any) -> list[Any]:
        """Those in it that are not trained; a tensor made in `inference_mode` has no versions."""
        found = [tensor for tensor in values.tensors_of(thing) if id(tensor) not in self._shared]
        with torch._C.DisableTorchFunctionSubclass():
            return [tensor for tensor in found if not (isinstance(tensor, torch.Tensor) and tensor.is_inference())]

    def _is_kept(self, value: object) -> bool:
        if isinstance(value, torch.optim.Optimizer) and (library := integration_of(value)) is not None:
            value = library.inner(value)
        return id(value) in self._kept or any(value is kept for kept in the_state()._things)

    def _is_own(self, value: Any) -> bool:
        """Is it an object of a class of the script, whose state nobody else keeps?"""
        kind = type(value)
        if kind is FunctionType:
            return script_code.is_script_code(value.__code__)
        if kind is MethodType:
            return self._is_own(value.__self__) and not self._is_kept(value.__self__)
        if issubclass(kind, type):
            return objects.is_of_script(value) and not issubclass(value, torch.nn.Module)
        if issubclass(kind, (enum.Enum, *values.NOT_PLAIN, *values.SEVERAL)) or kind.__module__.partition(".")[0] == "psjob":
            return False
        return objects.is_of_script(kind) or objects.is_record(value)


def _place(words: Collection[str]) -> _Place:
    function, path = words
    return function, path


def _held(found: Found) -> Found:
    """For a record that is packed at once."""
    return {function: {name: values.held(value) for name, value in those.items()} for function, those in found.items()}


def _only(those: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in those.items() if name in names}
