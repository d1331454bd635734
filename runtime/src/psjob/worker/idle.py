"""The part of its time in which a worker's script waits for others: what sync pays for slow workers."""

from __future__ import annotations

from psjob.wire.frame import IDLE_PARTS


class Idle:
    """For the script's thread. Counted from the end of the first step: until then workers wait for each other's imports."""

    def __init__(self) -> None:
        self.waited = 0.0
        """Seconds in all."""
        self.told = (0, 0)
        """(milliseconds counted, IDLE_PARTS of them waited) at the last edge; (0, 0): there was no step yet."""
        self._first: int | None = None
        self._began: tuple[float, float] | None = None

    def at(self, clock: int, now: float) -> None:
        """The script stands before step `clock` at `now`, monotonic seconds."""
        if self._first is None:
            self._first = clock
        if clock == self._first:
            return
        if self._began is None:
            self._began = now, self.waited
        counted, waited = now - self._began[0], self.waited - self._began[1]
        if counted >= 0.001:
            self.told = int(1000 * counted), min(IDLE_PARTS, round(IDLE_PARTS * waited / counted))
