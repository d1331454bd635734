"""How many streams there are between a worker and a shard, if the manifest leaves that to psjob (`training.streams: auto`).

Each stream is received, applied and answered on cores of its own, on both sides. So more of them are faster while cores are free, and else
threads wait for each other. The shard offers as many as the cores allow. The worker then tries one beside all of them, in turn, and
keeps what is faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Final

MOST_STREAMS: Final = 8
LEAST_BYTES: Final = 1 << 20
"""Of a shard's blocks, for each stream: fewer are through before a second thread has woken."""


@dataclass(frozen=True)
class PairFacts:
    """What a shard knows of itself and a worker. Cores are those that a process may use."""

    workers: int
    shards: int
    worker_cores: int
    shard_cores: int
    nbytes: int
    """Of the blocks that lie on the shard."""
    one_host: bool
    """The processes of the job share the cores of one host."""
    lent: bool
    """Blocks lie in memory that both map: a worker's thread only names them."""


def offered_streams(pair: PairFacts) -> int:
    """From 1 to MOST_STREAMS.

    On one host all pairs share its cores, and over TCP both ends of a stream keep one busy. Between hosts a shard has its cores for all
    workers. A worker has half of its cores for all shards, since the script computes meanwhile.
    """
    if pair.one_host:
        pairs = pair.workers * pair.shards
        cores = min(pair.worker_cores, pair.shard_cores) // (pairs if pair.lent else 2 * pairs)
    else:
        cores = min(pair.worker_cores // (2 * pair.shards), pair.shard_cores // pair.workers)
    return max(1, min(MOST_STREAMS, cores, pair.nbytes // LEAST_BYTES))


def most_streams(workers: int, shard_cores: int) -> int:
    """As `offered_streams` at most, whatever a worker has."""
    return max(1, min(MOST_STREAMS, shard_cores // workers))


SETTLED: Final = 4
"""Steps before the first that counts: memory is touched and links are measured in these."""
TURN: Final = 4
"""Steps in a row with as many streams."""
TURNS: Final = 3
"""Of each of the two."""
GAIN: Final = 0.97
"""One stream is kept if its steps take less than this part of the others': it wakes fewer threads, and a difference may be chance."""


class StreamTrial:
    """Of one worker: one stream for each shard, or all that are open, by what exchanges of both took. All workers change at the same step.

    Attributes:
        one: of each shard only the first stream carries blocks now.
    """

    def __init__(self) -> None:
        self.one = False
        self.over = False
        self._steps = 0
        self._all: list[float] = []
        self._single: list[float] = []

    def took(self, seconds: float) -> None:
        """An exchange is over. `seconds`: what it took, without waits for other workers."""
        if self.over:
            return
        step = self._steps - SETTLED
        self._steps += 1
        if step >= 0:
            (self._single if self.one else self._all).append(seconds)
        if step + 1 == 2 * TURN * TURNS:
            self.over = True
            self.one = median(self._single) < GAIN * median(self._all)
        else:
            self.one = step + 1 >= 0 and (step + 1) // TURN % 2 == 1
