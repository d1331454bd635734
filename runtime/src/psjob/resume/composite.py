"""One record of a worker of several processes: the records of all, that of process 0 first."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

MAGIC: Final = b"PSJP"
_COUNT: Final = struct.Struct("<I")
_SIZE: Final = struct.Struct("<Q")
MOST: Final = 1024
"""Processes of a worker."""


def joined(records: Sequence[bytes]) -> bytes:
    """The records of processes 0, 1, … as one."""
    sizes = b"".join(_SIZE.pack(len(record)) for record in records)
    return b"".join([MAGIC, _COUNT.pack(len(records)), sizes, *records])


def split(blob: bytes) -> list[bytes]:
    """What `joined` was given; a record of one process is alone. Raises ValueError for a composite that is damaged."""
    if blob[:4] != MAGIC:
        return [blob]
    if len(blob) < 8 or not 1 <= (count := _COUNT.unpack_from(blob, 4)[0]) <= MOST or len(blob) < 8 + 8 * count:
        raise ValueError(f"a record of several processes of {len(blob)} bytes")
    sizes = [_SIZE.unpack_from(blob, 8 + 8 * number)[0] for number in range(count)]
    if 8 + 8 * count + sum(sizes) != len(blob):
        raise ValueError(f"a record of {count} processes that is not {sum(sizes)} bytes long")
    found, at = [], 8 + 8 * count
    for size in sizes:
        found.append(blob[at : at + size])
        at += size
    return found
