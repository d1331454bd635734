"""Which job is looked at next: keys without doubles, one turn a key at a time, later times in a heap.

No I/O; the clock is an argument. `Queue.next()` is the only thing that waits.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple


class Key(NamedTuple):
    """One job."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Queue:
    """Fair: first come, first served, and a key whose turn runs goes to the back when it is added again."""

    def __init__(self, clock: Callable[[], float] = time.time, first_backoff: float = 0.5, max_backoff: float = 120.0) -> None:
        self._clock = clock
        self._first_backoff = first_backoff
        self._max_backoff = max_backoff
        self._ready: deque[Key] = deque()
        self._added: dict[Key, float] = {}
        """Since when a key of `_ready` has waited."""
        self._waiting: set[Key] = set()
        """Keys in `_ready`."""
        self._running: set[Key] = set()
        self._again: set[Key] = set()
        """Keys added while their turn ran."""
        self._due: dict[Key, float] = {}
        """The earliest later time of each key; the heap may hold stale entries."""
        self._heap: list[tuple[float, Key]] = []
        self._failures: dict[Key, int] = {}
        self._rests: dict[Key, float] = {}
        """Until when a key rests after its turn."""
        self._gone: set[Key] = set()
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
        self._heap.clear()
        for known in (self._waiting, self._again, self._gone, self._due, self._failures, self._rests):
            known.clear()

    def add(self, key: Key) -> None:
        """Look at this job as soon as possible."""
        if not self._open:
            return
        if key in self._running:
            self._again.add(key)
        elif self._rests.get(key, 0.0) > self._clock():
            self.add_at(key, self._rests[key])
        elif key not in self._waiting:
            self._rests.pop(key, None)
            self._waiting.add(key)
            self._added[key] = self._clock()
            self._ready.append(key)
            self._changed.set()

    def add_at(self, key: Key, when: float) -> None:
        """Look at this job at a unix time; an earlier time already asked for stays."""
        known = self._due.get(key)
        if not self._open or (known is not None and known <= when):
            return
        self._due[key] = when
        heapq.heappush(self._heap, (when, key))
        self._changed.set()

    def fail(self, key: Key, at_least: float = 0.0, at_most: float = math.inf) -> float:
        """A turn failed: look again after a delay that doubles with each failure in a row. Answers the delay."""
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        delay = max(at_least, min(at_most, self._max_backoff, self._first_backoff * 2.0 ** min(count, 16)))
        self.add_at(key, self._clock() + delay)
        return delay

    def succeed(self, key: Key) -> None:
        """A turn went well: the next failure starts from the first delay."""
        self._failures.pop(key, None)

    def forget(self, key: Key) -> None:
        """The job is gone: drop its later times and its failures."""
        self._due.pop(key, None)
        self._failures.pop(key, None)
        self._rests.pop(key, None)
        if key in self._running:
            self._gone.add(key)

    def take(self) -> Key | None:
        """The next key whose turn may begin, or None. Its turn ends with `done`."""
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            when, key = heapq.heappop(self._heap)
            if self._due.get(key) == when:
                del self._due[key]
                self.add(key)
        if not self._ready:
            return None
        key = self._ready.popleft()
        self._waiting.discard(key)
        self._added.pop(key, None)
        self._running.add(key)
        return key

    def done(self, key: Key, rest: float = 0.0) -> None:
        """The turn of this key is over; what comes in the next `rest` seconds is gathered into one turn after them."""
        self._running.discard(key)
        if rest > 0 and key not in self._gone:
            self._rests[key] = self._clock() + rest
        self._gone.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    async def next(self) -> Key:
        """Wait for the next key."""
        while True:
            key = self.take()
            if key is not None:
                return key
            self._changed.clear()
            wait = self._heap[0][0] - self._clock() if self._heap else None
            try:
                async with asyncio.timeout(None if wait is None else max(0.0, wait)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def waiting(self) -> int:
        """Keys whose turn may begin and has not begun."""
        return len(self._ready)

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
        return len(self._ready) + len(self._running)
