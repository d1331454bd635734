"""Tensors in safetensors files, written and read in streams, each byte under a crc."""

from __future__ import annotations

import contextlib
import json
import math
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from psjob.checkpoint import disk, safetensors
from psjob.checkpoint.problems import CheckpointProblem, Damage
from psjob.layout import memory

__all__ = [
    "CheckpointProblem",
    "Damage",
    "FileFact",
    "DeferredTensor",
    "Entry",
    "PartedTensor",
    "Reader",
    "ByteRange",
    "check",
    "opened",
    "read_blocks",
    "read_json",
    "write_blocks",
    "write_json",
]
MAX_JSON_FILE = 64 << 20


@dataclass(frozen=True)
class ByteRange:
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
        header, sizes = safetensors.make_header(shapes, metadata, disk.PAGE if total >= disk.LARGE else 8)
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
    """What `write_json` was given. Raises Damage where a byte is another, or CheckpointProblem."""
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
    """The tensors named in `wanted` (None: all). Raises Damage where the file is not whole or not as `expect` says.

    Nothing is allocated before its bounds are checked against the file's true size.
    """
    with opened(path, expect, moved) as reader:
        return {name: reader.read(name) for name in (list(reader.entries) if wanted is None else wanted)}


def check(path: Path, expect: FileFact) -> None:
    """Read the whole file and compare every byte's crc with `expect`. Raises Damage or CheckpointProblem."""
    if path.suffix == ".json":
        read_json(path, expect)
        return
    with opened(path, expect) as reader:
        if set(reader.entries) != set(expect.tensors):
            raise Damage(path.name, f"{len(expect.tensors)} tensors", f"{len(reader.entries)} with other names")
        buffer = memoryview(bytearray(1 << 20))
        for name in reader.entries:
            reader.skim(name, buffer)


@contextlib.contextmanager
def opened(path: Path, expect: FileFact | None = None, moved: disk.Moved | None = None) -> Iterator[Reader]:
    """A reader of the file, which tells `moved` of tensors' bytes; the header is read and checked once.

    Raises Damage or CheckpointProblem.
    """
    with disk.opened_regular(path) as (fd, size):
        if expect is not None and size != expect.bytes:
            raise Damage(path.name, f"{expect.bytes} bytes", f"{size} bytes")
        start = bytearray(min(8, size))
        disk.read_into(fd, memoryview(start), path.name)
        try:
            raw = bytearray(safetensors.header_length(start, size))
            disk.read_into(fd, memoryview(raw), path.name)
            if expect is not None and (crc := zlib.crc32(raw, zlib.crc32(start))) != expect.crc:
                raise Damage(path.name, f"crc {expect.crc:08x} of its header", f"{crc:08x}")
            data = 8 + len(raw)
            yield Reader(path.name, fd, data, safetensors.read_header(raw, size - data), expect, moved)
        except ValueError as error:
            raise Damage(path.name, "a safetensors header", str(error)[:200]) from None


class Reader:
    """An open file. `entries` are its tensors; where facts were expected, each read is compared with them."""

    def __init__(
        self, name: str, fd: int, data: int, entries: Mapping[str, safetensors.TensorEntry], expect: FileFact | None,
        moved: disk.Moved | None = None,
    ) -> None:  # fmt: skip
        self.entries = entries
        self._name, self._fd, self._data, self._expect, self._moved = name, fd, data, expect, moved

    def read(self, name: str) -> torch.Tensor:
        """A tensor of the file. Raises Damage where it is not there or not as expected."""
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
