"""What shards were ordered in a decided mode, kept until each of them has carried it out: a stream that breaks loses nothing. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any


class Orders:
    """Since one restore, numbered from 1. `shards` are those that hold anything: the others are told nothing."""

    def __init__(self, shards: Iterable[int]) -> None:
        self.shards = frozenset(shards)
        self.last = 0
        """Number of the newest."""
        self._done = dict.fromkeys(self.shards, 0)
        """By shard, the last one that it is known to have carried out."""
        self._kept: deque[Mapping[str, Any]] = deque()

    def add(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The next order, with its number."""
        self.last += 1
        self._kept.append({**body, "number": self.last})
        return self._kept[-1]

    def carried(self, shard: int, number: int) -> None:
        """A shard has carried out all up to `number`; one that was never given says nothing."""
        if shard in self._done and self._done[shard] < number <= self.last:
            self._done[shard] = number
            while self._kept and self._kept[0]["number"] <= min(self._done.values()):
                self._kept.popleft()

    def missed(self, shard: int, carried: int | None) -> list[Mapping[str, Any]] | None:
        """What a shard that has carried out `carried` is to be told again, in order; None: it cannot go on from there.

        That is so where an order broke off in it (`carried` None), where it has carried out more than was ordered, or less than it had.
        """
        if shard not in self._done:
            return []
        if carried is None or not self._done[shard] <= carried <= self.last:
            return None
        self.carried(shard, carried)
        return [body for body in self._kept if body["number"] > carried]
