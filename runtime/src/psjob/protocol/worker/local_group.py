"""What the processes of one worker bring to a step, and what it comes to: one push of one rank. Pure.

And one record of them all, that of process 0 first; and when each of them makes its own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Part:
    """Of one process. `none`: rows of the table without a gradient; `bad`: the first that holds NaN or inf."""

    clock: int
    absent: bool = False
    skip: bool = False
    none: frozenset[int] = frozenset()
    bad: int | None = None

    def to_json(self) -> dict[str, Any]:
        """For another process of the worker."""
        return {"clock": self.clock, "absent": self.absent, "skip": self.skip, "none": sorted(self.none), "bad": self.bad}

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Part:
        """What `to_json` gave. Raises KeyError, TypeError and ValueError."""
        bad = None if body["bad"] is None else int(body["bad"])
        return cls(int(body["clock"]), bool(body["absent"]), bool(body["skip"]), frozenset(map(int, body["none"])), bad)


@dataclass(frozen=True)
class Whole:
    """Of the worker. `present`: processes whose gradients are summed, in the order of the sum; none where the worker is absent."""

    present: tuple[int, ...]
    absent: bool
    skip: bool
    none: frozenset[int]
    bad: int | None


def together(parts: Mapping[int, Part]) -> Whole:
    """`parts` by local rank; who has none there is through with its script. A row that some have a gradient of counts as zero elsewhere."""
    there = {local: parts[local] for local in sorted(parts) if not parts[local].absent}
    skip = any(part.skip for part in there.values())
    return Whole(
        present=() if skip else tuple(there),
        absent=not there,
        skip=skip,
        none=frozenset.intersection(*(part.none for part in there.values())) if there else frozenset(),
        bad=next((part.bad for part in there.values() if part.bad is not None), None),
    )


def owner(block: int, active: Sequence[int]) -> int:
    """Which of the processes that take part in a step sums a block."""
    return active[block % len(active)]


MAGIC: Final = b"PSJP"
_COUNT: Final = struct.Struct("<I")
_SIZE: Final = struct.Struct("<Q")
MOST: Final = 1024
"""Processes of a worker."""


def join_records(records: Sequence[bytes]) -> bytes:
    """The records of processes 0, 1, … as one."""
    sizes = b"".join(_SIZE.pack(len(record)) for record in records)
    return b"".join([MAGIC, _COUNT.pack(len(records)), sizes, *records])


def split_records(blob: bytes) -> list[bytes]:
    """What `join_records` was given; a record of only one process is. Raises ValueError for a composite that is damaged."""
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


SMALL = 64 << 10
"""A record of at most this many bytes is made at every step boundary, a larger one where a snapshot or a stop wants it."""


class RecordMaker:
    """Of one process. Processes meet only at steps: a record of any moment between two of them is a place to continue from."""

    def __init__(self) -> None:
        self.wanted = False
        """The worker needs a record at the next step boundary, however large."""
        self._small = True

    def make(self, make: Callable[[], bytes], large: bool) -> bytes | None:
        """The script stands between two steps: its record, or None where none is made."""
        if not (self.wanted or (self._small and not large)):
            return None
        record = make()
        self._small = len(record) <= SMALL
        return record


class Records:
    """The newest of each process of a worker, by local rank, as process 0 has them."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._made: dict[int, tuple[int | None, bytes]] = {}
        self.handed_in = -1
        """The clock of the newest one of the worker that was handed in whole, with that clock's step."""

    def add(self, local: int, clock: int | None, record: bytes) -> None:
        """Of a process that stands before step `clock`; None: its script is through, and the record holds from now on."""
        self._made[local] = clock, record

    def whole(self, clock: int) -> bytes | None:
        """The record of the worker at this clock; None where one of its processes has none."""
        made = [record for _, (at, record) in sorted(self._made.items()) if at in (clock, None)]
        return join_records(made) if len(made) == self._processes else None

    @property
    def small(self) -> bool:
        """Are they made at every step boundary?"""
        return all(len(record) <= SMALL for _, record in self._made.values())
