"""The coordinator's sum of how late pushes were on every shard: it counts each once, whatever begins anew, and nobody can break it.

- How late pushes were, as it is told: the summary of a run.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psjob.shard.push_metrics import GAPS, STALENESS_EDGES, Histogram, StalenessHistogram, StalenessMetrics, _Seen
from psjob_client.local.status import lateness, lateness_line


def word(attempt: int, began: float, lags: list[int]) -> dict[str, Any]:
    """As `StalenessMetrics.word` writes it."""
    lag = Histogram(STALENESS_EDGES)
    for value in lags:
        lag.see(value)
    return {"did": "staleness", "attempt": attempt, "began": began, "lag": lag.told(), "gap": Histogram(GAPS).told()}


def counts(lateness: StalenessHistogram) -> tuple[int, float, float]:
    lag = lateness.told()["staleness"]
    return lag["count"], lag["sum"], lag["max"]


def test_until_a_shard_has_told_nothing_is_known() -> None:
    assert StalenessHistogram().told() == {"staleness": None, "gap": None}


def test_shards_add_up_and_what_one_of_them_had_seen_stays() -> None:
    lateness = StalenessHistogram()
    for shard in range(3):
        lateness.heard(shard, word(1, 5.0, []))
    lateness.heard(0, word(1, 5.0, [1, 1]))
    lateness.heard(1, word(1, 5.0, [7]))
    assert counts(lateness) == (3, 9.0, 7.0)
    lateness.heard(0, word(1, 5.0, [1, 1, 2]))
    lateness.heard(1, word(2, 0.5, [3]))
    assert counts(lateness) == (5, 14.0, 7.0), "shard 1 is another process, of a clock of its own"
    lateness.heard(1, word(1, 5.0, [7, 7]))
    assert counts(lateness) == (5, 14.0, 7.0), "the lost one's word came late"
    lateness.heard(1, word(2, 9.0, [4]))
    assert counts(lateness) == (6, 18.0, 7.0), "it was restored where it was"
    told = lateness.told()["staleness"]
    assert [count for edge, count in told["buckets"] if edge in (0, 1, 2, 3, 4, 8)] == [0, 2, 3, 4, 5, 6]


def test_a_new_coordinator_counts_from_0() -> None:
    """Or a series that fell by shard 0's part would seem to have grown by all of the others'."""
    lateness = StalenessHistogram()
    lateness.heard(1, word(1, 5.0, [2] * 100))
    assert counts(lateness)[0] == 0
    lateness.heard(1, word(1, 5.0, [2] * 101))
    assert counts(lateness)[:2] == (1, 2.0)


def test_a_shard_says_what_it_has_seen() -> None:
    staleness = StalenessMetrics(1, None)
    lateness = StalenessHistogram()
    lateness.heard(1, staleness.word(1))
    staleness.add(0, 0, _Seen(4), {})
    lateness.heard(1, staleness.word(1))
    assert counts(lateness) == (1, 4.0, 4.0)


@given(st.integers(0, 10_000))
def test_each_push_is_counted_once_whatever_begins_anew(seed: int) -> None:
    chance, lateness = random.Random(seed), StalenessHistogram()
    attempts, seen, told, whole = [1, 1, 1], [[], [], []], [0, 0, 0], 0  # type: ignore[var-annotated]
    for shard in range(3):
        lateness.heard(shard, word(1, 0.0, []))
    for _ in range(40):
        shard = chance.randrange(3)
        act = chance.choice(["push", "push", "tell", "again"])
        if act == "push":
            seen[shard].append(chance.randrange(2000))
        elif act == "tell":
            lateness.heard(shard, word(attempts[shard], 0.0, seen[shard]))
            whole, told[shard] = whole + len(seen[shard]) - told[shard], len(seen[shard])
        else:
            attempts[shard], seen[shard], told[shard] = attempts[shard] + 1, [], 0
        assert lateness.told()["staleness"]["count"] == whole


GOOD = word(1, 5.0, [1, 2, 3])


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": "x"},
        {"began": None},
        {"lag": None},
        {"lag": {}},
        {"lag": GOOD["lag"] | {"buckets": []}},
        {"lag": GOOD["lag"] | {"buckets": [[edge * 2, count] for edge, count in GOOD["lag"]["buckets"]]}},
        {"lag": GOOD["lag"] | {"buckets": [[edge, -1] for edge in STALENESS_EDGES]}},
        {"lag": GOOD["lag"] | {"buckets": [[edge, "?"] for edge in STALENESS_EDGES]}},
        {"lag": GOOD["lag"] | {"count": 2}},
        {"lag": GOOD["lag"] | {"sum": float("nan")}},
        {"gap": GOOD["gap"] | {"max": float("inf")}},
    ],
    ids=str,
)
def test_what_is_no_such_word_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    lateness = StalenessHistogram()
    lateness.heard(1, word(1, 5.0, []))
    lateness.heard(1, GOOD)
    before = lateness.told()
    with pytest.raises((ValueError, KeyError, TypeError)):
        lateness.heard(1, GOOD | change)
    assert lateness.told() == before and before["staleness"]["count"] == 3


def told(lags: list[float], gaps: list[float] = []) -> dict[str, Any]:  # noqa: B006
    """As a shard's status port says it."""
    lag, gap = Histogram(STALENESS_EDGES), Histogram(GAPS)
    for value in lags:
        lag.see(value)
    for value in gaps:
        gap.see(value)
    found: dict[str, Any] = json.loads(json.dumps({"staleness": lag.told(), "gap": gap.told()}))
    return found


def test_shards_are_summed_and_a_quantile_is_the_edge_of_its_bucket() -> None:
    late = lateness([told([0, 1, 1], [0.5]), told([2, 5], [1.5, 1.0]), {"staleness": None, "gap": None}, {}])
    assert late == {"staleness": {"median": 1, "p95": 5, "max": 5, "mean": 1.8}, "gap": {"mean": 1.0, "max": 1.5}}
    assert lateness_line(late) == "staleness of pushes: 1 updates (median), 5 (95 %), 5 (largest); the mean gap was 1"
    assert lateness([told([7] * 20)]) is not None and lateness([told([7] * 20 + [20])])["staleness"]["p95"] == 8  # type: ignore[index]


@pytest.mark.parametrize("statuses", [[], [{}], [{"staleness": None}], [{"staleness": "x", "gap": 3}], [told([])]])
def test_a_run_without_late_pushes_has_nothing_to_tell(statuses: list[dict[str, Any]]) -> None:
    assert lateness(statuses) is None


def test_lags_beyond_every_bucket_are_told_by_the_largest() -> None:
    late = lateness([told([5000])])
    assert late is not None and late["staleness"]["p95"] == late["staleness"]["median"] == 5000
