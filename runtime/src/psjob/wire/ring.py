"""Which bytes of lent memory hold payloads that the peer has not copied yet. Pure: it decides places and touches no memory."""

from __future__ import annotations

from collections import deque
from typing import Final

from psjob.wire.frame import WireError

ALIGNED: Final = 64


class Ring:
    """`size` bytes, given away in their order. Bytes are given away again once their reader has said that it copied them.

    A ring that is empty begins at its first byte, so memory that was never needed is never touched.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._held: deque[int] = deque()
        """Offsets that were given away, oldest first."""
        self._ends: dict[int, int] = {}
        """By offset that is not copied yet, where it ends."""
        self._end = 0
        """Where the newest one ends."""

    def take(self, length: int) -> int | None:
        """The offset of `length` bytes, at least 1, that nobody else has. None: there is no such room now."""
        if not self._held:
            self._end = 0
        oldest = self._held[0] if self._held else self.size
        at = self._end
        if self._held and at <= oldest:  # wrapped: free bytes end at the oldest
            room = oldest - at
        elif at + length <= self.size:
            room = self.size - at
        else:
            at, room = 0, oldest if self._held else 0
        if length > room:
            return None
        self._held.append(at)
        self._ends[at] = end = at + length
        self._end = min(end + -end % ALIGNED, self.size)
        return at

    def copied(self, offset: int) -> None:
        """The reader has copied what lies at `offset`. Raises WireError where nothing is held there."""
        if self._ends.pop(offset, None) is None:
            raise WireError(f"byte {offset} of lent memory holds nothing that is to be copied")
        while self._held and self._held[0] not in self._ends:
            self._held.popleft()

    @property
    def held(self) -> dict[int, int]:
        """By offset that is not copied yet, where it ends."""
        return dict(self._ends)
