"""Pushes of one kind that a user must hear of: how many came, and which was the first."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from typing import Any

log = logging.getLogger("psjob.shard")


class OddPushes(ABC):
    """Of one shard. A push (a worker's step) is counted once, however many blocks show it."""

    def __init__(self) -> None:
        self.count = 0
        self.first: tuple[Any, ...] | None = None
        """Worker, step, and what was found in it."""
        self._last: dict[int, int] = {}
        """By worker: the newest step that is counted."""
        self._lock = threading.Lock()

    def note(self, worker: int, clock: int, *what: Any) -> None:
        """A push was found to be one; the first is a line in the log."""
        with self._lock:
            if self._last.get(worker, -1) >= clock:
                return
            self._last[worker] = clock
            self.count += 1
            first = self.first is None
            if first:
                self.first = (worker, clock, *what)
        if first:
            log.warning("%s", self.sentence())

    @abstractmethod
    def sentence(self) -> str | None:
        """What a user reads about the first; None where there was none. It never changes: it stands in a status."""
