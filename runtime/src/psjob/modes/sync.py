"""Sync: an update is the mean over every rank that is there; nobody goes on before it (BSP; algorithms B1)."""

from __future__ import annotations

from collections.abc import Sequence, Set


class Sync:
    """See `Mode`."""

    name = "sync"
    rewinds_together = True
    steady = True
    worker_update = True

    def takes(self, arrived: Sequence[int], expected: Set[int]) -> Sequence[int]:
        return sorted(arrived) if arrived and expected <= set(arrived) else ()

    def version_for(self, clock: int) -> int:
        return clock + 1

    def marks(self) -> bool:
        return False
