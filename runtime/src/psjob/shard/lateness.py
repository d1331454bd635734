"""How late the pushes of the whole job were: what every shard has told, added up. A push counts once on each shard. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psjob.shard.histogram import Histogram
from psjob.shard.staleness import GAPS, LAGS

EDGES = {"lag": LAGS, "gap": GAPS}


class Lateness:
    """Counts begin at 0 with this coordinator and never fall: what a shard saw before it began anew stays."""

    def __init__(self) -> None:
        self._total = {word: Histogram(edges) for word, edges in EDGES.items()}
        self._told: dict[int, tuple[tuple[int, float], dict[str, Histogram]]] = {}
        """By shard: when it began to look (its attempt, and a time of that process), and what it has seen since."""

    def heard(self, shard: int, body: Mapping[str, Any]) -> None:
        """A shard tells of its pushes, as `StalenessMetrics.word` writes it. Raises ValueError, KeyError or TypeError for anything else."""
        began = (int(body["attempt"]), float(body["began"]))
        seen = {word: Histogram.read(edges, body[word]) for word, edges in EDGES.items()}
        known = self._told.get(shard)
        if known is not None and began < known[0]:
            return
        if known is not None:
            old: Mapping[str, Histogram | None] = known[1] if began == known[0] else dict.fromkeys(EDGES)
            self._total = {word: one.plus(seen[word], old[word]) for word, one in self._total.items()}
        self._told[shard] = began, seen

    def told(self) -> dict[str, Any]:
        """The job's histograms, as contract.STATUS_KEYS has them; None each where no shard has told of any (mode sync)."""
        return {word: one.told() if self._told else None for word, one in self._total.items()}
