"""How late the pushes of a run were, over all its shards: for the summary, the history, and as a line for the user."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from psjob_client.local.probe import numbers, part


def lateness(statuses: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]] | None:
    """Staleness: lag {median, p95, max, mean} in updates and gap {mean, max} of shards (contract.STATUS_KEYS). None: no push was seen.

    A push counts once on each shard. Quantiles are rounded up to the edge of their bucket.
    """
    lag, gap = histograms(statuses).values()
    if not lag["count"]:
        return None

    most = float(lag["max"])

    def quantile(share: float) -> float:
        edges = (float(edge) for edge, held in lag["buckets"] if held >= share * lag["count"])
        return min(next(edges, most), most)

    def mean(one: Mapping[str, Any]) -> float:
        return float(one["sum"] / max(1, one["count"]))

    return {
        "lag": {"median": quantile(0.5), "p95": quantile(0.95), "max": most, "mean": mean(lag)},
        "gap": {"mean": mean(gap), "max": gap["max"]},
    }


def histograms(statuses: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Lag and gap of all pushes that the shards saw, each as one of contract.STATUS_KEYS; a push counts once on each shard."""
    told = list(statuses)
    return {name: _added([part(one, name) for one in told]) for name in ("lag", "gap")}


def _added(told: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    count = total = most = 0.0
    below: Counter[float] = Counter()
    for one in told:
        count, total, most = count + numbers(one, "count"), total + numbers(one, "sum"), max(most, numbers(one, "max"))
        below.update(dict(one.get("buckets") or ()))
    return {"count": count, "sum": total, "max": most, "buckets": sorted(below.items())}


def line(late: Mapping[str, Mapping[str, float]]) -> str:
    """`pushes lagged 3 updates (median), 6 (95 %), 7 (largest); the mean gap was 0.0012`."""
    lag = late["lag"]
    words = f"pushes lagged {lag['median']:g} updates (median), {lag['p95']:g} (95 %), {lag['max']:g} (largest)"
    return f"{words}; the mean gap was {late['gap']['mean']:.2g}"
