"""Sync: an update is the mean over every worker that is there; nobody continues before it (BSP)."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from psjob.modes.base import Batch, Push


@dataclass(frozen=True)
class Sync:
    """See `Served`."""

    name: ClassVar[str] = "sync"
    inner_steps: ClassVar[int] = 0
    decided: ClassVar[bool] = False
    rewinds_together: ClassVar[bool] = True
    steady: ClassVar[bool] = True
    worker_update: ClassVar[bool] = True
    ahead: ClassVar[int | None] = 0

    def takes(self, arrived: Sequence[Push], expected: Set[int], version: int, now: float = 0.0) -> Batch | None:
        if not arrived or len(arrived) < len(expected) or not expected <= {push.worker for push in arrived}:
            return None
        return Batch(tuple(sorted(arrived)))

    def stale(self, base: int | None, version: int) -> bool:
        return False

    def may_go(self, clock: int, lowest: int, waiting: bool) -> bool:
        return not waiting

    def version_for(self, clock: int) -> int:
        return clock + 1

    def marks(self) -> bool:
        return False
