"""The safetensors format: its header, made and read with every bound checked. No tensor data is touched here.

A file is 8 bytes of header length (little-endian), the header (JSON, padded with spaces), then the tensors without gaps.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

MAX_HEADER: Final = 16 << 20
MAX_SIZE: Final = 1 << 48
CODES: Final[Mapping[str, str]] = {
    name: code
    for name, code in {
        "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
        "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64", "complex64": "C64",
        "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    }.items()
    if hasattr(torch, name)
}  # fmt: skip
"""The format's word for each dtype that this torch has."""
DTYPES: Final[Mapping[str, torch.dtype]] = {code: getattr(torch, name) for name, code in CODES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file: `begin` and `end` count bytes from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def make_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None, page: int = 8
) -> tuple[bytes, list[int]]:
    """(first bytes of the file, size of each tensor) for tensors (name, dtype as in CODES, shape) in the order of their bytes.

    What follows them begins at a multiple of `page`. Raises ValueError for a dtype that the format lacks, a name that is there twice,
    or a header beyond MAX_HEADER.
    """
    body: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    sizes: list[int] = []
    at = 0
    for name, dtype, shape in tensors:
        if dtype not in CODES:
            raise ValueError(f"tensor {name} has dtype {dtype}; safetensors can hold {', '.join(CODES)}")
        if name in body:
            raise ValueError(f"tensor {name} is there twice")
        size = _numel(shape) * DTYPES[CODES[dtype]].itemsize
        body[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        sizes.append(size)
        at += size
    raw = json.dumps(body, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % page)
    if len(raw) > MAX_HEADER:
        raise ValueError(f"a header of {len(raw)} bytes, at most {MAX_HEADER} are allowed")
    return struct.pack("<Q", len(raw)) + raw, sizes


def header_length(start: bytes | bytearray, size: int) -> int:
    """Length of the header, from the first 8 bytes of a file of `size` bytes. Raises ValueError before anyone allocates it."""
    if len(start) != 8:
        raise ValueError(f"{size} bytes are too few for a header")
    length: int = struct.unpack("<Q", start)[0]
    if length > min(MAX_HEADER, size - 8):
        raise ValueError(f"a header of {length} bytes in a file of {size}, at most {MAX_HEADER} are allowed")
    return length


def read_header(raw: bytes | bytearray, data: int) -> dict[str, TensorEntry]:
    """Tensors by name, in the order of their bytes, of a file with `data` bytes after its header `raw`.

    Raises ValueError unless they fill those bytes without gap or overlap.
    """
    try:
        body = json.loads(raw, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("a header nested too deep") from None
    if not isinstance(body, dict):
        raise ValueError("a header that is no object")
    body.pop("__metadata__", None)
    found = sorted(((name, _entry(name, value)) for name, value in body.items()), key=lambda item: (item[1].begin, item[1].end))
    at = 0
    for name, entry in found:
        size = _numel(entry.shape) * entry.dtype.itemsize
        if entry.begin != at or entry.end - entry.begin != size:
            raise ValueError(f"tensor {name[:80]} of {size} bytes at {entry.begin} to {entry.end}, where {at} is next")
        at = entry.end
    if at != data:
        raise ValueError(f"tensors of {at} bytes in {data}")
    return dict(found)


def _entry(name: str, value: object) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name[:80]} with other keys than dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"tensor {name[:80]} of dtype {str(dtype)[:20]}")
    if not isinstance(shape, list) or len(shape) > 64 or not all(type(n) is int and 0 <= n <= MAX_SIZE for n in shape):
        raise ValueError(f"tensor {name[:80]} of a shape that is not a list of whole numbers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        raise ValueError(f"tensor {name[:80]} with offsets that are none")
    return TensorEntry(DTYPES[dtype], tuple(shape), offsets[0], offsets[1])


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise ValueError("a key that is there twice")
    return body


def _numel(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
