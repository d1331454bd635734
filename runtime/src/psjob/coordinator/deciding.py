"""The coordinator's part in a decided mode: what shards tell goes into `Decisions`, and its orders and cuts go to all shards."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from psjob.coordinator.cuts import Cut
from psjob.coordinator.decisions import Decisions, Order
from psjob.coordinator.orders import Orders

if TYPE_CHECKING:
    from psjob.coordinator.coordinator import Coordinator

WISH_SECONDS = 10.0
"""How long a cut waits for large records that are younger than the last cut's,"""
RECORD_SECONDS = 5.0
"""and then for those of the very clocks that it holds. After that older ones do: their workers make a few steps again."""


class Deciding:
    """Runs in the coordinator's thread."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.c = coordinator
        self._decisions: Decisions | None = None
        self._orders = Orders(())
        self._wished: float | None = None
        self._now = 0.0
        """When the coordinator last looked at the clock."""
        self._leaving: set[int] = set()
        """Workers that are through, and of whom a push may still wait for its decision."""

    def begin(self, version: int, workers: Mapping[str, Any]) -> None:
        """Training begins, or goes on from a manifest at `version` that names `workers`."""
        c = self.c
        clocks = {rank: int(workers.get(str(rank), {}).get("clock", 0)) for rank in c.members.all}
        owning = [i for i in range(len(c.config.shards)) if c.store.row_cells or i in c.store.assignment]
        self._leaving.clear()
        self._orders = Orders(owning)
        self._decisions = Decisions(c.mode, owning, version, clocks, (m.rank for m in c.members.live()))
        self.over()

    def arrived(self, shard: int, body: Mapping[str, Any]) -> None:
        """A shard has a whole push. What it told before a restore is void."""
        c = self.c
        if self._decisions is not None and c.views.open and int(body["recovery"]) == c.views.recovery:
            worker, clock = body["push"]
            self._orders.carried(shard, int(body["carried"]))
            base = None if body["base"] is None else int(body["base"])
            self._order(self._decisions.told(shard, int(worker), int(clock), base, time.monotonic()))

    def missed(self, shard: int, carried: int | None) -> list[Mapping[str, Any]] | None:
        """The orders that a shard has lost with its stream; None: it cannot go on without a restore. See `Orders`."""
        return self._orders.missed(shard, carried)

    def left(self, rank: int) -> None:
        """A worker is through."""
        if self._decisions is not None and self.c.views.open:
            self._leaving.add(rank)
            self._order(self._decisions.left(rank, time.monotonic()))

    def tick(self, now: float) -> None:
        """Ask the mode again when it wanted that; let a cut go on with older records when newer ones do not come."""
        self._now = now
        if self._decisions is not None and self._decisions.until is not None and now >= self._decisions.until:
            self._order(self._decisions.ask(now))
        self.c.try_commit()

    def clock(self, rank: int) -> int:
        """The clock at which a worker that comes back goes on: the first of its that is not decided."""
        return 0 if self._decisions is None else self._decisions.clocks[rank]

    def missing(self) -> list[int]:
        """Workers of whom no push waits for a decision."""
        return [] if self._decisions is None else self._decisions.missing()

    # -- cuts ----------------------------------------------------------------------------------

    def waits(self, now: float) -> bool:
        """Should a cut that is due wait for newer records? Those that do not come at every step are asked for by every answer."""
        if not any(self._behind(rank) for rank, session in self.c.sessions.items() if not session.done.is_set()):
            return False
        self._wished = self._wished or now
        self.c.server.wishes = True
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
        cut = self.c.cuts.current
        clock = self.clock(rank) if cut is None or cut.clocks is None else cut.clocks[rank]
        return max((known for known in self.c.members[rank].records if known <= clock), default=-1)

    def complete(self, cut: Cut) -> bool:
        """Are the records of a cut here, or has it waited long enough?"""
        assert cut.clocks is not None
        missing = [m.rank for m in self.c.members.live() if cut.clocks[m.rank] and cut.clocks[m.rank] not in m.records]
        return not missing or self._now - cut.began > RECORD_SECONDS

    def over(self) -> None:
        """No cut is due or under way any more."""
        self._wished = None
        self.c.server.wishes = False

    def _order(self, order: Order | None) -> None:
        c = self.c
        if order is not None:
            body = self._orders.add({"do": "decide", **order.to_json()})
            c.views.order_all(body, but=c.views.peers.keys() - self._orders.shards)
        for rank in [rank for rank in self._leaving if self.clock(rank) >= (c.members[rank].left_at or 0)]:
            self._leaving.discard(rank)
            c.ending.left(rank)
