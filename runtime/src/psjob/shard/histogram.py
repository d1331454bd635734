"""A histogram with fixed buckets, as Prometheus counts: each bucket holds what is at most its edge."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any


class Histogram:
    """Counts finite numbers of 0 or more; `edges` rise. Not locked."""

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = tuple(edges)
        self._counts = [0] * (len(edges) + 1)
        self._sum = self._max = 0.0

    def see(self, value: float) -> None:
        """Count it; one that is not finite is left out."""
        if math.isfinite(value):
            self._counts[bisect_left(self._edges, value)] += 1
            self._sum += value
            self._max = max(self._max, value)

    def told(self) -> dict[str, Any]:
        """As contract.STATUS_KEYS has it: buckets are cumulative, and what is above the last edge is in `count` alone."""
        below = list(accumulate(self._counts))
        buckets = [[edge, count] for edge, count in zip(self._edges, below, strict=False)]
        return {"count": below[-1], "sum": self._sum, "max": self._max, "buckets": buckets}

    @classmethod
    def read(cls, edges: Sequence[float], told: Mapping[str, Any]) -> Histogram:
        """What `told` said. Raises ValueError where that has other edges, falls, or is not finite; KeyError, TypeError where it is none."""
        found = cls(edges)
        if [edge for edge, _ in told["buckets"]] != list(edges):
            raise ValueError(f"a histogram of {len(told['buckets'])} buckets has other edges than these {len(edges)}")
        below = [0, *(int(count) for _, count in told["buckets"]), int(told["count"])]
        found._counts = [high - low for low, high in pairwise(below)]
        found._sum, found._max = float(told["sum"]), float(told["max"])
        if min(found._counts) < 0 or not (math.isfinite(found._sum) and math.isfinite(found._max)):
            raise ValueError("a histogram falls, or is not finite")
        return found

    def plus(self, new: Histogram, old: Histogram | None = None) -> Histogram:
        """This with what `new` has counted, less what `old` had; all have the same edges."""
        found, less = Histogram(self._edges), old or Histogram(self._edges)
        found._counts = [a + b - c for a, b, c in zip(self._counts, new._counts, less._counts, strict=True)]
        found._sum, found._max = self._sum + new._sum - less._sum, max(self._max, new._max)
        return found
