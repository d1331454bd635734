"""Bounded staleness: as async, but nobody is more than `staleness` clocks ahead of the slowest (SSP; Ho et al. 2013)."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from psjob.modes.asynchronous import Async
from psjob.modes.base import BaseMode, Batch, Push, check_delay
from psjob.modes.sync import Sync

_together, _each = Sync(), Async()


@dataclass(frozen=True)
class Bounded(BaseMode):
    """A worker begins step c when every other has made c - `staleness` steps, with a delay too: it is a part of those. See `Served`.

    With 0 it is sync by definition: pushes of one clock are one mean in rank order, not an update each. Jobs run Sync itself then.
    """

    staleness: int = 3
    delay: int = 0

    name: ClassVar[str] = "bounded"
    rewinds_together: ClassVar[bool] = False

    @property
    def ahead(self) -> int | None:
        return self.staleness - self.delay

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise ValueError(f"bounded: staleness is {self.staleness}, must be 0 or more")
        check_delay(self.name, self.delay)
        if self.delay and self.delay >= self.staleness:
            raise ValueError(f"bounded: delay is {self.delay}, must be below the staleness of {self.staleness}, which counts it")

    def takes(self, arrived: Sequence[Push], expected: Set[int], version: int, now: float = 0.0) -> Batch | None:
        return (_each if self.staleness else _together).takes(arrived, expected, version, now)

    def may_go(self, clock: int, lowest: int, waiting: int) -> bool:
        return waiting <= self.delay and clock - lowest <= self.staleness
