"""Values that a script carries from pass to pass, in every resume record: the namespace behind `psjob.state`, and what variables hold.

Of variables' values it is said which can be copied into a record, which hold tensors, and which have a state of their own.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import weakref
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from psjob.checkpoint.files import CODES
from psjob.layout import memory, packing
from psjob.process.errors import Refused
from psjob.resume import record, tagged

NAME: Final = "ps.state"
"""Of all of it in a resume record; no name that `attach` can be given."""


class ScriptState:
    """Attributes that a restart puts back. One per process, made by `psjob.state`."""

    _used: Callable[[str], object]
    """Told before a value is read, assigned or deleted, which of these."""
    _values: dict[str, Any]
    _restored: dict[str, Any]
    """By name, what a record holds of what the script has not declared yet."""

    def __init__(self) -> None:
        object.__setattr__(self, "_used", lambda _how: None)
        object.__setattr__(self, "_values", {})
        object.__setattr__(self, "_restored", {})

    def _declare(self, first: Mapping[str, Any]) -> None:
        """More names with first values; a record's come in their place. Raises Refused, and takes none, if one could not be put back."""
        for name, value in first.items():
            if name in self._values:
                raise Refused(f"ps.state(…, {name}=…) was given twice; a name is declared once, and assigned after that")
            _check(name, value)
        for name, value in first.items():
            self._values[name] = value
            if name in self._restored:
                self._values[name] = _put(value, self._restored.pop(name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self._used("read")
        try:
            return self._values[name]
        except KeyError:
            known = ", ".join(sorted(self._values)) or "none"
            raise AttributeError(f"ps.state has no {name!r}; declared are: {known}. Write ps.state({name}=…) before the loop") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or hasattr(ScriptState, name):
            raise AttributeError(f"ps.state: {name!r} begins with _, or is a word of the namespace itself; take another name")
        self._used("assigned")
        self._values[name] = value

    def __delattr__(self, name: str) -> None:
        self._used("deleted")
        if self._values.pop(name, self) is self:
            raise AttributeError(f"ps.state has no {name!r}")

    @property
    def _things(self) -> list[Any]:
        """All values."""
        return list(self._values.values())

    def __dir__(self) -> list[str]:
        return sorted(self._values)

    def __repr__(self) -> str:
        return f"ps.state({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def state_dict(self) -> dict[str, Any]:
        """By name, the values, and the state of what has a `state_dict`; what is not declared again yet stays."""
        kept = {name: {"state": value.state_dict()} if _stateful(value) else {"value": value} for name, value in self._values.items()}
        return {**self._restored, **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave: lists, dicts, sets and tensors in place, so that other names of them see it."""
        self._restored.clear()
        for name, kept in state.items():
            if name in self._values:
                self._values[name] = _put(self._values[name], kept)
            else:
                self._restored[name] = kept


_state = ScriptState()


def the_state(used: Callable[[str], object] | None = None) -> ScriptState:
    """The one of this process. `used` is called before a value is read, assigned or deleted, which of these."""
    if used is not None:
        object.__setattr__(_state, "_used", used)
    return _state


def _stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _check(name: str, value: Any) -> None:
    """Raise Refused for what would not come back as it is."""
    if name.startswith("_") or hasattr(ScriptState, name):
        raise Refused(f"ps.state(…, {name}=…): the name begins with _, or is a word of the namespace itself; take another one")
    try:
        problems = record.verify_round_trip({f"ps.state.{name}": value if _stateful(value) else _Plain(value)})
    except RecursionError:
        problems = [f"ps.state.{name} holds itself"]
    if problems:
        raise Refused("; ".join(problems) + ". Keep numbers, texts, lists, dicts, tensors, or objects with state_dict and load_state_dict")


class _Plain:
    """A value as an object with a state."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def state_dict(self) -> Any:
        return self._value


def _put(now: Any, kept: Mapping[str, Any]) -> Any:
    """The value that takes the place of `now`: the same object with another content where that can be."""
    if "state" in kept:
        if not _stateful(now):
            raise Refused(f"ps.state holds a {type(now).__name__} where the record has the state of an object; declare the same things")
        now.load_state_dict(kept["state"])
        return now
    return renewed(now, kept["value"])


def renewed(now: Any, value: Any) -> Any:
    """`value`, in the object `now` where that can be: lists, dicts, sets, deques and tensors keep their identity."""
    if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor) and now.shape == value.shape and now.dtype == value.dtype:
        with torch.no_grad():
            now.data.copy_(value)  # a graph that was made in this step may hold it, and checks its version
        return now
    if _is_array(now) and _is_array(value) and now.flags.writeable and (now.shape, now.dtype) == (value.shape, value.dtype):
        now[...] = value
        return now
    if type(now) is not type(value) and not (type(now) is defaultdict and type(value) is dict):
        return value
    if isinstance(value, list):
        now[:] = value
    elif isinstance(value, dict | set):
        now.clear()
        now.update(value)
    elif isinstance(value, deque) and now.maxlen == value.maxlen:
        now.clear()
        now.extend(value)
    else:
        return value
    return now


SIMPLE: Final = (bool, int, float, complex, type(None))
SEVERAL: Final = (list, dict, tuple, set, frozenset, torch.Size, deque, OrderedDict, Counter, defaultdict)
MOST: Final = 1000
"""Numbers and texts that one variable may hold."""
FEW_VALUES: Final = 256
"""Of several values so many at most are kept if none has changed."""
LONGEST: Final = 4096
"""Characters or bytes of one text, numbers of one tensor or array."""
SUMMED: Final = 1 << 16
"""Values that a checksum is made of."""
LAST: Final = 16
"""Things at the end of a list that its checksum is made of: it may grow with each step."""
DEEP: Final = 3
"""Lists within lists."""
LOOKED_AT: Final = 256
"""Numbers of an array or tensor that are looked at to see whether it was written."""
FEW: Final = 4
"""Tensors of a model that are looked at to see whether it was written, where all would take too long."""
_STRUCTURED: Final = "V"
"""Kind of numpy's arrays of several fields: they are compared, and not copied."""
NOT_PLAIN: Final = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.utils.data.Dataset,
    torch.utils.data.DataLoader,
    torch.Tensor,
    ScriptState,
)


def is_plain(value: Any, carried: bool = False) -> bool:
    """Is it one number, or a text that is not long? A tensor of several numbers is, where it was `carried` into the loop."""
    kind = type(value)
    if kind is int:
        return bool(value.bit_length() <= LONGEST)
    if kind in SIMPLE:
        return True
    if kind in (str, bytes):
        return len(value) <= LONGEST
    if kind in tagged.WRITTEN:
        return _is_short(value)
    if kind is torch.Tensor:  # several numbers of a GPU would have to be waited for
        if not _is_usual(value) or value.is_meta or str(value.dtype).removeprefix("torch.") not in CODES:
            return False
        if value.requires_grad and value.is_leaf and value.grad is not None:
            return False  # it is trained, by a gradient that no record holds
        return value.numel() == 1 or (carried and value.numel() <= LONGEST and value.device.type == "cpu")
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    if issubclass(kind, numpy.generic):
        return value.dtype.kind in tagged.ARRAYS
    return carried and _is_array(value) and value.dtype.kind != _STRUCTURED and value.size <= LONGEST


def _is_short(value: Any) -> bool:
    """Can a record hold this path, time or number?"""
    try:
        return len(json.dumps(tagged.encode_value(value, []))) <= LONGEST and value == value
    except Exception:  # a time zone by its name, a number that may not be compared
        return False


def is_wide(value: Any) -> bool:
    """Is it a tensor or array of several numbers?"""
    return (isinstance(value, torch.Tensor) and value.numel() > 1) or (_is_array(value) and value.size > 1)


def is_small(value: Any) -> bool:
    """Does a plain value hold no more than some numbers and texts?"""
    if type(value) in SEVERAL:
        return count(value) <= FEW_VALUES
    if isinstance(value, torch.Tensor):
        return value.numel() <= FEW_VALUES
    return not _is_array(value) or value.size <= FEW_VALUES


def may_be_of_weights(value: Any) -> bool:
    """May it be made of a model's weights? A single whole number, text or truth value rather says which start of the script this is."""
    return type(value) in SEVERAL or isinstance(value, float | torch.Tensor) or _is_array(value)


def count(several: Any, deep: int = 0) -> int:
    """Numbers and texts in it; more than `MOST` where anything else is in it."""
    if len(several) > MOST or deep > DEEP:
        return MOST + 1
    total = 0
    if deep and type(several) is defaultdict and several.default_factory not in tagged.FACTORIES.values():
        return MOST + 1
    for item in (*several, *several.values()) if isinstance(several, dict) else several:
        if is_plain(item):
            total += 1
        elif type(item) in SEVERAL:
            total += 1 + count(item, deep + 1)
        else:
            return MOST + 1
        if total > MOST:
            break
    return total


def copied(value: Any) -> Any:
    """A plain value that shares nothing with this one."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if kind in (*SIMPLE, str, bytes, *tagged.WRITTEN):
        return value
    if kind in (list, tuple, set, frozenset, torch.Size):
        return kind([copied(item) for item in value])
    if kind is deque:
        return deque(map(copied, value), value.maxlen)
    if kind in SEVERAL:
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = copied(item)
        return made
    return copy.deepcopy(value)


def like(now: Any, value: Any) -> Any:
    """A copy of a value, on the device of what is there now. What was computed keeps its graph, for a backward that is to come."""
    if isinstance(now, torch.Tensor) and now.grad_fn is not None:
        return renewed(now, value)
    made = copied(value)
    return made.to(now.device) if isinstance(made, torch.Tensor) and isinstance(now, torch.Tensor) else made


def changed(now: Mapping[str, Mapping[str, Any]], first: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By function and path, values of `now` that are others than at first, or were not there."""
    found: dict[str, dict[str, Any]] = {}
    for function, those in now.items():
        was = first.get(function, {})
        others = {name: value for name, value in those.items() if name not in was or not same_value(value, was[name])}
        if others:
            found[function] = others
    return found


def held(value: Any) -> Any:
    """For a record that is packed at once. A dict whose default comes of a function of the script is one without."""
    if type(value) is defaultdict and value.default_factory not in tagged.FACTORIES.values():
        return dict(value)
    return value.detach() if isinstance(value, torch.Tensor) else value


def same_value(one: Any, other: Any) -> bool:
    """Are two plain values the same? NaN is itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    if hasattr(one, "tobytes"):
        return bool(one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes())
    return bool(one == other or (one != one and other != other))


def tensors_of(thing: Any) -> list[Any]:
    """Tensors and arrays of a model, in a list or the like, or in the state of an object of a library."""
    if isinstance(thing, torch.nn.Module):
        return [tensor for tensor in packing.tensors(thing) if not is_lazy(tensor)]
    if not is_stateful(thing) or generates(thing):
        return _tensors(thing)
    try:
        return _tensors(dict(thing.state_dict()))
    except Exception:  # as in `plain_state`
        return []


def _tensors(thing: Any, deep: int = 0) -> list[Any]:
    """Those in a list or the like, and in lists in it."""
    if issubclass(type(thing), torch.Tensor) or _is_array(thing):
        return [] if is_lazy(thing) else [thing]
    if type(thing) not in SEVERAL or deep > DEEP:
        return []
    items = list(thing.values() if isinstance(thing, dict) else thing)
    return [tensor for item in (items if len(items) <= MOST else items[-1:]) for tensor in _tensors(item, deep + 1)]


def _is_array(value: Any) -> bool:
    """Is it an array of numbers, texts, times or fields of these?"""
    numpy = sys.modules.get("numpy")
    kinds = tagged.ARRAYS + _STRUCTURED
    return numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in kinds and not value.dtype.hasobject


def checksum(thing: Any) -> int:
    """Of shapes, dtypes and values, of `SUMMED` at most, of the tensors and arrays in it. Of tensors of other classes only that."""
    items = list(thing)[-LAST:] if type(thing) in (list, deque) else thing
    tensors = tensors_of(items)
    total = len(thing) if type(thing) in SEVERAL else 0
    for tensor in tensors:
        total = zlib.crc32(_some(tensor, SUMMED // len(tensors)), zlib.crc32(_form(tensor).encode(), total))
    return total


def _form(tensor: Any) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}" if _is_array(tensor) or _is_usual(tensor) else type(tensor).__name__


def _is_usual(tensor: torch.Tensor) -> bool:
    usual = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return usual and not tensor.is_quantized and not tensor.is_nested


def _some(tensor: Any, most: int) -> bytes | memoryview:
    """Every k-th of its numbers, about `most` at most."""
    if _is_array(tensor):
        return bytes(tensor.flat[:: 1 + tensor.size // max(most, 1)].tobytes())
    if not _is_usual(tensor) or tensor.is_meta or not tensor.numel():
        return b""
    flat = tensor.detach().reshape(-1)
    return memory.view(memory.contiguous_values(flat[:: 1 + flat.numel() // max(most, 1)]))


class Versions:
    """Which tensors and arrays something held, and how often each was written."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._held = [(weakref.ref(tensor), version_of(tensor)) for tensor in tensors]

    def are(self, tensors: Sequence[Any]) -> bool:
        """Does it hold these now, unchanged?"""
        pairs = zip(self._held, tensors, strict=False)
        return len(self._held) == len(tensors) and all(ref() is now and then == version_of(now) for (ref, then), now in pairs)


def version_of(tensor: Any) -> int:
    """Another one if a tensor was written to; of an array, if one of some of its numbers is another one."""
    if _is_array(tensor):
        return zlib.crc32(_some(tensor, LOOKED_AT))
    with torch._C.DisableTorchFunctionSubclass():
        return 0 if tensor.is_inference() else int(tensor._version)


def sample_sum(tensors: Sequence[Any], few: bool) -> int:
    """A checksum of some numbers of these: what is written to `tensor.data` changes no version. `few`: of some of the tensors only."""
    total = 0
    for tensor in tensors[:: 1 + len(tensors) // FEW] if few else tensors:
        total = zlib.crc32(_some(tensor, LOOKED_AT), total)
    return total


def sample_of(value: Any) -> int:
    """A checksum of a plain value: of some numbers of a tensor or array."""
    if is_wide(value):
        return sample_sum([value], few=False)
    if type(value) in (set, frozenset):  # texts have another order in each process
        return zlib.crc32("".join(sorted(map(repr, value))).encode())
    return 0 if _holds_sets(value) else zlib.crc32(repr(value).encode())


def _holds_sets(value: Any) -> bool:
    if type(value) not in SEVERAL:
        return False
    items = (*value, *value.values()) if isinstance(value, dict) else value
    return any(type(item) in (set, frozenset) or _holds_sets(item) for item in items)


def is_stateful(value: Any) -> bool:
    """Has it a state, and keeps nobody else that? Schedulers, and random generators of the script's own."""
    kind = type(value)
    if kind.__module__.partition(".")[0] == "psjob" or issubclass(kind, (type, *NOT_PLAIN)):
        return False
    return generates(value) or (callable(getattr(kind, "state_dict", None)) and hasattr(kind, "load_state_dict"))


def generates(value: Any) -> bool:
    """Is it a generator of random numbers?"""
    numpy = sys.modules.get("numpy")
    kinds = (
        (torch.Generator, random.Random)
        if numpy is None
        else (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
    )
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def plain_state(thing: Any) -> dict[str, Any] | None:
    """A copy of its state; None where that holds more than numbers and texts."""
    if generates(thing):
        return _generator_state(thing)
    try:
        whole = thing.state_dict()
    except Exception:  # a class of a library may want to be asked at other times
        return None
    plain = type(whole) in (dict, OrderedDict) and count(whole) <= MOST
    return copy.deepcopy(dict(whole)) if plain else None


def load_state(thing: Any, whole: dict[str, Any]) -> None:
    """Give it what `plain_state` gave."""
    if isinstance(thing, torch.Generator):
        thing.set_state(torch.frombuffer(bytearray(whole["state"]), dtype=torch.uint8))
    elif isinstance(thing, random.Random):
        thing.setstate(whole["state"])
    elif hasattr(thing, "bit_generator"):
        thing.bit_generator.state = whole["state"]
    elif generates(thing):
        thing.set_state(whole["state"])
    else:
        thing.load_state_dict(whole)


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
