"""n-softsync: an update is made of the first ⌊m/n⌋ pushes, each divided by its staleness; nobody waits (Zhang et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from psjob.modes.base import Batch, DecidedMode, Push


@dataclass(frozen=True)
class Softsync(DecidedMode):
    """`splits` is the paper's n: 1 takes as many pushes as there are workers, m takes each by itself. See `Served`.

    A push counts 1 / (c · max(1, staleness)) where c = ⌊m/n⌋ pushes make an update, the paper's learning rate over the staleness;
    `by_staleness=False` leaves the staleness out. One whose staleness is not known is dropped.
    """

    splits: int = 1
    by_staleness: bool = True

    name: ClassVar[str] = "softsync"

    def __post_init__(self) -> None:
        if self.splits < 1:
            raise ValueError(f"softsync: splits is {self.splits}, must be 1 or more")

    def takes(self, arrived: Sequence[Push], expected: Set[int], version: int, now: float = 0.0) -> Batch | None:
        enough = max(1, len(expected) // self.splits)
        if len(arrived) < enough:
            return None
        first = arrived[:enough]
        kept = tuple(sorted(push for push in first if not self.stale(push.base, version)))
        dropped = tuple(push for push in first if self.stale(push.base, version))
        if not self.by_staleness:
            return Batch(kept, dropped)
        return Batch(kept, dropped, tuple(1 / (enough * max(1, version - (push.base or 0))) for push in kept))

    def stale(self, base: int | None, version: int) -> bool:
        return base is None

    def may_go(self, clock: int, lowest: int, waiting: int) -> bool:
        return True
