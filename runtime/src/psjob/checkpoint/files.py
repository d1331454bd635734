"""Tensors in safetensors files, written and read in streams, each byte under a crc.

A file is 8 bytes of header length (little-endian), the header (JSON, padded with spaces), then the tensors without gaps. The header is
made and read with every bound checked.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from psjob.checkpoint import disk
from psjob.checkpoint.disk import CheckpointProblem, Damage
from psjob.layout import memory

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


MAX_JSON_FILE = 64 << 20


@dataclass(frozen=True)
class ByteRange:
    """If a tensor's bytes lie, from the start of the file, and their crc32."""

    offset: int
    length: int
    crc: int


@dataclass(frozen=True)
class FileFact:
    """What a file was when it was written: size in bytes, crc32 of its header, a span a tensor. Together they cover every byte."""

    name: str
    bytes: int
    crc: int
    tensors: Mapping[str, ByteRange]

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
        return cls(obj["name"], obj["bytes"], obj["crc"], {name: ByteRange(*v) for name, v in tensors.items()})


@dataclass(frozen=True)
class DeferredTensor:
    """A tensor that is made only when its bytes are written."""

    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        """Size of its data."""
        return _bytes(self.dtype, self.shape)

    def parts(self) -> Iterator[torch.Tensor]:
        """It, as one part."""
        yield self.make()


@dataclass(frozen=True)
class PartedTensor:
    """A tensor whose parts, one after the other, are made as they are written: it is never in memory as a whole."""

    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[torch.Tensor]]

    @property
    def bytes(self) -> int:
        """Size of its data."""
        return _bytes(self.dtype, self.shape)


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    size: int = getattr(torch, dtype).itemsize
    return math.prod(shape) * size


Entry = tuple[str, torch.Tensor | DeferredTensor | PartedTensor]
"""A tensor for a file, by its name."""


def write_blocks(
    folder: Path, name: str, tensors: Iterable[Entry], metadata: Mapping[str, str] | None = None,
    moved: disk.Moved | None = None,
) -> FileFact:  # fmt: skip
    """Write one safetensors file, whole or not at all, and make it durable. `moved` is called with the bytes of tensors written.

    Raises CheckpointProblem and what `moved` raises.
    """
    entries = [(key, _held(t) if isinstance(t, torch.Tensor) else t) for key, t in tensors]
    # Whole pages first, as they can be written from where they lie; then so that each stays aligned.
    entries.sort(key=lambda entry: (entry[1].bytes % disk.PAGE != 0, -getattr(torch, entry[1].dtype).itemsize))
    total = sum(held.bytes for _, held in entries)
    try:
        shapes = [(key, held.dtype, held.shape) for key, held in entries]
        header, sizes = make_header(shapes, metadata, disk.PAGE if total >= disk.LARGE else 8)
    except ValueError as error:
        raise CheckpointProblem(f"cannot write {name} in {folder}: {error}") from None
    spans: dict[str, ByteRange] = {}

    def parts() -> Iterator[memoryview | bytes]:
        yield header
        offset = len(header)
        for (key, held), size in zip(entries, sizes, strict=True):
            written = crc = 0
            for part in held.parts():
                tensor = part.detach().to("cpu").contiguous()
                raw = memory.view(tensor)
                written += len(raw)
                if written > size or str(tensor.dtype) != f"torch.{held.dtype}":
                    raise CheckpointProblem(f"tensor {key} has {written} bytes of {tensor.dtype}, its header says {size} of {held.dtype}")
                crc = zlib.crc32(raw, crc)
                yield raw
            if written != size:
                raise CheckpointProblem(f"tensor {key} has {written} bytes, its header says {size} of {held.dtype}")
            spans[key] = ByteRange(offset, size, crc)
            offset += size

    disk.write_whole(folder, name, parts(), total, None if moved is None else _beyond(len(header), moved))
    return FileFact(name, len(header) + total, zlib.crc32(header), spans)


def _beyond(first: int, moved: disk.Moved) -> disk.Moved:
    """`moved`, told of all bytes but the `first` ones."""
    left = first

    def told(count: int) -> None:
        nonlocal left
        skipped = min(left, count)
        left -= skipped
        moved(count - skipped)

    return told


def write_json(folder: Path, name: str, body: Any) -> FileFact:
    """Write one JSON file, whole or not at all, and make it durable; its fact has no tensors. Raises CheckpointProblem."""
    raw = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    if len(raw) > MAX_JSON_FILE:
        raise CheckpointProblem(
            f"{name} would have {len(raw)} bytes, at most {MAX_JSON_FILE} are allowed: use fewer workers or more shards"
        )
    disk.write_whole(folder, name, [raw])
    return FileFact(name, len(raw), zlib.crc32(raw), {})


