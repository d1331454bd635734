"""What waits for one thread, in its order. What is not urgent wakes nobody: it is taken with what comes next, or when the thread looks."""

from __future__ import annotations

import queue
from collections import deque
from typing import Generic, TypeVar

MANY = 256
"""So many that wait wake the thread all the same."""
T = TypeVar("T")


class Mailbox(Generic[T]):
    """Any thread may put; one takes."""

    def __init__(self) -> None:
        self._waiting: deque[T] = deque()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._asleep = False

    def put(self, item: T, urgent: bool = True) -> None:
        """Behind all that was put before; only what is urgent ends a wait of `get`."""
        self._waiting.append(item)
        if self._asleep and (urgent or len(self._waiting) > MANY):
            self._asleep = False
            self._wakes.put(None)

    def get(self, timeout: float) -> T:
        """The next one; waits `timeout` seconds for one that is urgent. Raises queue.Empty."""
        self._asleep = True  # before it is looked: what is put from here on either is seen or wakes
        if not self._waiting:
            try:
                self._wakes.get(timeout=timeout)
            except queue.Empty:
                pass
        self._asleep = False
        return self.get_nowait()

    def get_nowait(self) -> T:
        """The next one. Raises queue.Empty."""
        try:
            return self._waiting.popleft()
        except IndexError:
            raise queue.Empty from None

    def qsize(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def empty(self) -> bool:
        """Does none wait?"""
        return not self._waiting
