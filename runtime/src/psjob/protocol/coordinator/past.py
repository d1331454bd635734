"""The job's numbers over time, in a list of bounded length: where it is full, every second entry goes, and entries come half as often."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

MOST = 340
MOST_NAMES = 24
"""Numbers of an entry; as many as fit an answer of contract.STATUS_BYTES when all names are at their longest."""
LEAST_SECONDS = 1.0
"""Between two entries, at first."""


class Past:
    """Entries as contract.HISTORY_PATH has them. Read by another thread: the list is replaced, never shortened in place."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._every = LEAST_SECONDS
        self._entries: list[dict[str, Any]] = []
        self._next = 0.0
        self._names: set[str] = set()
        """What has a curve already: the first value of a number waits for nobody. At most MOST_NAMES."""

    def note(self, step: int, metrics: Mapping[str, float], rate: float | None, now: float, reported: Mapping[str, int]) -> None:
        """`step` has passed at unix time `now`, where an entry is due. A rewind brings lower steps after higher ones."""
        if not self.due(metrics, now):
            return
        told = dict(islice(metrics.items(), MOST_NAMES))
        self._next = now + self._every
        self._names.update(islice(told, MOST_NAMES - len(self._names)))
        self._entries.append({"time": now, "step": step, "rate": rate, "metrics": told, "reported": [reported[name] for name in told]})
        if len(self._entries) >= self._most:
            self._entries = self._entries[1::2]
            self._every *= 2

    def due(self, metrics: Mapping[str, float], now: float) -> bool:
        """Would `note` take an entry now? It does where its time has come, or where a number is there for the first time."""
        return now >= self._next or (len(self._names) < MOST_NAMES and not self._names.issuperset(islice(metrics, MOST_NAMES)))

    def told(self) -> list[dict[str, Any]]:
        """All of them, the oldest first."""
        return list(self._entries)
