"""Async: each push is an update of its own, and only its sender waits for it (ASGD; algorithms C1)."""

from __future__ import annotations

from collections.abc import Sequence, Set


class Async:
    """See `Mode`."""

    name = "async"
    rewinds_together = False
    steady = False
    worker_update = False

    def takes(self, arrived: Sequence[int], expected: Set[int]) -> Sequence[int]:
        return arrived[:1]

    def version_for(self, clock: int) -> int:
        return 0

    def marks(self) -> bool:
        return True
