"""Which refusals the log has: one a host and minute, and of all hosts together no more than a person reads."""

from __future__ import annotations

import threading

MOST_LINES = 60
SECONDS = 60.0


class Notices:
    """At most MOST_LINES in SECONDS. May be called from any thread."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}
        """When the hosts of the last minute had their line; oldest first."""
        self._lock = threading.Lock()
        self._untold = 0

    def told(self, host: str, now: float) -> int | None:
        """May a refusal of `host` have a line? With it, how many have had none since the last one; None: it has none."""
        with self._lock:
            while self._told and now - next(iter(self._told.values())) >= SECONDS:
                del self._told[next(iter(self._told))]
            if host in self._told or len(self._told) >= MOST_LINES:
                self._untold += 1
                return None
            self._told[host] = now
            untold, self._untold = self._untold, 0
            return untold
