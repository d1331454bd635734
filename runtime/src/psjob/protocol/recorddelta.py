"""Small resume records on one stream, each told by what it changes of the one before. Pure.

Both ends hold the last record that the stream carried. A stream brings all frames in their order or ends, and a new one begins with a
whole record, so the two ends hold the same bytes. What comes is checked by its crc32 all the same.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple


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
        """The record of a delta that came. Raises ValueError where it does not go with the record before."""
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
