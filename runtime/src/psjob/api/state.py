"""The namespace behind `psjob.state`: what a script carries from pass to pass, in every resume record."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from psjob.process.errors import Refused
from psjob.resume import record

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


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"
