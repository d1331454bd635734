"""Local SGD: workers make steps of their own, and an outer rule takes the mean of how far they went (DiLoCo; Douillard et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from psjob.modes.asynchronous import Async
from psjob.modes.base import BaseMode, Batch, DecidedMode, Push
from psjob.modes.sync import Sync

_all, _each = Sync(), Async()


@dataclass(frozen=True)
class LocalSGD(BaseMode):
    """Each push is weights taken − weights reached after `inner_steps` steps; the outer rule sees the mean as a gradient. See `Served`.

    A round ends when all have pushed, or `grace` seconds after the first `quorum` have. What comes after that is dropped, and its worker
    begins the round that is open. With quorum 0 all are needed, and a round is a clock of sync.
    """

    inner_steps: int = 50
    quorum: int = 0
    grace: float = 0.0

    name: ClassVar[str] = "local"
    steady: ClassVar[bool] = True
    ahead: ClassVar[int | None] = 0

    def __post_init__(self) -> None:
        if self.inner_steps < 1:
            raise ValueError(f"local: inner_steps is {self.inner_steps}, must be 1 or more")
        if self.quorum < 0:
            raise ValueError(f"local: quorum is {self.quorum}, must be 0 (all) or more")
        if not self.grace >= 0:
            raise ValueError(f"local: grace is {self.grace}, must be 0 seconds or more")

    def takes(self, arrived: Sequence[Push], expected: Set[int], version: int, now: float = 0.0) -> Batch | None:
        if not self.quorum:
            return _all.takes(arrived, expected, version, now)
        late = [push for push in arrived if push.base != version]
        if late:
            return Batch(dropped=tuple(late))
        if arrived and len(arrived) >= len(expected):
            return Batch(tuple(sorted(arrived)))
        if len(arrived) < self.quorum:
            return None
        end = arrived[self.quorum - 1].at + self.grace
        return Batch(tuple(sorted(arrived))) if now >= end else Batch(until=end)

    def stale(self, base: int | None, version: int) -> bool:
        return bool(self.quorum) and base != version


class Quorum(LocalSGD):
    """Local with a quorum, as jobs run it: workers' clocks are not the version, so checkpoints of either do not fit the other."""

    name: ClassVar[str] = "local-quorum"
    decided: ClassVar[bool] = True
    steady: ClassVar[bool] = False


@dataclass(frozen=True)
class LocalAsync(DecidedMode):
    """Rounds that wait for nobody: a push, of `inner_steps` steps, is an update when it comes (Liu et al. 2024). See `Served`."""

    inner_steps: int = 50

    name: ClassVar[str] = "local-async"

    def __post_init__(self) -> None:
        if self.inner_steps < 1:
            raise ValueError(f"local-async: inner_steps is {self.inner_steps}, must be 1 or more")

    def takes(self, arrived: Sequence[Push], expected: Set[int], version: int, now: float = 0.0) -> Batch | None:
        return _each.takes(arrived, expected, version, now)
