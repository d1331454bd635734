"""Once only: which pushes this shard has taken, per worker. Pure.

The key of a push is (run, worker, clock, block). A row holds the highest complete clock and one bit a block of the open
one; it is saved in the same snapshot as the blocks it describes, so a restored shard refuses what its blocks contain and
takes again what they lost. The incarnation is only a fence: it orders processes, it never resets a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Verdict(Enum):
    """What becomes of a push."""

    ADMIT = "admit"
    DUPLICATE = "duplicate"
    FENCED = "fenced"
    GAP = "gap"
    GONE = "gone"


@dataclass
class Row:
    """`complete`: number of clocks wholly taken, which is also the number of the open clock."""

    complete: int = 0
    open: set[int] = field(default_factory=set)
    left_at: int | None = None
    incarnation: tuple[int, int] = (0, 0)


class Admission:
    """The table of one shard. `owned` is how many blocks it has; positions count them from 0."""

    def __init__(self, workers: int, owned: int) -> None:
        self.owned = owned
        self.rows = {rank: Row() for rank in range(workers)}

    def admit(self, worker: int, incarnation: tuple[int, int], clock: int, position: int) -> Verdict:
        """Take the push, or say why not. Only ADMIT changes the table."""
        row = self.rows[worker]
        if incarnation < row.incarnation:
            return Verdict.FENCED
        if row.left_at is not None and clock >= row.left_at:
            return Verdict.GONE
        if clock < row.complete or (clock == row.complete and position in row.open):
            return Verdict.DUPLICATE
        if clock > row.complete:
            return Verdict.GAP
        row.open.add(position)
        if len(row.open) == self.owned:
            row.complete += 1
            row.open = set()
        return Verdict.ADMIT

    def meet(self, worker: int, incarnation: tuple[int, int]) -> bool:
        """A process of this rank says hello; False when a newer one has been here."""
        row = self.rows[worker]
        if incarnation < row.incarnation:
            return False
        row.incarnation = incarnation
        return True

    def jump(self, worker: int, clock: int) -> int:
        """After this shard lost its newest clocks: go on at `clock`. Returns how many of the worker's updates are lost."""
        row = self.rows[worker]
        lost = max(0, clock - row.complete)
        if lost:
            row.complete, row.open = clock, set()
        return lost

    def pushed(self, position: int) -> dict[int, int]:
        """How often each worker has pushed the block at `position`."""
        return {rank: row.complete + (position in row.open) for rank, row in self.rows.items()}

    def furthest(self) -> int:
        """The highest clock that a worker has begun to push, plus one."""
        return max((row.complete + bool(row.open) for row in self.rows.values()), default=0)

    def leave(self, worker: int, clock: int) -> None:
        """The worker is absent from `clock` on."""
        row = self.rows[worker]
        row.left_at = clock if row.left_at is None else min(row.left_at, clock)

    def expected(self, clock: int) -> frozenset[int]:
        """Ranks whose push of `clock` must be waited for."""
        return frozenset(rank for rank, row in self.rows.items() if row.left_at is None or row.left_at > clock)

    def live(self) -> frozenset[int]:
        return frozenset(rank for rank, row in self.rows.items() if row.left_at is None)

    def save(self) -> dict[str, Any]:
        """The table as JSON, keyed by rank."""
        return {
            str(rank): {"complete": row.complete, "open": sorted(row.open), "leftAt": row.left_at, "incarnation": list(row.incarnation)}
            for rank, row in self.rows.items()
        }

    def save_at(self, clocks: Mapping[int, int]) -> dict[str, Any]:
        """The same with so many complete clocks of each worker and none open: what was taken since is not held, nor who left later."""
        saved = self.save()
        for rank, clock in clocks.items():
            row = saved[str(rank)]
            left = row["leftAt"] if row["leftAt"] is not None and row["leftAt"] <= clock else None
            saved[str(rank)] = row | {"complete": clock, "open": [], "leftAt": left}
        return saved

    def load(self, saved: Mapping[str, Any], fences: Mapping[int, tuple[int, int]], keep_open: bool = True) -> None:
        """Put a saved table back; `fences` are lowest incarnations that may speak from now on."""
        for rank, row in self.rows.items():
            entry = saved.get(str(rank), {})
            row.complete = int(entry.get("complete", 0))
            row.open = {int(p) for p in entry.get("open", ())} if keep_open else set()
            left = entry.get("leftAt")
            row.left_at = None if left is None else int(left)
            old = entry.get("incarnation", (0, 0))
            row.incarnation = max((int(old[0]), int(old[1])), fences.get(rank, (0, 0)))

    def resharded(self, clocks: Mapping[int, int], left: Iterable[tuple[int, int]]) -> None:
        """Start from whole clocks (a restore onto another shard count, where no open clock can be kept)."""
        for rank, row in self.rows.items():
            row.complete, row.open = clocks.get(rank, 0), set()
        for rank, clock in left:
            if rank in self.rows:
                self.rows[rank].left_at = clock
