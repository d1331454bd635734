"""How far the blocks of a shard and its workers are, counted as they continue: no call of a push looks at all workers or all blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from psjob.modes import ServedMode
from psjob.protocol.messages import WorkersAwaited
from psjob.protocol.shard.events import Phase
from psjob.shard.deduplication import Admission, MinCounter
from psjob.shard.pending import ServedState, Waiter

TELL_SECONDS = 1.0


class ShardProgress:
    """Of one store. `lock` guards `admission` and the counts."""

    def __init__(self, mode: ServedMode, admission: Admission) -> None:
        self.mode, self.admission = mode, admission
        self.lock = threading.RLock()
        self.phase = Phase.BLANK
        self.on_step: Callable[[int], None] = lambda step: None
        self._reported = 0
        self._versions = MinCounter()
        """Of all blocks and tables."""
        self._awaited: dict[int, tuple[tuple[int, ...], list[int]]] = {}
        """By position: whom the cell waits for, and at which state of it that was asked."""

    def begin(self, versions: Iterable[int]) -> None:
        """Blocks and tables were laid out or restored, and have these versions."""
        with self.lock:
            self._reported, self._versions = 0, MinCounter(versions)
            self._awaited.clear()

    def moved(self, before: int, after: int) -> None:
        """A block or table has continued from one version to another."""
        if before != after:
            with self.lock:
                self._versions.move(before, after)

    def span(self) -> tuple[int, int]:
        """Lowest and highest version of this shard's blocks; (0, 0) without blocks."""
        with self.lock:
            return self._versions.lowest, self._versions.highest

    def furthest(self) -> int:
        """The highest step that any block is at, where versions are clocks; else the most that a worker has pushed."""
        if self.mode.ahead == 0:
            return self.span()[1]
        with self.lock:
            return self.admission.furthest()

    def awaited(self, cell: ServedState, waiter: Waiter) -> tuple[list[int], int]:
        """The workers for whom one waits, and the step that they have not pushed. Called with the cell's lock held."""
        if cell.bound is not None:
            return cell.bound.awaited(waiter.rank, waiter.version, cell.barrier)
        with self.lock:
            state = (cell.n, cell.pending.changes, self.admission.changes)
            known = self._awaited.get(cell.position)
            if known is None or known[0] != state:
                there = self.admission.live() if self.mode.decided else self.admission.expected(cell.n, cell.group)
                known = self._awaited[cell.position] = (state, sorted(there - {rank for rank, _ in cell.pending}))
            return known[1], cell.n

    def clocks(self) -> dict[int, int]:
        """Complete clocks by rank, as this shard has them."""
        with self.lock:
            return {rank: row.complete for rank, row in self.admission.rows.items()}

    def complete(self, rank: int) -> int:
        """Complete clocks of one worker."""
        with self.lock:
            return self.admission.rows[rank].complete

    def first_expected(self, cell: ServedState) -> int:
        """The lowest rank whose next push of a cell is waited for; -1: of nobody."""
        with self.lock:
            return self.admission.first_expected(cell.n, cell.group)

    def step(self) -> int:
        """Lowest complete clock over the workers that have not left (over all, when all have)."""
        with self.lock:
            return self.admission.lowest()

    def expected(self, cell: ServedState) -> frozenset[int]:
        """Ranks whose next push of a cell must be waited for."""
        with self.lock:
            return self.admission.expected(cell.n, cell.group)

    def tell_step(self) -> None:
        """Say how far all blocks are, if that has changed."""
        if self.phase is not Phase.SERVING:
            return
        with self.lock:
            step = self._versions.lowest if self.mode.rewinds_together else self.admission.lowest()
            if step <= self._reported:
                return
            self._reported = step
        self.on_step(step)


class StragglerReport:
    """Which workers this shard's answers wait for, told to the coordinator once a second. `tell` belongs to one thread.

    `shard` is this one's index, `tell_coordinator` reaches the coordinator, `missing` are the workers of whom another shard has not all.
    """

    def __init__(self, shard: int, tell_coordinator: Callable[[WorkersAwaited], None], missing: Callable[[], list[int]]) -> None:
        self._shard, self._tell, self._missing = shard, tell_coordinator, missing
        self._told = 0.0
        self._any = False

    def tell(self, progress: ShardProgress, cells: Iterable[ServedState], now: float, clocks: bool) -> None:
        """Tell for how long each worker is waited for; shard 0 also tells the `clocks` of all workers."""
        if now - self._told < TELL_SECONDS:
            return
        self._told = now
        seconds = self._waits(progress, cells, now)
        if clocks:
            self._tell(WorkersAwaited(self._shard, seconds, progress.clocks()))
        elif seconds or self._any:
            self._tell(WorkersAwaited(self._shard, seconds))
        self._any = bool(seconds)

    def _waits(self, progress: ShardProgress, cells: Iterable[ServedState], now: float) -> dict[int, float]:
        """By rank, for how many seconds an answer waits for its push."""
        found: dict[int, float] = {}
        for cell in cells:
            if not cell.waiters:
                continue
            with cell.lock:
                waiter = min(cell.waiters, key=lambda one: one.since, default=None)
                missing = [] if waiter is None else progress.awaited(cell, waiter)[0]
            if waiter is None:
                continue
            for rank in missing or self._missing():
                if rank != waiter.rank:
                    found[rank] = max(found.get(rank, 0.0), now - waiter.since)
        return found


def room_problem(workers: int, mode: ServedMode, pushes: int, budget: int, clips: bool = False) -> str | None:
    """Why a shard cannot hold the whole pushes that a decided mode, or a norm, waits for; None: it can.

    `pushes`: bytes of one push of each worker together; a worker of a stage pushes the blocks of only its stage.
    In other modes workers keep to their shares of `budget` by themselves.
    """
    whole = 2 if mode.decided and mode.may_go(0, 0, 1) else 1  # one that waits for its decision, one that comes
    held = whole * pushes if mode.decided or clips else 0
    if held <= budget:
        return None
    mib, what = -(-held >> 20), f"{whole} whole pushes" if whole > 1 else "a whole push"
    why = f"in mode {mode.name}" if mode.decided else "to clip by the norm of the whole gradient,"
    return (
        f"{why} a shard holds {what} of each of {workers} workers, {mib} MiB, and its limit of gradients is "
        f"{budget >> 20} MiB; set training.gradientMebibytes to {mib}, or take more shards"
    )
