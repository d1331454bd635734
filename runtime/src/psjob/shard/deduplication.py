"""Once only: which pushes this shard has taken, per worker. Pure.

The key of a push is (run, worker, clock, block). A row holds the highest complete clock and one bit a block of the open
one. It is saved in the same snapshot as the blocks it describes. So a restored shard refuses what its blocks contain and
takes again what they lost. The incarnation is only a fence: it orders processes, it never resets a clock.

What a push asks of all workers is counted as rows change, so that its cost does not grow with their number: rows change by the
methods of only `Admission`.

How many members stand at each number: lowest at hand at once, however many members there are. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class MinCounter:
    """Members have no names here: one that moves says from which number to which."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._count = Counter(numbers)
        self._lowest = min(self._count, default=0)

    def copy(self) -> MinCounter:
        made = MinCounter()
        made._count, made._lowest = self._count.copy(), self._lowest
        return made

    def __bool__(self) -> bool:
        return bool(self._count)

    @property
    def lowest(self) -> int:
        """0 without members."""
        return self._lowest

    @property
    def highest(self) -> int:
        """0 without members. It takes a look at each number where somebody stands."""
        return max(self._count, default=0)

    def all_at(self, number: int) -> bool:
        """Does nobody stand at another number?"""
        return not self._count or (len(self._count) == 1 and number in self._count)

    def add(self, number: int) -> None:
        """A member more."""
        if not self._count or number < self._lowest:
            self._lowest = number
        self._count[number] += 1

    def remove(self, number: int) -> None:
        """A member less. Raises KeyError if none stands at `number`."""
        left = self._count.pop(number) - 1
        if left:
            self._count[number] = left
        elif number == self._lowest:
            self._lowest = number + 1 if number + 1 in self._count else min(self._count, default=0)

    def move(self, old: int, new: int) -> None:
        """A member goes from `old` to `new`. A step of 1 looks at no other number."""
        self.add(new)
        self.remove(old)


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
    owned: int = 0
    """How many of this shard's positions this worker pushes at each clock; none: its clocks are not counted here."""

    @property
    def counted(self) -> bool:
        """Does anything here wait for this worker's clocks?"""
        return self.left_at is None and self.owned > 0


