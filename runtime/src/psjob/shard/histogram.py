"""A histogram with fixed buckets, as Prometheus counts: each bucket holds what is at most its edge."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
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
        buckets, total = [], 0
        for edge, count in zip(self._edges, self._counts, strict=False):
            total += count
            buckets.append([edge, total])
        return {"count": total + self._counts[-1], "sum": self._sum, "max": self._max, "buckets": buckets}
