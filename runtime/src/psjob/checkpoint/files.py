"""Tensors in safetensors files, written and read in streams, each byte under a crc."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from psjob import memory
from psjob.checkpoint import disk
from psjob.checkpoint.problems import CheckpointProblem, Damage

__all__ = ["CheckpointProblem", "Damage", "FileFact", "Held", "Span", "check", "read_blocks", "write_blocks"]

MAX_HEADER: Final = 16 << 20
CODES: Final = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64", "complex64": "C64",
}  # fmt: skip
"""The format's word for each dtype."""
DTYPES: Final = {code: getattr(torch, name) for name, code in CODES.items() if hasattr(torch, name)}


@dataclass(frozen=True)
class Span:
    """Where a tensor's bytes lie, from the start of the file, and their crc32."""

    offset: int
    length: int
    crc: int


@dataclass(frozen=True)
class FileFact:
    """What a file was when it was written: size in bytes, crc32 of its header, a span a tensor. Together they cover every byte."""

    name: str
    bytes: int
    crc: int
    tensors: Mapping[str, Span]

    def to_json(self) -> dict[str, Any]:
        """For a manifest or a message."""
        return {
            "name": self.name,
            "bytes": self.bytes,
            "crc": self.crc,
            "tensors": {name: [span.offset, span.length, span.crc] for name, span in self.tensors.items()},
        }

    @classmethod
    def from_json(cls, obj: object) -> FileFact:
        """Read what `to_json` gave. Raises ValueError with a sentence."""
        if not isinstance(obj, dict) or not isinstance(obj.get("name"), str) or not disk.NAME.fullmatch(obj["name"]):
            raise ValueError("the facts of a file begin with its plain name")
        numbers = [obj.get("bytes"), obj.get("crc")]
        tensors = obj.get("tensors")
        if not isinstance(tensors, dict) or not all(isinstance(v, list) and len(v) == 3 for v in tensors.values()):
            raise ValueError(f"the facts of file {obj['name']} need a span of three numbers a tensor")
        if not all(type(n) is int and n >= 0 for n in (*numbers, *(n for v in tensors.values() for n in v))):
            raise ValueError(f"the facts of file {obj['name']} are whole numbers from 0")
        return cls(obj["name"], obj["bytes"], obj["crc"], {name: Span(*v) for name, v in tensors.items()})


@dataclass(frozen=True)
class Held:
    """A tensor that is made only when its bytes are written."""

    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]


def write_blocks(
    folder: Path, name: str, tensors: Iterable[tuple[str, torch.Tensor | Held]], metadata: Mapping[str, str] | None = None
) -> FileFact:
    """Write one safetensors file, whole or not at all, and make it durable. Raises CheckpointProblem."""
    entries = [(key, t if isinstance(t, Held) else _held(t)) for key, t in tensors]
    entries.sort(key=lambda entry: -DTYPES[_code(entry[0], entry[1].dtype)].itemsize)  # so that each stays aligned
    header, sizes = _header(entries, dict(metadata or {}))
    spans: dict[str, Span] = {}

    def parts() -> Iterator[memoryview | bytes]:
        yield header
        offset = len(header)
        for (key, held), size in zip(entries, sizes, strict=True):
            tensor = held.make().detach().to("cpu").contiguous()
            raw = memory.view(tensor)
            if len(raw) != size or str(tensor.dtype) != f"torch.{held.dtype}":
                raise CheckpointProblem(f"tensor {key} has {len(raw)} bytes of {tensor.dtype}, its header says {size} of {held.dtype}")
            spans[key] = Span(offset, size, zlib.crc32(raw))
            offset += size
            yield raw

    disk.write_whole(folder, name, parts())
    return FileFact(name, len(header) + sum(sizes), zlib.crc32(header), spans)


def read_blocks(path: Path, wanted: Collection[str] | None = None, expect: FileFact | None = None) -> dict[str, torch.Tensor]:
    """The tensors named in `wanted` (None: all). Raises Damage where the file is not whole or not as `expect` says.

    Nothing is allocated before its bounds are checked against the file's true size.
    """
    with disk.opened_regular(path) as (fd, size):
        entries, data = _read_header(fd, size, path.name, expect)
        names = list(entries) if wanted is None else list(wanted)
        found: dict[str, torch.Tensor] = {}
        for name in names:
            if name not in entries:
                raise Damage(path.name, f"tensor {name}", f"{len(entries)} tensors without it")
            dtype, shape, begin, end = entries[name]
            tensor = torch.empty(shape, dtype=dtype)
            raw = memory.view(tensor)
            os.lseek(fd, data + begin, os.SEEK_SET)
            disk.read_into(fd, raw, path.name)
            if expect is not None:
                _same(path.name, f"tensor {name}", expect.tensors.get(name), Span(data + begin, end - begin, zlib.crc32(raw)))
            found[name] = tensor
        return found


