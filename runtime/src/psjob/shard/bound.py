"""Bounded staleness on one block: which workers may begin their next step, and when the block stands at a cut.

Both follow from how many times each worker has pushed the block. A cut at a step is a barrier: no worker begins that step before all
workers have come to it and the block is held. The block then has every push of earlier clocks, and no other push.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from psjob.modes import ServedMode
from psjob.shard.admission import Admission


class Bound:
    """Of the block, or table, at `position` of the admission table that `lock` guards. `barrier` is the step of a cut to come, or None."""

    def __init__(self, mode: ServedMode, admission: Admission, lock: threading.RLock, position: int) -> None:
        self.mode, self._admission, self._lock, self._position = mode, admission, lock, position
        self._missing: tuple[int, dict[int, list[int]]] = (-1, {})
        """The changes of the table after which it was asked, and by step who has not come to it."""
        with lock:
            admission.watch(position)

    def reached(self, barrier: int | None) -> int:
        """The highest step that a worker may begin which has pushed all before it."""
        with self._lock:
            step = self._admission.tally(self._position).lowest + (self.mode.ahead or 0)
        return step if barrier is None else min(step, barrier - 1)

    def goes(self, barrier: int | None) -> Callable[[int, int], bool]:
        """Whether worker `rank` may begin `step`, as things stand. It also waits for what it has pushed itself."""
        with self._lock:
            lowest = self._admission.tally(self._position).lowest

        def may(rank: int, step: int) -> bool:
            if barrier is not None and step >= barrier:
                return False
            with self._lock:
                row = self._admission.rows[rank]
                waiting = row.complete + (self._position in row.open) < step
            return row.left_at is not None or self.mode.may_go(step, lowest, waiting)

        return may

    def stands_at(self, step: int) -> bool:
        """Has every worker that has not left come to `step`, and none begun it?"""
        with self._lock:
            return self._admission.tally(self._position).all_at(step)

    def beyond(self, step: int) -> bool:
        """Is it too late for a barrier at `step`: may a worker have been let go on to it already?"""
        with self._lock:
            highest = max(self._admission.pushed(self._position).values(), default=0)
        return highest > step or (highest == step and not self.stands_at(step))

    def awaited(self, rank: int, step: int, barrier: int | None) -> tuple[list[int], int]:
        """Whom worker `rank` waits for to begin `step`, and the step that they have not pushed."""
        needed = barrier if barrier is not None and step >= barrier else step - (self.mode.ahead or 0)
        with self._lock:
            changes, known = self._missing
            if changes != self._admission.changes:
                known = {}
                self._missing = (self._admission.changes, known)
            if needed not in known:
                pushed, live = self._admission.pushed(self._position), self._admission.live()
                known[needed] = sorted(other for other in live if pushed[other] < needed)
        return (known[needed], needed - 1) if known[needed] else ([rank], step - 1)
