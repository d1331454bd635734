"""Sync: an update is the mean over every worker that is there; nobody continues before it (BSP), or before the one before it.

With a delay of 1 the gradient of step c is of the weights after c - 1 updates. Workers compute the next while it is summed and applied.
That is the delayed parameter update of ZeRO-Offload (Ren et al. 2021, §4.3). All workers do so alike, so each run has the same result.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from psjob.modes.base import BaseMode, Batch, Push


@dataclass(frozen=True)
class Sync(BaseMode):
    """See `Served`."""

    delay: int = 0

    name: ClassVar[str] = "sync"
    steady: ClassVar[bool] = True
    worker_update: ClassVar[bool] = True
    ahead: ClassVar[int | None] = 0

    def __post_init__(self) -> None:
        if not 0 <= self.delay <= 1:
            raise ValueError(f"sync: delay is {self.delay}, must be 0 or 1")

    def takes(self, arrived: Sequence[Push], expected: Set[int], version: int, now: float = 0.0) -> Batch | None:
        if not arrived or len(arrived) < len(expected) or not expected <= {push.worker for push in arrived}:
            return None
        return Batch(tuple(sorted(arrived)))