def check(path: Path, expect: FileFact) -> None:
    """Read the whole file and compare every byte's crc with `expect`. Raises Damage or CheckpointProblem."""
    with disk.opened_regular(path) as (fd, size):
        entries, data = _read_header(fd, size, path.name, expect)
        if set(entries) != set(expect.tensors):
            raise Damage(path.name, f"{len(expect.tensors)} tensors", f"{len(entries)} with other names")
        buffer = memoryview(bytearray(1 << 20))
        for name, (_, _, begin, end) in entries.items():
            os.lseek(fd, data + begin, os.SEEK_SET)
            crc, left = 0, end - begin
            while left:
                part = buffer[: min(left, len(buffer))]
                disk.read_into(fd, part, path.name)
                crc = zlib.crc32(part, crc)
                left -= len(part)
            _same(path.name, f"tensor {name}", expect.tensors[name], Span(data + begin, end - begin, crc))


Entry = tuple[torch.dtype, tuple[int, ...], int, int]


def _header(entries: list[tuple[str, Held]], metadata: dict[str, str]) -> tuple[bytes, list[int]]:
    body: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    sizes: list[int] = []
    at = 0
    for key, held in entries:
        if key in body:
            raise CheckpointProblem(f"tensor {key} is in the file twice")
        size = DTYPES[CODES[held.dtype]].itemsize
        for length in held.shape:
            size *= length
        body[key] = {"dtype": CODES[held.dtype], "shape": list(held.shape), "data_offsets": [at, at + size]}
        sizes.append(size)
        at += size
    raw = json.dumps(body, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    if len(raw) > MAX_HEADER:
        raise CheckpointProblem(f"the header of a checkpoint file would have {len(raw)} bytes, at most {MAX_HEADER} are allowed")
    return struct.pack("<Q", len(raw)) + raw, sizes


def _read_header(fd: int, size: int, name: str, expect: FileFact | None) -> tuple[dict[str, Entry], int]:
    if expect is not None and size != expect.bytes:
        raise Damage(name, f"{expect.bytes} bytes", f"{size} bytes")
    if size < 8:
        raise Damage(name, "a header", f"{size} bytes")
    start = bytearray(8)
    disk.read_into(fd, memoryview(start), name)
    length: int = struct.unpack("<Q", start)[0]
    if length > MAX_HEADER or 8 + length > size:
        raise Damage(name, f"a header of at most {min(MAX_HEADER, size - 8)} bytes", f"one of {length}")
    raw = bytearray(length)
    disk.read_into(fd, memoryview(raw), name)
    if expect is not None and (crc := zlib.crc32(raw, zlib.crc32(start))) != expect.crc:
        raise Damage(name, f"crc {expect.crc:08x} of its header", f"{crc:08x}")
    try:
        body = json.loads(raw, object_pairs_hook=_once)
        if not isinstance(body, dict):
            raise ValueError("the header is no object")
        body.pop("__metadata__", None)
        entries = {key: _entry(key, value) for key, value in body.items()}
    except (ValueError, RecursionError) as error:
        raise Damage(name, "a safetensors header", str(error)[:200]) from None
    at = 0
    for key, (dtype, shape, begin, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        numel = 1
        for length in shape:
            numel *= length
        if begin != at or end - begin != numel * dtype.itemsize:
            raise Damage(name, f"tensor {key} at {at} with {numel * dtype.itemsize} bytes", f"{begin} to {end}")
        at = end
    if 8 + len(raw) + at != size:
        raise Damage(name, f"{8 + len(raw) + at} bytes by its header", f"{size} bytes")
    return entries, 8 + len(raw)


def _entry(key: str, value: object) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {key[:80]} has other keys than dtype, shape and data_offsets")
    shape, offsets = value["shape"], value["data_offsets"]
    if not isinstance(value["dtype"], str) or value["dtype"] not in DTYPES:
        raise ValueError(f"tensor {key[:80]} has dtype {str(value['dtype'])[:20]}")
    if not isinstance(shape, list) or len(shape) > 64 or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
        raise ValueError(f"tensor {key[:80]} has a bad shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        raise ValueError(f"tensor {key[:80]} has bad offsets")
    return DTYPES[value["dtype"]], tuple(shape), offsets[0], offsets[1]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise ValueError("a key is there twice")
    return body


def _same(file: str, what: str, expected: Span | None, found: Span) -> None:
    if expected != found:
        raise Damage(file, f"{what} as {_words(expected)}", _words(found))


def _words(span: Span | None) -> str:
    return "not there" if span is None else f"{span.length} bytes at {span.offset} with crc {span.crc:08x}"


def _code(key: str, dtype: str) -> str:
    if dtype not in CODES or CODES[dtype] not in DTYPES:
        raise CheckpointProblem(f"tensor {key} has dtype {dtype}, which a checkpoint cannot hold; it can hold {', '.join(CODES)}")
    return CODES[dtype]


def _held(tensor: torch.Tensor) -> Held:
    return Held(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), lambda: tensor)
