"""The part of its time in which a worker's script waits for others: what sync pays for slow workers, and a pipeline for its bubble."""

from __future__ import annotations

from collections import deque
from typing import Final

from psjob.wire.frame import IDLE_PARTS

RECENT: Final = 32
"""Steps that `Idle.recent` is made of, at most."""


def share(waited: float, counted: float) -> float:
    """The part of `counted` seconds in which somebody waited, 0 to 1; 0 of no time."""
    return min(1.0, max(0.0, waited / counted)) if counted > 0 else 0.0


class Idle:
    """For the script's thread. Counted from the end of the first step: until then workers wait for each other's imports."""

    def __init__(self) -> None:
        self.waited = 0.0
        """Seconds in all."""
        self.told = (0, 0)
        """(milliseconds counted, IDLE_PARTS of them waited) at the last edge; (0, 0): there was no step yet."""
        self._first: int | None = None
        self._began: tuple[float, float] | None = None
        self._edges: deque[tuple[float, float]] = deque(maxlen=RECENT + 1)
        """Of the last steps: when they ended, and what was waited until then."""

    def at(self, clock: int, now: float) -> None:
        """The script stands before step `clock` at `now`, monotonic seconds."""
        if self._first is None:
            self._first = clock
        if clock == self._first:
            return
        self._edges.append((now, self.waited))
        if self._began is None:
            self._began = now, self.waited
        counted, waited = now - self._began[0], self.waited - self._began[1]
        if counted >= 0.001:
            self.told = int(1000 * counted), round(IDLE_PARTS * share(waited, counted))

    def recent(self, now: float, waits: float = 0.0) -> float | None:
        """The part of the last RECENT steps, and of the time since, that was waited; None before the second step has ended.

        `waits`: seconds of a wait that is under way, which `waited` does not hold yet.
        """
        if len(self._edges) < 2 and not (self._edges and waits):
            return None
        begun, before = self._edges[0]
        return share(self.waited + waits - before, now - begun)
