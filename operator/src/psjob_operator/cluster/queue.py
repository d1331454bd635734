"""Which job is looked at next: keys without doubles, one turn a key at a time, the most urgent first, later times in a heap.

`urgency` is read from what is stored, in a step that does not grow with the job: it is asked for each event. What is begun is finished
before more is begun, and a job that lost something comes before all. No I/O; the time is an argument. `Queue.next()` is the only thing that
waits.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from psjob_operator.cluster.cache import JobStore
from psjob_operator.cluster.client import JobKey

FAIR = 8
"""Each so many-th turn goes to the key that waits longest: a key with n older ones before it begins within FAIR * (n + 1) turns."""


RECOVERING, NEAR, BEGUN, NEW, LATER = range(5)
"""It lost a process; all its processes are up, which its status does not say; pods of it are still to be made; it was never seen; nothing
presses."""


class Queue:
    """The lowest rank first, and of one rank first come, first served; a key whose turn runs goes to the back when it is added again.

    `rank` is asked at each `add`: a key that waits gets more urgent by it, never less.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        first_backoff: float = 0.5,
        max_backoff: float = 120.0,
        rank: Callable[[JobKey], int] = lambda _: 0,
    ) -> None:
        self._clock = clock
        self._rank = rank
        self._first_backoff = first_backoff
        self._max_backoff = max_backoff
        self._ready: list[tuple[int, int, JobKey]] = []
        """A heap of (rank, arrival, key); it may hold stale entries."""
        self._arrivals: deque[tuple[int, JobKey]] = deque()
        """(arrival, key), the oldest first; it may hold stale entries."""
        self._waiting: dict[JobKey, tuple[int, int]] = {}
        """Rank and arrival of each key whose turn may begin."""
        self._added: dict[JobKey, float] = {}
        """Since when each of these has waited."""
        self._numbers = itertools.count()
        self._taken = 0
        self._running: set[JobKey] = set()
        self._again: set[JobKey] = set()
        """Keys added while their turn ran."""
        self._due: dict[JobKey, float] = {}
        """The earliest later time of each key; the heap may hold stale entries."""
        self._heap: list[tuple[float, JobKey]] = []
        self._failures: dict[JobKey, int] = {}
        self._rests: dict[JobKey, float] = {}
        """Until when a key rests after its turn."""
        self._gone: set[JobKey] = set()
        """Keys that were forgotten in their turn."""
        self._open = True
        self._changed = asyncio.Event()

    def open(self) -> None:
        """Turns are taken from now on."""
        self._open = True

    def close(self) -> None:
        """No turns are taken, and none runs: forget all, and keep nothing of what is added."""
        self._open = False
        self._ready.clear()
        self._arrivals.clear()
        self._heap.clear()
        for known in (self._waiting, self._added, self._again, self._gone, self._due, self._failures, self._rests):
            known.clear()

    def add(self, key: JobKey) -> None:
        """Look at this job as soon as possible."""
        if not self._open:
            return
        if key in self._running:
            self._again.add(key)
        elif self._rests.get(key, 0.0) > self._clock():
            self.add_at(key, self._rests[key])
        else:
            self._rests.pop(key, None)
            self._wait(key, self._rank(key))

    def _wait(self, key: JobKey, rank: int) -> None:
        known = self._waiting.get(key)
        if known is not None and known[0] <= rank:
            return
        arrival = next(self._numbers) if known is None else known[1]
        if known is None:
            self._arrivals.append((arrival, key))
            self._added[key] = self._clock()
        self._waiting[key] = (rank, arrival)
        heapq.heappush(self._ready, (rank, arrival, key))
        self._wake()

    def add_at(self, key: JobKey, when: float) -> None:
        """Look at this job at a unix time; an earlier time already asked for stays."""
        known = self._due.get(key)
        if not self._open or (known is not None and known <= when):
            return
        self._due[key] = when
        heapq.heappush(self._heap, (when, key))
        self._wake()

    def fail(self, key: JobKey, at_least: float = 0.0, at_most: float = math.inf) -> float:
        """A turn failed: look again after a delay that doubles with each failure in a row. Answers the delay."""
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        delay = max(at_least, min(at_most, self._max_backoff, self._first_backoff * 2.0 ** min(count, 16)))
        self.add_at(key, self._clock() + delay)
        return delay

    def succeed(self, key: JobKey) -> None:
        """A turn went well: the next failure starts from the first delay."""
        self._failures.pop(key, None)

    def forget(self, key: JobKey) -> None:
        """The job is gone: drop its later times and its failures."""
        self._due.pop(key, None)
        self._failures.pop(key, None)
        self._rests.pop(key, None)
        if key in self._running:
            self._gone.add(key)

    def take(self, most: int | None = None) -> JobKey | None:
        """The next key whose turn may begin, or None; with `most` only one of at most that rank. Its turn ends with `done`."""
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            when, key = heapq.heappop(self._heap)
            if self._due.get(key) == when:
                del self._due[key]
                self.add(key)
        chosen = self._urgent(most) if most is not None or (self._taken + 1) % FAIR else self._oldest()
        if chosen is None:
            return None
        self._taken += most is None
        del self._waiting[chosen]
        del self._added[chosen]
        self._running.add(chosen)
        return chosen

    def _urgent(self, most: int | None) -> JobKey | None:
        while self._ready:
            rank, arrival, key = self._ready[0]
            stale = self._waiting.get(key) != (rank, arrival)
            if not stale and most is not None and rank > most:
                return None
            heapq.heappop(self._ready)
            if not stale:
                return key
        return None

    def _oldest(self) -> JobKey | None:
        while self._arrivals:
            arrival, key = self._arrivals.popleft()
            if key in self._waiting and self._waiting[key][1] == arrival:
                return key
        return None

    def done(self, key: JobKey, rest: float = 0.0) -> None:
        """The turn of this key is over; what comes in the next `rest` seconds is gathered into one turn after them."""
        self._running.discard(key)
        if rest > 0 and key not in self._gone:
            self._rests[key] = self._clock() + rest
        self._gone.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    async def next(self, most: int | None = None) -> JobKey:
        """Wait for the next key, with `most` for one of at most that rank."""
        while True:
            key = self.take(most)
            if key is not None:
                return key
            changed = self._changed
            wait = self._heap[0][0] - self._clock() if self._heap else None
            try:
                async with asyncio.timeout(None if wait is None else max(0.0, wait)):
                    await changed.wait()
            except TimeoutError:
                continue

    def _wake(self) -> None:
        """All who wait in `next` look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def waiting(self) -> int:
        """Keys whose turn may begin and has not begun."""
        return len(self._waiting)

    def running(self) -> int:
        """Turns under way."""
        return len(self._running)

    def backing_off(self) -> int:
        """Keys whose last turn failed."""
        return len(self._failures)

    def oldest(self) -> float:
        """Seconds for which a key has waited at most; 0 where none waits."""
        return max(0.0, self._clock() - min(self._added.values(), default=self._clock()))

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)


def urgency(store: JobStore, key: JobKey) -> int:
    """Of the job of this name, from RECOVERING to LATER."""
    job = store.job(key)
    if job is None or job.deleting or job.status.get("completionTime"):
        return LATER
    if job.status.get("run") != job.uid:
        return NEW
    tally = store.tally(key)
    wanted = _number(job.brief.get("shards"), "replicas") + _number(job.brief.get("workers"), "replicas")
    full, missing = tally.up >= wanted, tally.there - tally.ended < wanted
    if not job.status.get("startTime"):
        return LATER  # suspended
    internal = job.status.get("internal") or {}
    if internal.get("readyTime") and not internal.get("lostTime"):
        return LATER if full else RECOVERING
    if full:
        return NEAR
    return LATER if not missing else RECOVERING if internal.get("readyTime") else BEGUN


def _number(part: Any, field: str) -> int:
    value = part.get(field) if isinstance(part, Mapping) else None
    return value if isinstance(value, int) else 0
