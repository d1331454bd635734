"""The coordinator's part in a decided mode: what shards tell goes into `Decisions`, and its orders and cuts go to all shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from psjob.protocol.coordinator import actions, events
from psjob.protocol.coordinator.decisions import DecisionOrder, Decisions, Orders
from psjob.protocol.coordinator.events import WorkerFacts
from psjob.protocol.coordinator.schedule import Cut

if TYPE_CHECKING:
    from psjob.protocol.coordinator.machine import Coordinator

WISH_SECONDS = 10.0
"""How long a cut waits for large records that are younger than the last cut's,"""
RECORD_SECONDS = 5.0
"""and then for those of the very clocks that it holds. After that older ones do: their workers make a few steps again."""


class Deciding:
    """Which pushes count, and who has heard of it."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.c = coordinator
        self._decisions: Decisions | None = None
        self._orders = Orders(())
        self._wished: float | None = None
        self._leaving: set[int] = set()
        """Workers that are through, and of whom a push may still wait for its decision."""

    def begin(self, version: int, workers: Sequence[WorkerFacts]) -> None:
        """Training begins, or goes on from a manifest at `version` that names `workers`."""
        c = self.c
        owning = [i for i in range(c.job.shards) if c.recovery.tables or i in c.recovery.assignment]
        self._leaving.clear()
        self._orders = Orders(owning)
        clocks = {rank: worker.clock for rank, worker in enumerate(workers)}
        self._decisions = Decisions(c.mode, owning, version, clocks, (m.rank for m in c.members.live()))
        self.over()

    def arrived(self, event: events.PushArrived) -> None:
        """A shard has a whole push. What it told before a restore is void."""
        c = self.c
        if self._decisions is not None and c.recovery.open and event.recovery == c.recovery.recovery:
            self._orders.carried(event.shard, event.carried)
            self._order(self._decisions.told(event.shard, event.worker, event.clock, event.base, c.now))

    def missed(self, shard: int, carried: int | None) -> list[Mapping[str, Any]] | None:
        """The orders that a shard has lost with its stream; None: it cannot go on without a restore. See `Orders`."""
        return self._orders.missed(shard, carried)

    def left(self, rank: int) -> None:
        """A worker is through."""
        if self._decisions is not None and self.c.recovery.open:
            self._leaving.add(rank)
            self._order(self._decisions.left(rank, self.c.now))

    def tick(self, now: float) -> None:
        """Ask the mode again when it wanted that; let a cut go on with older records when newer ones do not come."""
        if self._decisions is not None and self._decisions.until is not None and now >= self._decisions.until:
            self._order(self._decisions.ask(now))
        self.c.cutting.try_commit()

    def clock(self, rank: int) -> int:
        """The clock at which a worker that comes back goes on: the first of its that is not decided."""
        return 0 if self._decisions is None else self._decisions.clocks[rank]

    def missing(self) -> list[int]:
        """Workers of whom no push waits for a decision."""
        return [] if self._decisions is None else self._decisions.missing()

    # -- cuts ----------------------------------------------------------------------------------

    def waits(self, now: float) -> bool:
        """Should a cut that is due wait for newer records? Those that do not come at every step are asked for by every answer."""
        if not any(member.here and self._behind(member.rank) for member in self.c.members.all.values()):
            return False
        if self._wished is None:
            self._wished = now
            self.c.emit(actions.WishRecords(True))
        return now - self._wished < WISH_SECONDS

    def _behind(self, rank: int) -> bool:
        member = self.c.members[rank]
        return member.left_at is None and max(member.records, default=-1) < self.clock(rank) - 1

    def hold(self, cut: Cut) -> dict[str, Any]:
        """What the cut holds: each worker's decided pushes, and who has left with none undecided. For the order to shards."""
        cut.clocks = {rank: self.clock(rank) for rank in self.c.members.all}
        left = {m.rank: m.left_at for m in self.c.members.all.values() if m.left_at is not None and m.left_at <= self.clock(m.rank)}
        return {"clocks": sorted(cut.clocks.items()), "left": {str(rank): clock for rank, clock in left.items()}}

    def needed(self, rank: int) -> int:
        """The oldest record of a worker that a restore may need: that of its decided clock, or the newest before it."""
        cut = self.c.cutting.cuts.current
        clock = self.clock(rank) if cut is None or cut.clocks is None else cut.clocks[rank]
        found = self.c.members[rank].newest(clock)
        return -1 if found is None else found

    def complete(self, cut: Cut) -> bool:
        """Are the records of a cut here, or has it waited long enough?"""
        assert cut.clocks is not None
        missing = any(cut.clocks[m.rank] and cut.clocks[m.rank] not in m.records for m in self.c.members.live())
        return not missing or self.c.now - cut.began > RECORD_SECONDS

    def over(self) -> None:
        """No cut is due or under way any more."""
        if self._wished is not None:
            self._wished = None
            self.c.emit(actions.WishRecords(False))

    def _order(self, order: DecisionOrder | None) -> None:
        c = self.c
        if order is not None:
            body = self._orders.add({"do": "decide", **order.to_json()})
            c.recovery.order_all(body, but=c.recovery.peers.keys() - self._orders.shards)
        for rank in [rank for rank in self._leaving if self.clock(rank) >= (c.members[rank].left_at or 0)]:
            self._leaving.discard(rank)
            c.completion.left(rank)
