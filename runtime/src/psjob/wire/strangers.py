"""Who has not proven yet who it is: so many at a time and no more. Whoever comes when all places are taken has one of them.

The place is taken from the host that has most of them, and of its own from the oldest: who proves itself at once keeps its place
for as long as it needs it, however many others there are.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Generic, TypeVar

T = TypeVar("T")


class Strangers(Generic[T]):
    """At most `most` of them. May be called from any thread."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._hosts: dict[T, str] = {}
        """Oldest first."""
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._hosts)

    def add(self, one: T, host: str) -> T | None:
        """Take note of one more; who has to go for it, where one has."""
        with self._lock:
            victim = None
            if len(self._hosts) >= self.most:
                (crowded, _), *_ = self._counts.most_common(1)
                victim = next(it for it, its in self._hosts.items() if its == crowded)
                self._drop(victim)
            self._hosts[one] = host
            self._counts[host] += 1
            return victim

    def drop(self, one: T) -> bool:
        """It has proven itself, or has gone. False where it was none of them any more."""
        with self._lock:
            return self._drop(one)

    def rename(self, one: T, other: T) -> None:
        """It is called otherwise from now on, and the newest of its host: it has spoken."""
        with self._lock:
            host = self._hosts.pop(one, None)
            if host is not None:
                self._hosts[other] = host

    def _drop(self, one: T) -> bool:
        host = self._hosts.pop(one, None)
        if host is None:
            return False
        self._counts[host] -= 1
        if not self._counts[host]:
            del self._counts[host]
        return True
