"""Nested structures of tensors as bytes: a head of JSON, then the elements of each tensor. No pickle.

Each tensor begins at a multiple of ALIGNED bytes after the head, which is filled up with blanks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from psjob.layout import memory
from psjob.wire.frame import MAX_JSON, MAX_LEVELS, WireError

ALIGNED: Final = 64
_NAMES: Final = {
    name: getattr(torch, name)
    for name in (
        "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
    )
}  # fmt: skip
_DTYPES: Final = {dtype: name for name, dtype in _NAMES.items()}


def encode_structure(value: Any) -> tuple[bytes, list[memoryview]]:
    """The head of a structure, and the bytes of its tensors in their order.

    Args:
        value: None, booleans, numbers, strings and tensors, in tuples, lists, and dicts whose keys are strings. Tensors of other devices
            are copied to the CPU; what lies there in one piece is not copied, and must stay as it is while its bytes are used.

    Raises:
        ValueError: something else, a structure that is nested deeper than MAX_LEVELS, or a head above MAX_JSON.
    """
    tensors: list[torch.Tensor] = []
    head = json.dumps(_told(value, tensors, 0), separators=(",", ":")).encode()
    if len(head) > MAX_JSON - ALIGNED:
        raise ValueError(f"the shapes of {len(tensors)} tensors take {len(head)} bytes, at most {MAX_JSON - ALIGNED} can be sent")
    parts: list[memoryview] = []
    for tensor in tensors:
        raw = memory.view(tensor)
        parts.append(raw)
        if gap := -len(raw) % ALIGNED:
            parts.append(memoryview(bytes(gap)))
    return head.ljust(len(head) + -len(head) % ALIGNED), parts


def decode_structure(head: bytes | memoryview, body: memoryview) -> Any:
    """The structure again. Its tensors lie in the memory of `body`; those that needed a gradient need one.

    Raises:
        WireError: this is none, or of another size.
    """
    try:
        reader = _Reader(body)
        value = reader.value(json.loads(bytes(head)))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, RuntimeError, OverflowError) as error:
        raise WireError(f"this is no structure of tensors: {error!r}") from None
    if reader.at != len(body):
        raise WireError(f"a structure has {len(body)} bytes of tensors, and says {reader.at}")
    return value


def _told(value: Any, tensors: list[torch.Tensor], level: int) -> Any:
    if level > MAX_LEVELS:
        raise ValueError(f"it is nested deeper than {MAX_LEVELS} levels")
    if isinstance(value, torch.Tensor):
        return _tensor(value, tensors)
    if value is None or type(value) in (bool, int, float, str):
        return {"v": value}
    if type(value) in (tuple, list):
        return {"u" if type(value) is tuple else "l": [_told(one, tensors, level + 1) for one in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"d": [[key, _told(one, tensors, level + 1)] for key, one in value.items()]}
    if type(value) is torch.Size:
        return {"u": [{"v": size} for size in value]}
    what = "a dict with keys that are no strings" if type(value) is dict else type(value).__name__
    raise ValueError(f"it holds {what}; give tensors, numbers and strings in tuples, lists and dicts")


def _tensor(value: torch.Tensor, tensors: list[torch.Tensor]) -> Mapping[str, Any]:
    if value.layout is not torch.strided or value.is_quantized or value.dtype not in _DTYPES:
        raise ValueError(f"it holds a tensor of layout {value.layout} and dtype {value.dtype}, which cannot be sent; make it a dense one")
    plain = value.detach().to("cpu").resolve_conj().resolve_neg()
    order = sorted(range(plain.dim()), key=plain.stride, reverse=True)
    inner = plain.permute(order)
    if plain.is_contiguous() or not inner.is_contiguous():
        tensors.append(plain.contiguous())
        return {"t": [_DTYPES[value.dtype], list(value.shape), value.requires_grad]}
    tensors.append(inner)  # dense, with its dimensions in another order, which kernels go by
    return {"t": [_DTYPES[value.dtype], list(inner.shape), value.requires_grad, order]}


class _Reader:
    def __init__(self, body: memoryview) -> None:
        self._body, self.at = body, 0

    def value(self, told: Any, level: int = 0) -> Any:
        if level > MAX_LEVELS:
            raise ValueError(f"nested deeper than {MAX_LEVELS} levels")
        ((kind, inner),) = told.items()
        if kind == "t":
            return self._tensor(*inner)
        if kind == "v":
            if inner is not None and type(inner) not in (bool, int, float, str):
                raise ValueError(f"{type(inner).__name__} as a plain value")
            return inner
        if kind == "d":
            return {str(key): self.value(one, level + 1) for key, one in inner}
        values = [self.value(one, level + 1) for one in inner]
        return {"u": tuple, "l": list}[kind](values)

    def _tensor(self, name: str, shape: Sequence[int], needs: bool, order: Sequence[int] | None = None) -> torch.Tensor:
        dtype, count = _NAMES[name], 1
        for size in shape:
            if type(size) is not int or size < 0:
                raise ValueError(f"a size of {str(size)[:40]}")
            count *= size
        length = count * dtype.itemsize
        if length > len(self._body) - self.at:
            raise ValueError(f"a tensor of {length} bytes where {len(self._body) - self.at} are left")
        raw = self._body[self.at : self.at + length]
        self.at += length + -length % ALIGNED
        made = torch.frombuffer(raw, dtype=dtype).view(shape) if count else torch.empty(shape, dtype=dtype, device="cpu")
        if order is not None:
            if sorted(order) != list(range(len(shape))):
                raise ValueError(f"an order of dimensions {order}, expected each of 0 to {len(shape) - 1} once")
            made = made.permute([order.index(dim) for dim in range(len(order))])
        return made.requires_grad_(bool(needs) and (dtype.is_floating_point or dtype.is_complex))
