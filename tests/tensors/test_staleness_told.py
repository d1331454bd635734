"""How late pushes were, as it is told: the summary of a run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from psjob.shard.push_metrics import GAPS, LAGS, Histogram
from psjob_client.local.status import lateness, lateness_line


def told(lags: list[float], gaps: list[float] = []) -> dict[str, Any]:  # noqa: B006
    """As a shard's status port says it."""
    lag, gap = Histogram(LAGS), Histogram(GAPS)
    for value in lags:
        lag.see(value)
    for value in gaps:
        gap.see(value)
    found: dict[str, Any] = json.loads(json.dumps({"lag": lag.told(), "gap": gap.told()}))
    return found


def test_shards_are_summed_and_a_quantile_is_the_edge_of_its_bucket() -> None:
    late = lateness([told([0, 1, 1], [0.5]), told([2, 5], [1.5, 1.0]), {"lag": None, "gap": None}, {}])
    assert late == {"lag": {"median": 1, "p95": 5, "max": 5, "mean": 1.8}, "gap": {"mean": 1.0, "max": 1.5}}
    assert lateness_line(late) == "pushes lagged 1 updates (median), 5 (95 %), 5 (largest); the mean gap was 1"
    assert lateness([told([7] * 20)]) is not None and lateness([told([7] * 20 + [20])])["lag"]["p95"] == 8  # type: ignore[index]


@pytest.mark.parametrize("statuses", [[], [{}], [{"lag": None}], [{"lag": "x", "gap": 3}], [told([])]])
def test_a_run_without_late_pushes_has_nothing_to_tell(statuses: list[dict[str, Any]]) -> None:
    assert lateness(statuses) is None


def test_lags_beyond_every_bucket_are_told_by_the_largest() -> None:
    late = lateness([told([5000])])
    assert late is not None and late["lag"]["p95"] == late["lag"]["median"] == 5000
