"""Plain Python values as JSON that keeps what JSON loses: int keys, tuples, sets, Counter, bytes, inf, tensors.

A tag is an object with one key that begins with `~`. Tensors and arrays stand aside, by number. What has no tag is refused
by its path, never guessed.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import fractions
import math
import pathlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from psjob.layout import memory

DEPTH: Final = 64
MOST_ALIKE: Final = 64
"""Keys of one hash."""
FACTORIES: Final[dict[str, Callable[[], Any]]] = {"int": int, "float": float, "list": list, "dict": dict, "set": set, "str": str}
ARRAYS: Final = "biufcUSmM"
"""Kinds of numpy's dtypes: numbers, texts and times."""


class Unwritable(ValueError):
    """A value that has no tag; the text begins with its path."""


def encode_value(value: Any, tensors: list[torch.Tensor], path: str = "") -> Any:
    """`value` as JSON; its tensors are appended to `tensors`, detached and not copied. Raises Unwritable, naming the path."""
    return _encode(value, tensors, path, 0)


def decode_value(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The value that `encode_value` was given; tensors are on the CPU. Raises ValueError on what `encode_value` does not write."""
    return _decode(value, tensors, 0)


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """Sentences that say where `after` is not what `before` was, in type or value; bytes of tensors, NaN equal to NaN."""
    name = path or "value"
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        same = before.dtype == after.dtype and before.shape == after.shape and _bytes(before) == _bytes(after)
        return [] if same else [f"{name}: tensor {before.dtype} {tuple(before.shape)} came back as another"]
    if type(before) is not type(after):
        return [f"{name}: {type(before).__name__} came back as {type(after).__name__}"]
    if isinstance(before, Mapping):
        if differences(list(before), list(after)):
            return [f"{name}: its keys came back as others"]
        pairs = zip(before.items(), after.values(), strict=True)
        return [line for (key, one), other in pairs for line in differences(one, other, f"{path}.{key}" if path else str(key))]
    if isinstance(before, list | tuple | deque):
        if len(before) != len(after):
            return [f"{name}: {len(before)} items came back as {len(after)}"]
        items = enumerate(zip(before, after, strict=True))
        return [line for index, (one, other) in items for line in differences(one, other, f"{path}[{index}]")]
    if isinstance(before, float):
        same = (before == after and math.copysign(1, before) == math.copysign(1, after)) or (before != before and after != after)
        return [] if same else [f"{name}: {before!r} came back as {after!r}"]
    if isinstance(before, complex):
        return differences(before.real, after.real, name) + differences(before.imag, after.imag, name)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(before, numpy.ndarray | numpy.generic):
        same = before.dtype == after.dtype and before.shape == after.shape and before.tobytes() == after.tobytes()
        return [] if same else [f"{name}: array came back as another"]
    return [] if before == after else [f"{name}: {str(before)[:40]!r} came back as {str(after)[:40]!r}"]


_PLAIN: Final = frozenset({type(None), bool, int, str})
"""What JSON gives back as it was. A list of thousands of these, such as one number a parameter, is looked at by one call."""


def _encode(value: Any, tensors: list[torch.Tensor], path: str, depth: int) -> Any:
    if depth > DEPTH:
        raise Unwritable(f"{path[:60]}…: nested deeper than {DEPTH}, or it holds itself")
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"~float": repr(value)}

    def each(items: Any) -> list[Any]:
        return [_encode(item, tensors, f"{path}[{index}]", depth + 1) for index, item in enumerate(items)]

    def pairs(items: Mapping[Any, Any]) -> list[list[Any]]:
        return [
            [_encode(key, tensors, f"{path}.{key}", depth + 1), _encode(item, tensors, f"{path}.{key}", depth + 1)]
            for key, item in items.items()
        ]

    if kind is list:
        return list(value) if _PLAIN.issuperset(map(type, value)) else each(value)
    if kind is dict:
        if all(type(key) is str and not key.startswith("~") for key in value):
            return {key: _encode(item, tensors, f"{path}.{key}" if path else key, depth + 1) for key, item in value.items()}
        return {"~dict": pairs(value)}
    if kind in _SEQUENCES:
        return {_SEQUENCES[kind]: each(value)}
    if kind in (OrderedDict, Counter):
        return {"~ordered" if kind is OrderedDict else "~counter": pairs(value)}
    if kind is defaultdict:
        factory = next((name for name, made in FACTORIES.items() if made is value.default_factory), None)
        if factory is not None:
            return {"~default": [factory, pairs(value)]}
    if kind is deque:
        return {"~deque": [value.maxlen, each(value)]}
    if kind in (bytes, bytearray):
        return {f"~{kind.__name__}": base64.b64encode(value).decode()}
    if kind is complex:
        return {"~complex": [_encode(value.real, tensors, path, depth), _encode(value.imag, tensors, path, depth)]}
    if kind in (torch.device, torch.dtype):
        return {f"~{kind.__name__}": str(value).removeprefix("torch.")}
    if kind in _WRITTEN:
        tag, written = _WRITTEN[kind]
        return {tag: written(value, path)}
    if kind in (torch.Tensor, torch.nn.Parameter):
        return {"~tensor": _aside(value, tensors, path)}
    numpy = sys.modules.get("numpy")
    if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)) and value.dtype.kind in ARRAYS:
        raw = (
            torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
            if value.size
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        tensors.append(raw)
        return {"~array" if kind is numpy.ndarray else "~scalar": [value.dtype.str, list(value.shape), len(tensors) - 1]}
    raise Unwritable(f"{path}: a {kind.__module__}.{kind.__qualname__} cannot be kept in a resume record")


def _time(value: datetime.datetime | datetime.time, path: str) -> str:
    if value.fold or type(value.tzinfo) not in (type(None), datetime.timezone):
        raise Unwritable(f"{path}: a time in a time zone by its name cannot be kept in a resume record; keep it in UTC")
    return value.isoformat()


def _path(body: Any) -> pathlib.PurePath:
    name, text = body
    return _PATHS[name](text)


def _aside(value: torch.Tensor, tensors: list[torch.Tensor], path: str) -> int:
    if value.layout is not torch.strided or value.is_quantized or str(value.dtype) in ("torch.complex32", "torch.complex128"):
        raise Unwritable(f"{path}: a {value.layout} tensor of {value.dtype} cannot be kept in a resume record")
    tensors.append(value.detach())
    return len(tensors) - 1


def _decode(value: Any, tensors: Sequence[torch.Tensor], depth: int) -> Any:
    if depth > 4 * DEPTH:
        raise ValueError("nested too deep")
    if isinstance(value, list):
        return [_decode(item, tensors, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("~"):
        return {key: _decode(item, tensors, depth + 1) for key, item in value.items()}
    if len(value) != 1 or tag not in _READERS:
        raise ValueError(f"unknown tag {tag[:40]!r}")
    body = value[tag]
    if tag == "~tensor":
        return tensors[body]
    if tag in ("~array", "~scalar"):
        return _array(tag, body, tensors)
    if tag not in ("~bytes", "~bytearray", "~device", "~dtype", "~float"):
        body = _decode(body, tensors, depth + 1)
    return _READERS[tag](body)


def _array(tag: str, body: Any, tensors: Sequence[torch.Tensor]) -> Any:
    import numpy  # only if a script used it before

    kind, shape, number = body
    try:
        dtype = numpy.dtype(str(kind))
    except SyntaxError as error:  # numpy lets Python parse a list of several
        raise ValueError(f"array of {kind!r}") from error
    if dtype.kind not in ARRAYS:
        raise ValueError(f"array of {kind!r}")
    flat = numpy.frombuffer(bytearray(_bytes(tensors[number])), dtype=dtype).reshape(shape)
    return flat if tag == "~array" else flat[()]


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(memory.view(memory.contiguous_values(tensor)))


def _unlike(items: Any) -> Any:
    """Keys of a set or a mapping. Raises ValueError if many have one hash: each costs as much time as there are such keys before it."""
    counts = Counter(map(hash, items)) if len(items) > MOST_ALIKE else {}
    if counts and max(counts.values()) > MOST_ALIKE:
        raise ValueError(f"{max(counts.values())} keys with one hash")
    return items


def _pairs(body: Any) -> dict[Any, Any]:
    """A mapping of key and value pairs."""
    _unlike([key for key, _ in body])
    return dict(body)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name[:40]!r} is no dtype")
    return found


_PATHS: Final[dict[str, type[pathlib.PurePath]]] = {
    kind.__name__: kind for kind in (type(pathlib.Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath)
}
_WRITTEN: Final[dict[type, tuple[str, Callable[[Any, str], Any]]]] = {
    **{kind: ("~path", lambda value, _: [type(value).__name__, str(value)]) for kind in _PATHS.values()},
    datetime.datetime: ("~datetime", _time),
    datetime.time: ("~time", _time),
    datetime.date: ("~date", lambda value, _: value.isoformat()),
    datetime.timedelta: ("~timedelta", lambda value, _: [value.days, value.seconds, value.microseconds]),
    decimal.Decimal: ("~decimal", lambda value, _: str(value)),
    fractions.Fraction: ("~fraction", lambda value, _: [value.numerator, value.denominator]),
    range: ("~range", lambda value, _: [value.start, value.stop, value.step]),
}
"""By class, the tag and what is written."""
WRITTEN: Final = tuple(_WRITTEN)
_SEQUENCES: Final[dict[type, str]] = {tuple: "~tuple", set: "~set", frozenset: "~frozenset", torch.Size: "~size"}
_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "~float": float,
    "~dict": _pairs,
    "~tuple": tuple,
    "~set": lambda body: set(_unlike(body)),
    "~frozenset": lambda body: frozenset(_unlike(body)),
    "~size": torch.Size,
    "~ordered": lambda body: OrderedDict(_pairs(body)),
    "~counter": lambda body: Counter(_pairs(body)),
    "~default": lambda body: defaultdict(FACTORIES[body[0]], _pairs(body[1])),
    "~deque": lambda body: deque(body[1], maxlen=body[0]),
    "~bytes": lambda body: base64.b64decode(body, validate=True),
    "~bytearray": lambda body: bytearray(base64.b64decode(body, validate=True)),
    "~complex": lambda body: complex(*body),
    "~device": torch.device,
    "~dtype": _dtype,
    "~tensor": lambda body: body,
    "~path": _path,
    "~datetime": datetime.datetime.fromisoformat,
    "~time": datetime.time.fromisoformat,
    "~date": datetime.date.fromisoformat,
    "~timedelta": lambda body: datetime.timedelta(*body),
    "~decimal": decimal.Decimal,
    "~fraction": lambda body: fractions.Fraction(*body),
    "~range": lambda body: range(*body),
    "~array": lambda body: body,
    "~scalar": lambda body: body,
}