def read_json(path: Path, expect: FileFact) -> Any:
    """What `write_json` was given. Raises Damage if a byte is another, or CheckpointProblem."""
    raw = disk.read_small(path, MAX_JSON_FILE)
    found = (len(raw), zlib.crc32(raw))
    if found != (expect.bytes, expect.crc):
        raise Damage(path.name, f"{expect.bytes} bytes with crc {expect.crc:08x}", f"{found[0]} bytes with crc {found[1]:08x}")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Damage(path.name, "JSON", str(error)[:200]) from None


def read_blocks(
    path: Path, wanted: Collection[str] | None = None, expect: FileFact | None = None, moved: disk.Moved | None = None
) -> dict[str, torch.Tensor]:
    """The tensors named in `wanted` (None: all). Raises Damage if the file is not whole or not as `expect` says.

    Nothing is allocated before its bounds are checked against the file's true size.
    """
    with opened_checkpoint_file(path, expect, moved) as reader:
        return {name: reader.read(name) for name in (list(reader.entries) if wanted is None else wanted)}


def check_file(path: Path, expect: FileFact) -> None:
    """Read the whole file and compare every byte's crc with `expect`. Raises Damage or CheckpointProblem."""
    if path.suffix == ".json":
        read_json(path, expect)
        return
    with opened_checkpoint_file(path, expect) as reader:
        if set(reader.entries) != set(expect.tensors):
            raise Damage(path.name, f"{len(expect.tensors)} tensors", f"{len(reader.entries)} with other names")
        buffer = memoryview(bytearray(1 << 20))
        for name in reader.entries:
            reader.skim(name, buffer)


@contextlib.contextmanager
def opened_checkpoint_file(path: Path, expect: FileFact | None = None, moved: disk.Moved | None = None) -> Iterator[Reader]:
    """A reader of the file, which tells `moved` of tensors' bytes; the header is read and checked once.

    Raises Damage or CheckpointProblem.
    """
    with disk.opened_regular(path) as (fd, size):
        if expect is not None and size != expect.bytes:
            raise Damage(path.name, f"{expect.bytes} bytes", f"{size} bytes")
        start = bytearray(min(8, size))
        disk.read_into(fd, memoryview(start), path.name)
        try:
            raw = bytearray(header_length(start, size))
            disk.read_into(fd, memoryview(raw), path.name)
            if expect is not None and (crc := zlib.crc32(raw, zlib.crc32(start))) != expect.crc:
                raise Damage(path.name, f"crc {expect.crc:08x} of its header", f"{crc:08x}")
            data = 8 + len(raw)
            yield Reader(path.name, fd, data, read_header(raw, size - data), expect, moved)
        except ValueError as error:
            raise Damage(path.name, "a safetensors header", str(error)[:200]) from None


class Reader:
    """An open file. `entries` are its tensors; where facts were expected, each read is compared with them."""

    def __init__(
        self, name: str, fd: int, data: int, entries: Mapping[str, TensorEntry], expect: FileFact | None,
        moved: disk.Moved | None = None,
    ) -> None:  # fmt: skip
        self.entries = entries
        self._name, self._fd, self._data, self._expect, self._moved = name, fd, data, expect, moved

    def read(self, name: str) -> torch.Tensor:
        """A tensor of the file. Raises Damage if it is not there or not as expected."""
        if name not in self.entries:
            raise Damage(self._name, f"tensor {name}", f"{len(self.entries)} tensors without it")
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        raw = memory.view(tensor)
        os.lseek(self._fd, self._data + entry.begin, os.SEEK_SET)
        disk.read_into(self._fd, raw, self._name, self._moved)
        if self._expect is not None:
            self._compare(name, zlib.crc32(raw))
        return tensor

    def skim(self, name: str, buffer: memoryview) -> None:
        """Compare a tensor's crc through a small buffer, without keeping it. Raises Damage."""
        entry = self.entries[name]
        os.lseek(self._fd, self._data + entry.begin, os.SEEK_SET)
        crc, left = 0, entry.end - entry.begin
        while left:
            part = buffer[: min(left, len(buffer))]
            disk.read_into(self._fd, part, self._name)
            crc = zlib.crc32(part, crc)
            left -= len(part)
        self._compare(name, crc)

    def _compare(self, name: str, crc: int) -> None:
        assert self._expect is not None
        entry = self.entries[name]
        _same(
            self._name, f"tensor {name}", self._expect.tensors.get(name), ByteRange(self._data + entry.begin, entry.end - entry.begin, crc)
        )


def _same(file: str, what: str, expected: ByteRange | None, found: ByteRange) -> None:
    if expected != found:
        raise Damage(file, f"{what} as {_words(expected)}", _words(found))


def _words(span: ByteRange | None) -> str:
    return "not there" if span is None else f"{span.length} bytes at {span.offset} with crc {span.crc:08x}"


def _held(tensor: torch.Tensor) -> DeferredTensor:
    return DeferredTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), lambda: tensor)
