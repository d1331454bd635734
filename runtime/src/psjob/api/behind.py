"""Writes that must not hold up the training loop: a thread makes them, in their order, some at a time."""

from __future__ import annotations

import atexit
import collections
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
MOST = 10_000
"""Items that wait; above it the oldest are dropped."""
EXIT_SECONDS = 10.0
"""For what still waits when the process ends."""


class Behind(Generic[T]):
    """`write` gets the items in their order, up to `together` at a time, in a thread of its own."""

    def __init__(self, write: Callable[[list[T]], None], failed: Callable[[Exception], None], together: int = 100) -> None:
        self._write, self._failed, self._together = write, failed, together
        self._waiting: collections.deque[T] = collections.deque(maxlen=MOST)
        self._changed = threading.Condition()
        self._busy = self._stopped = False
        self._thread: threading.Thread | None = None

    def put(self, item: T) -> None:
        """Have it written soon; never waits. Nothing after a failure."""
        with self._changed:
            if self._stopped:
                return
            self._waiting.append(item)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="psjob-behind", daemon=True)
                self._thread.start()
                atexit.register(self.drain, EXIT_SECONDS)

    def drain(self, seconds: float) -> bool:
        """Wait until all is written; False where that takes longer than `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._stopped or not (self._waiting or self._busy), seconds)

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                items = [self._waiting.popleft() for _ in range(min(self._together, len(self._waiting)))]
                self._busy = True
            problem: Exception | None = None
            try:
                self._write(items)
            except Exception as error:
                problem = error
            with self._changed:
                self._busy, self._stopped = False, problem is not None
                self._changed.notify_all()
            if problem is not None:
                self._failed(problem)
                return
