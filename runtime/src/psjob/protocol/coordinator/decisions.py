"""Which pushes count, decided once for all blocks of all shards, and the orders that follow from it. The caller tells the time.

Orders are kept until every shard has carried them out, so that a stream that breaks loses nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from psjob.modes import Batch, Mode, Push
from psjob.protocol.messages import Decide, Decision


@dataclass(frozen=True)
class DecisionOrder:
    """What every shard carries out: each batch in turn (`version` is that before the first), then it answers who may go.

    `go` names, for workers that may begin their next step, how many of their clocks are answered now.
    """

    version: int
    batches: tuple[Batch, ...]
    go: Mapping[int, int]

    def numbered(self, number: int) -> Decide:
        """As shards get it. A batch's `staleness` is the largest of its kept pushes."""
        version, batches = self.version, []
        for batch in self.batches:
            staleness = max((version - push.base for push in batch.kept if push.base is not None), default=None)
            batches.append(Decision(_keys(batch.kept), _keys(batch.dropped), batch.weights, staleness))
            version += bool(batch.kept)
        return Decide(number, self.version, tuple(batches), self.go)


class Decisions:
    """Each push that has arrived on all of `shards` is decided on exactly once, a worker's in the order of their clocks.

    `version` counts updates, `clocks` each worker's decided pushes; both continue from a checkpoint's. `live`: workers that have not left.
    """

    def __init__(self, mode: Mode, shards: Iterable[int], version: int, clocks: Mapping[int, int], live: Iterable[int]) -> None:
        self.mode, self.shards = mode, frozenset(shards)
        self.version = version
        self.clocks = dict(clocks)
        self.live = set(live)
        self.until: float | None = None
        """When the mode wants to be asked again, even if nothing comes."""
        self.dropped = 0
        self._arrived = dict(clocks)
        """How many pushes of each worker are whole on every shard,"""
        self._gone = dict(clocks)
        """and how many of them were answered."""
        self._partly: dict[tuple[int, int], dict[int, int | None]] = {}
        self._pending: list[Push] = []
        self._held: set[int] = set()
        """Workers of whom a push was not answered yet."""
        self._lowest = self._lowest_held = 0
        """The least number of pushes of a worker that has not left, and how many have made no more."""
        self._look()

    def told(self, shard: int, worker: int, clock: int, base: int | None, now: float) -> DecisionOrder | None:
        """A shard has a worker's whole push, computed on blocks of version `base` at least (None: not known).

        Returns what is to be carried out now, if anything is. A second report changes nothing.
        """
        if clock < self._arrived[worker]:
            return None
        bases = self._partly.setdefault((worker, clock), {})
        bases[shard] = base
        if not bases.keys() >= self.shards:
            return None
        del self._partly[worker, clock]
        known = [base for base in bases.values() if base is not None]
        before, self._arrived[worker] = self._arrived[worker], clock + 1
        self._held.add(worker)
        moved = self._moved(worker, before)
        self._pending.append(Push(worker, clock, min(known) if len(known) == len(bases) else None, now))
        return self._ask(now, None if moved else worker)

    def left(self, worker: int, now: float) -> DecisionOrder | None:
        """A worker is through: nobody waits for it any more. As `told`."""
        if worker in self.live:
            self.live.discard(worker)
            self._look()
        return self.ask(now)

    def ask(self, now: float) -> DecisionOrder | None:
        """Ask the mode until it has nothing more to say, then who may continue."""
        return self._ask(now, None)

    def _ask(self, now: float, only: int | None) -> DecisionOrder | None:
        """`only`: nothing but this worker's push is new, so that unless something is decided only it may be let go."""
        version, batches = self.version, []
        self.until = None
        while self._pending and (batch := self.mode.takes(self._pending, self.live, self.version, now)) is not None:
            if not batch.kept and not batch.dropped:
                self.until = batch.until
                break
            self._settle(batch)
            batches.append(batch)
        go = self._let_go(self._held if only is None or batches else {only})
        return DecisionOrder(version, tuple(batches), go) if batches or go else None

    def missing(self) -> list[int]:
        """Workers that have not left and have no push that waits for a decision."""
        return sorted(self.live - {push.worker for push in self._pending})

    def _settle(self, batch: Batch) -> None:
        decided = {*batch.kept, *batch.dropped}
        self._pending = [push for push in self._pending if push not in decided]
        for push in decided:
            self.clocks[push.worker] = max(self.clocks[push.worker], push.clock + 1)
        self.version += bool(batch.kept)
        self.dropped += len(batch.dropped)

    def _let_go(self, held: Iterable[int]) -> dict[int, int]:
        go = {}
        for worker in sorted(held):
            arrived = self._arrived[worker]
            if arrived > self._gone[worker] and self.mode.may_go(arrived, self._lowest, self.clocks[worker] < arrived):
                go[worker] = self._gone[worker] = arrived
        self._held.difference_update(go)
        return go

    def _moved(self, worker: int, before: int) -> bool:
        """A worker has made more pushes than `before`; True where the least number is another one now."""
        if worker not in self.live or before != self._lowest:
            return False
        self._lowest_held -= 1
        if self._lowest_held:
            return False
        self._look()
        return True

    def _look(self) -> None:
        """Find the least number anew. It rises once a step of all, not once a push."""
        numbers = [self._arrived[worker] for worker in self.live]
        self._lowest = min(numbers, default=0)
        self._lowest_held = numbers.count(self._lowest)


def _keys(pushes: Iterable[Push]) -> list[tuple[int, int]]:
    return [(push.worker, push.clock) for push in pushes]


class Orders:
    """Since one restore, numbered from 1. `shards` are those that hold anything: the others get nothing."""

    def __init__(self, shards: Iterable[int]) -> None:
        self.shards = frozenset(shards)
        self.last = 0
        """Number of the newest."""
        self._done = dict.fromkeys(self.shards, 0)
        """By shard, the last one that it is known to have carried out."""
        self._kept: deque[Decide] = deque()

    def add(self, order: DecisionOrder) -> Decide:
        """The next order, with its number."""
        self.last += 1
        self._kept.append(order.numbered(self.last))
        return self._kept[-1]

    def carried(self, shard: int, number: int) -> None:
        """A shard has carried out all up to `number`; one that was never given says nothing."""
        if shard in self._done and self._done[shard] < number <= self.last:
            self._done[shard] = number
            while self._kept and self._kept[0].number <= min(self._done.values()):
                self._kept.popleft()

    def missed(self, shard: int, carried: int | None) -> list[Decide] | None:
        """What a shard that has carried out `carried` has to hear again, in order; None: it cannot continue from there.

        That is so where an order broke off in it (`carried` None), where it has carried out more than was ordered, or less than it had.
        """
        if shard not in self._done:
            return []
        if carried is None or not self._done[shard] <= carried <= self.last:
            return None
        self.carried(shard, carried)
        return [order for order in self._kept if order.number > carried]