class Admission:
    """The table of one shard. `owned` is how many blocks it has; positions count them from 0. `each`: how many of them each rank pushes."""

    def __init__(self, workers: int, owned: int, each: Sequence[int] | None = None) -> None:
        self.owned = owned
        self.rows = {rank: Row(owned=owned if each is None else each[rank]) for rank in range(workers)}
        self._everyone = frozenset(self.rows)
        self.changes = 0
        """Rises with each change of what a worker has pushed or of who is there."""
        self._tallies: dict[int, MinCounter] = {}
        """By position that is watched: how often live workers have pushed it."""
        self._live: frozenset[int] = frozenset()
        self._last_left = -1
        """A clock from which on nobody is waited for but who is live."""
        self._expected: dict[int, frozenset[int]] = {}
        self._within: dict[frozenset[int], tuple[frozenset[int], frozenset[int], int]] = {}
        """By group of ranks: of whom it was asked last, who of them is in the group, and the first of those."""
        self._complete = MinCounter()
        self._count()

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
        live = row.left_at is None
        if live and position in self._tallies:
            self._tallies[position].move(clock, clock + 1)
        if len(row.open) == row.owned:
            row.complete += 1
            row.open = set()
            if live:
                self._complete.move(clock, clock + 1)
        self.changes += 1
        return Verdict.ADMIT

    def meet(self, worker: int, incarnation: tuple[int, int]) -> bool:
        """A process of this rank says hello; False when a newer one has been here."""
        row = self.rows[worker]
        if incarnation < row.incarnation:
            return False
        row.incarnation = incarnation
        return True

    def jump(self, worker: int, clock: int) -> int:
        """After this shard lost its newest clocks: continue at `clock`. Returns how many of the worker's updates are lost."""
        row = self.rows[worker]
        lost = max(0, clock - row.complete)
        if lost:
            self._uncount(row)
            row.complete, row.open = clock, set()
            self._recount(row)
        return lost

    def watch(self, position: int) -> None:
        """From now on `tally(position)` is kept."""
        self._tallies[position] = MinCounter(count for rank, count in self.pushed(position).items() if rank in self._live)

    def tally(self, position: int) -> MinCounter:
        """How often each live worker has pushed the block at a position that is watched."""
        return self._tallies[position]

    def pushed(self, position: int) -> dict[int, int]:
        """How often each worker has pushed the block at `position`."""
        return {rank: row.complete + (position in row.open) for rank, row in self.rows.items()}

    def furthest(self) -> int:
        """The highest clock that a worker has begun to push, plus one."""
        return max((row.complete + bool(row.open) for row in self.rows.values()), default=0)

    def lowest(self) -> int:
        """Lowest complete clock over the workers that have not left (over all, when all have)."""
        return self._complete.lowest if self._complete else min((row.complete for row in self.rows.values()), default=0)

    def leave(self, worker: int, clock: int) -> None:
        """The worker is absent from `clock` on."""
        row = self.rows[worker]
        if row.left_at is None:
            self._uncount(row)
            self._live -= {worker}
        row.left_at = clock if row.left_at is None else min(row.left_at, clock)
        self._last_left = max(self._last_left, row.left_at)
        self._expected.clear()
        self.changes += 1

    def expected(self, clock: int, group: frozenset[int] | None = None) -> frozenset[int]:
        """Ranks whose push of `clock` must be waited for; with a `group`, those of them that are in it."""
        return self._expected_of_all(clock) if group is None else self._in_group(clock, group)[1]

    def _in_group(self, clock: int, group: frozenset[int]) -> tuple[frozenset[int], frozenset[int], int]:
        expected, known = self._expected_of_all(clock), self._within.get(group)
        if known is None or known[0] is not expected:
            found = expected & group
            known = self._within[group] = expected, found, min(found, default=-1)
        return known

    def _expected_of_all(self, clock: int) -> frozenset[int]:
        if clock >= self._last_left:
            return self._live
        found = self._expected.get(clock)
        if found is None:
            self._expected.clear()  # blocks ask of one clock and the next
            found = frozenset(rank for rank, row in self.rows.items() if row.left_at is None or row.left_at > clock)
            self._expected[clock] = found
        return found

    def first_expected(self, clock: int, group: frozenset[int] | None = None) -> int:
        """The lowest of them; -1 without any."""
        return self._in_group(clock, self._everyone if group is None else group)[2]

    def live(self) -> frozenset[int]:
        return self._live

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
        self._count()

    def resharded(self, clocks: Mapping[int, int], left: Iterable[tuple[int, int]], held: Mapping[int, Set[int]]) -> None:
        """Start from whole clocks (a restore onto another shard count). `held`: by rank, positions that hold its open clock already."""
        for rank, row in self.rows.items():
            row.complete, row.open = clocks.get(rank, 0), set(held.get(rank, ()))
            if row.open and len(row.open) == row.owned:
                row.complete, row.open = row.complete + 1, set()
        for rank, clock in left:
            if rank in self.rows:
                self.rows[rank].left_at = clock
        self._count()

    def _count(self) -> None:
        """Count anew: all rows may have changed."""
        self._live = frozenset(rank for rank, row in self.rows.items() if row.left_at is None)
        self._last_left = max((row.left_at for row in self.rows.values() if row.left_at is not None), default=-1)
        self._expected.clear()
        live = [self.rows[rank] for rank in self._live if self.rows[rank].owned]
        self._complete = MinCounter(row.complete for row in live)
        for position in self._tallies:
            self._tallies[position] = self._complete.copy()
        for row in live:
            for position in self._tallies.keys() & row.open:
                self._tallies[position].move(row.complete, row.complete + 1)
        self.changes += 1

    def _uncount(self, row: Row) -> None:
        """Leave a live worker out of all counts."""
        if row.counted:
            self._complete.remove(row.complete)
            for position, tally in self._tallies.items():
                tally.remove(row.complete + (position in row.open))

    def _recount(self, row: Row) -> None:
        if row.counted:
            self._complete.add(row.complete)
            for position, tally in self._tallies.items():
                tally.add(row.complete + (position in row.open))
        self.changes += 1


def taken_by(versions: Sequence[int], ranks: Mapping[int, tuple[tuple[int, int], int | None]]) -> dict[str, dict[str, Any]]:
    """The table, as `load` has it, of blocks at these versions by position, where a version is a clock that all live workers have pushed.

    `ranks`: incarnation, and the clock from which on a rank is absent. Pushes that no version holds are not in it: they come again.
    """
    lowest = min(versions, default=0)
    ahead = [position for position, version in enumerate(versions) if version > lowest]
    return {
        str(rank): {
            "complete": lowest if left is None else min(lowest, left), "open": ahead if left is None or left > lowest else [],
            "leftAt": left, "incarnation": list(incarnation),
        }
        for rank, (incarnation, left) in ranks.items()
    }  # fmt: skip
