"""Delay-thresholded async: as async, but a push of too high a staleness is dropped (Ringmaster ASGD; Maranjyan et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from psjob.modes.base import Batch, DecidedMode, Push


@dataclass(frozen=True)
class Threshold(DecidedMode):
    """A push counts when its staleness is `staleness` at most; nobody waits. One whose staleness is not known is dropped. See `Served`."""

    staleness: int = 16

    name: ClassVar[str] = "threshold"

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise ValueError(f"threshold: staleness is {self.staleness}, must be 0 or more")

    def takes(self, arrived: Sequence[Push], expected: Set[int], version: int, now: float = 0.0) -> Batch | None:
        if not arrived:
            return None
        first = arrived[0]
        return Batch(dropped=(first,)) if self.stale(first.base, version) else Batch((first,))

    def stale(self, base: int | None, version: int) -> bool:
        return base is None or version - base > self.staleness
