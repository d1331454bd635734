"""Sync: an update is the mean over every worker that is there; nobody continues before it (BSP)."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from psjob.modes.base import BaseMode, Batch, Push


@dataclass(frozen=True)
class Sync(BaseMode):
    """See `Served`."""

    name: ClassVar[str] = "sync"
    steady: ClassVar[bool] = True
    worker_update: ClassVar[bool] = True
    ahead: ClassVar[int | None] = 0

    def takes(self, arrived: Sequence[Push], expected: Set[int], version: int, now: float = 0.0) -> Batch | None:
        if not arrived or len(arrived) < len(expected) or not expected <= {push.worker for push in arrived}:
            return None
        return Batch(tuple(sorted(arrived)))
