"""The hyperparameters of pushes. A worker sends a set once, under a number, and its pushes name that number."""

from __future__ import annotations

import threading

from psjob.shard.pending import Info
from psjob.wire.frame import Header

KEPT = 4
"""Of each worker: its open clocks name two at most."""


class Infos:
    """Of one shard, told by the threads of all streams."""

    def __init__(self) -> None:
        self._told: dict[int, dict[int, Info]] = {}
        """By rank, then by number; the oldest first."""
        self._lock = threading.Lock()

    def learn(self, rank: int, number: int, info: Info) -> None:
        """Later pushes of `rank` name this by `number`; the last four are kept, whatever they are called."""
        with self._lock:
            told = self._told.setdefault(rank, {})
            told.pop(number, None)  # told again, it is the newest
            told[number] = info
            if len(told) > KEPT:
                del told[next(iter(told))]

    def of(self, header: Header) -> Info | None:
        """What a worker's frame names; None where it was not told."""
        with self._lock:
            return self._told.get(header.worker, {}).get(header.info)

    def count(self, rank: int) -> int:
        """How many are kept of a worker."""
        with self._lock:
            return len(self._told.get(rank, {}))

    def clear(self) -> None:
        with self._lock:
            self._told.clear()
