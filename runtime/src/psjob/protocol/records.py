"""Resume records on their way between a worker and shard 0. Pure.

A large one goes in pieces, which continue after a break where the last one ended. A small one goes as what it changes of the one before on
its stream. Both ends hold the last record that the stream carried. A stream brings all frames in their order or ends, and a new one begins
with a whole record, so the two ends hold the same bytes. What comes is checked by its crc32 all the same.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Final, NamedTuple

PIECE = 64 << 10
"""Bytes of a piece. A record of at most so many goes as one frame."""
WINDOW = 1 << 20
"""Most bytes that are sent and not confirmed. On a link that becomes slow a step waits behind them."""
QUICK_SECONDS = 0.25
SLOW_SECONDS = 1.0
"""A piece that is confirmed in less, or not in more, changes how many may be on their way."""


class RecordId(NamedTuple):
    """Which record a piece is of: the clock it belongs to, the crc32 of all its bytes, and how many they are."""

    clock: int
    crc: int
    size: int


class RecordPiece(NamedTuple):
    """`data` lies at `offset` in the record. Empty: it only asks how much of the record has come."""

    record: RecordId
    offset: int
    data: memoryview
    idle: tuple[int, int]
    """How long the worker's script has waited, as `worker.state.Idle` tells it."""


class _Outgoing:
    def __init__(self, clock: int, blob: bytes, snapshot: bool, idle: tuple[int, int]) -> None:
        self.id, self.view, self.snapshot, self.idle = RecordId(clock, zlib.crc32(blob), len(blob)), memoryview(blob), snapshot, idle
        self.has = self.sent = 0
        self.asked = self.known = False
        self.window = PIECE
        self.flights: deque[tuple[int, float]] = deque()
        """If each piece that is not confirmed ends, and when it was sent."""


class RecordsOut:
    """Records that a worker hands in, one after the other and in their order.

    The newest waits for the one that is on its way, if that is a snapshot's or is soon through; else it takes its place. A snapshot's
    record gives way only to the next snapshot's.
    """

    def __init__(self) -> None:
        self._current: _Outgoing | None = None
        self._next: _Outgoing | None = None

    @property
    def through(self) -> bool:
        """Is nothing left to send or to be confirmed?"""
        return self._current is None

    def add(self, clock: int, blob: bytes, snapshot: bool, idle: tuple[int, int] = (0, 0)) -> None:
        """Hand in the record of `clock`; `snapshot`: a checkpoint needs it."""
        made = _Outgoing(clock, blob, snapshot, idle)
        if any(out is not None and out.id == made.id for out in (self._current, self._next)):
            return
        current = self._current
        if current is None or snapshot or not (current.snapshot or current.id.size <= PIECE):
            self._current, self._next = made, None
        else:
            self._next = made

    def relinked(self) -> None:
        """A new stream: what was sent and not confirmed may be lost."""
        for out in (self._current, self._next):
            if out is not None:
                out.asked = out.known = False
                out.flights.clear()

    def has(self, record: RecordId, count: int, now: float) -> None:
        """The other side has the first `count` bytes of a record."""
        out = self._current
        if out is None or out.id != record:
            return
        if count >= record.size:
            self._current, self._next = self._next, None
            return
        if not out.known or count < out.has:
            out.known, out.sent = True, count
            out.flights.clear()
        out.has = count
        while out.flights and out.flights[0][0] <= count:
            seconds = now - out.flights.popleft()[1]
            if seconds < QUICK_SECONDS:
                out.window = min(WINDOW, out.window + PIECE)
            elif seconds > SLOW_SECONDS:
                out.window = max(PIECE, out.window // 2)

    def next(self, now: float, stepping: bool) -> RecordPiece | None:
        """What to send now. While a step's requests are unanswered (`stepping`) only one piece is on its way."""
        out = self._current
        if out is None or (out.asked and not out.known):
            return None
        if not out.asked:
            out.asked = True
            return RecordPiece(out.id, 0, out.view[:0], out.idle)
        under_way = out.sent - out.has
        if out.sent >= out.id.size or (under_way and (stepping or under_way + PIECE > out.window)):
            return None
        at, out.sent = out.sent, min(out.id.size, out.sent + PIECE)
        out.flights.append((out.sent, now))
        return RecordPiece(out.id, at, out.view[at : out.sent], out.idle)


class RecordIn:
    """A record that comes in pieces, over one stream or several."""

    def __init__(self) -> None:
        self.id: RecordId | None = None
        self._body = bytearray()
        self._whole: bytes | None = None

    @property
    def count(self) -> int:
        """How many of its bytes are here, from the first."""
        return len(self._body) if self._whole is None else len(self._whole)

    def take(self, record: RecordId, offset: int, data: bytes | bytearray) -> bytes | None:
        """A piece has come; the whole record where this made it whole, or only asked for one that is whole.

        Another record replaces the one that was coming. Data that does not continue where the last one ended is left out.
        """
        if record != self.id:
            self.id, self._body, self._whole = record, bytearray(), None
        if self._whole is not None:
            return None if data else self._whole
        if data and offset == len(self._body) and offset + len(data) <= record.size:
            self._body += data
        if len(self._body) < record.size:
            return None
        whole, self._body = bytes(self._body), bytearray()
        if zlib.crc32(whole) != record.crc:
            return None  # it comes again from its first byte
        self._whole = whole
        return whole


ASKS: Final = "point"
MOST_NAME: Final = 200
"""Characters of a point's name."""
MOST_BYTES: Final = 16 << 20
"""Of what one worker says at a point."""
BEFORE: Final = "before attach"
"""With it begin the names of points before `attach`: all workers have passed those once rank 0 trains."""


class RecordDelta(NamedTuple):
    """A record that is the stream's last one, but for `data` in place of what lay between its first `begin` bytes and its end."""

    begin: int
    crc: int
    size: int
    """crc32 and length of the record."""
    data: bytes


class RecordsOnStream:
    """One end of a stream; `last` is the newest record that went by it."""

    def __init__(self) -> None:
        self.last: bytes | None = None

    def delta(self, record: bytes) -> RecordDelta | None:
        """How to send `record` as what it changes; None: it goes whole. Either way it is the newest one now."""
        last, self.last = self.last, record
        if last is None:
            return None
        shorter = min(len(last), len(record))
        begin = _same(last, record, shorter)
        end = _same(last, record, shorter - begin, backwards=True)
        if len(record) - begin - end > len(record) // 2:
            return None
        return RecordDelta(begin, zlib.crc32(record), len(record), record[begin : len(record) - end])

    def take(self, delta: RecordDelta) -> bytes:
        """The record of a delta that came. Raises ValueError if it does not go with the record before."""
        last, end = self.last, delta.size - delta.begin - len(delta.data)
        if last is None or delta.begin < 0 or end < 0 or delta.begin + end > len(last):
            raise ValueError(f"a record of {delta.size} bytes as a change of one of {None if last is None else len(last)}")
        record = b"".join([last[: delta.begin], delta.data, last[len(last) - end :]])
        if zlib.crc32(record) != delta.crc:
            raise ValueError(f"a record of {delta.size} bytes as a change of another one than was sent: its checksum does not match")
        self.last = record
        return record


def _same(one: bytes, other: bytes, most: int, backwards: bool = False) -> int:
    """How many bytes, of the first (or last) `most`, are the same in both."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if backwards:
            same = one[len(one) - middle : len(one) - low] == other[len(other) - middle : len(other) - low]
        else:
            same = one[low:middle] == other[low:middle]
        low, high = (middle, high) if same else (low, middle - 1)
    return low
