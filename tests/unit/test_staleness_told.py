"""How late pushes were, as it is told: the summary of a run, and the operator's /metrics."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psjob.shard.histogram import Histogram
from psjob.shard.staleness import GAPS, LAGS
from psjob_client.local.lateness import lateness, line
from psjob_operator.cluster.health import Health
from psjob_operator.cluster.metrics import exposition
from psjob_operator.cluster.progress import parse
from psjob_operator.cluster.queue import Key


def told(lags: list[float], gaps: list[float] = []) -> dict[str, Any]:  # noqa: B006
    """As a shard's status port says it."""
    lag, gap = Histogram(LAGS), Histogram(GAPS)
    for value in lags:
        lag.see(value)
    for value in gaps:
        gap.see(value)
    found: dict[str, Any] = json.loads(json.dumps({"lag": lag.told(), "gap": gap.told()}))
    return found


def job(lags: list[float], gaps: list[float] = []) -> dict[str, Any]:  # noqa: B006
    """As shard 0's says it of the whole job."""
    return {"coordinator": told(lags, gaps)}


def test_shards_are_summed_and_a_quantile_is_the_edge_of_its_bucket() -> None:
    late = lateness([told([0, 1, 1], [0.5]), told([2, 5], [1.5, 1.0]), {"lag": None, "gap": None}, {}])
    assert late == {"lag": {"median": 1, "p95": 5, "max": 5, "mean": 1.8}, "gap": {"mean": 1.0, "max": 1.5}}
    assert line(late) == "pushes lagged 1 updates (median), 5 (95 %), 5 (largest); the mean gap was 1"
    assert lateness([told([7] * 20)]) is not None and lateness([told([7] * 20 + [20])])["lag"]["p95"] == 8  # type: ignore[index]


@pytest.mark.parametrize("statuses", [[], [{}], [{"lag": None}], [{"lag": "x", "gap": 3}], [told([])]])
def test_a_run_without_late_pushes_has_nothing_to_tell(statuses: list[dict[str, Any]]) -> None:
    assert lateness(statuses) is None


def test_lags_beyond_every_bucket_are_told_by_the_largest() -> None:
    late = lateness([told([5000])])
    assert late is not None and late["lag"]["p95"] == late["lag"]["median"] == 5000


def test_metrics_have_a_histogram_a_job() -> None:
    steady = {"coordinator": {"lag": None, "gap": None}}
    page = exposition(
        {Key("b", "two"): job([3]), Key("a", "one"): job([0, 2000], [0.02]), Key("a", "sync"): steady, Key("a", "sync-too"): told([7])}
    )
    lines = page.splitlines()
    assert lines[:3] == [
        "# HELP psjob_push_lag Updates between the weights that a gradient was computed on and those it is applied to, of all shards.",
        "# TYPE psjob_push_lag histogram",
        'psjob_push_lag_bucket{namespace="a",job="one",le="0"} 1',
    ]
    assert 'psjob_push_lag_bucket{namespace="a",job="one",le="1024"} 1' in lines
    assert 'psjob_push_lag_bucket{namespace="a",job="one",le="+Inf"} 2' in lines
    assert 'psjob_push_lag_sum{namespace="a",job="one"} 2000' in lines and 'psjob_push_lag_count{namespace="b",job="two"} 1' in lines
    assert 'psjob_push_gap_bucket{namespace="a",job="one",le="0.03"} 1' in lines
    assert not [text for text in lines if "sync" in text]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)
NUMBER = r"\d+(\.\d+)?(e[+-]?\d+)?"
LINE = re.compile(rf'# (HELP|TYPE) .*|psjob_push_(lag|gap)_(bucket|sum|count)\{{namespace="n",job="j"(,le="({NUMBER}|\+Inf)")?\}} {NUMBER}')


@given(st.fixed_dictionaries({"count": JSON, "sum": JSON, "buckets": st.lists(st.tuples(JSON, JSON) | JSON) | JSON}) | JSON)
def test_whatever_a_pod_says_the_page_is_in_form(lag: Any) -> None:
    said = parse(json.dumps({"coordinator": {"lag": lag}}).encode())
    assert said is not None
    assert all(LINE.fullmatch(text) for text in exposition({Key("n", "j"): said}).splitlines())


def test_the_page_is_served_beside_the_probes() -> None:
    async def scenario() -> tuple[str, str]:
        health = Health(dict, lambda: {Key("a", "one"): job([1])})
        await health.start("127.0.0.1", 0)
        try:
            assert health._runner is not None
            port = health._runner.addresses[0][1]
            async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as reply:
                return reply.headers["Content-Type"], await reply.text()
        finally:
            await health.stop()

    kind, page = asyncio.run(scenario())
    assert kind == "text/plain; version=0.0.4; charset=utf-8" and 'psjob_push_lag_count{namespace="a",job="one"} 1' in page
