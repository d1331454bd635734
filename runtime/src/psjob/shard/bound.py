"""Whom a block may answer, and where a cut stands, where its version counts pushes: how often each worker has pushed it tells both.

A worker is answered when the mode lets it begin its next step. A cut at a step is a barrier: nobody begins that step before all have
come to it and the block is held, so the block then has every push of the clocks before, and no other.
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

    def goes(self, barrier: int | None) -> Callable[[int, int], bool]:
        """Whether worker `rank` may begin `step`, as things stand. It also waits for what it has pushed itself."""
        pushed = self._live()
        lowest = min(pushed.values(), default=0)

        def may(rank: int, step: int) -> bool:
            if barrier is not None and step >= barrier:
                return False
            return rank not in pushed or self.mode.may_go(step, lowest, pushed[rank] < step)

        return may

    def stands_at(self, step: int) -> bool:
        """Has every worker that has not left come to `step`, and none begun it?"""
        return all(count == step for count in self._live().values())

    def beyond(self, step: int) -> bool:
        """Is it too late for a barrier at `step`: may a worker have been let go on to it already?"""
        with self._lock:
            highest = max(self._admission.pushed(self._position).values(), default=0)
        return highest > step or (highest == step and not self.stands_at(step))

    def awaited(self, rank: int, step: int, barrier: int | None) -> tuple[list[int], int]:
        """Whom worker `rank` waits for to begin `step`, and the step that they have not pushed."""
        needed = barrier if barrier is not None and step >= barrier else step - (self.mode.ahead or 0)
        missing = sorted(other for other, count in self._live().items() if count < needed)
        return (missing, needed - 1) if missing else ([rank], step - 1)

    def _live(self) -> dict[int, int]:
        with self._lock:
            live, pushed = self._admission.live(), self._admission.pushed(self._position)
        return {rank: pushed[rank] for rank in live}
