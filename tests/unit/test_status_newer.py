"""A status that a newer operator wrote: read without an exception, served, and not erased where it says what this one does not know."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from psjob_operator.api.status import JobStatus
from psjob_operator.cluster.cache import Memory
from psjob_operator.cluster.status_writer import difference
from psjob_operator.plan.observed_state import Process
from psjob_operator.plan.plan import plan
from tests.unit.cluster_statuses import merged
from tests.unit.plan_given import NOW, ended, names, pod, running

STORED: dict[str, Any] = running().status.to_manifest()  # type: ignore[union-attr]
NEWER = copy.deepcopy(STORED)
NEWER["standby"] = {"index": 3}
NEWER["workers"]["zones"] = {"a": 2}
NEWER["pinned"]["torch"] = "2.9"
NEWER["shards"][1] |= {"state": "Migrating", "zone": "b"}
NEWER["conditions"][0] |= {"reason": "BetterThanReady", "severity": "none"}
QUEUED = {
    "type": "QuotaReserved",
    "status": "Perhaps",
    "reason": "Queued",
    "message": "third",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}
NEWER["conditions"].append(QUEUED)


def written(stored: dict[str, Any], wanted: JobStatus) -> dict[str, Any]:
    return dict(merged(stored, difference(stored, wanted)))


def test_what_is_not_understood_stands_after_a_turn_that_changes_much() -> None:
    lost = replace(running(shard_0=pod("shard", 0, **ended(1))), status=JobStatus.read(NEWER))
    decided = plan(lost, NOW)
    assert names(decided) == ["job-ps-0-a2"] and decided.status.phase == "Recovering"
    after = written(NEWER, decided.status)
    assert (after["standby"], after["workers"]["zones"], after["pinned"]["torch"]) == ({"index": 3}, {"a": 2}, "2.9")
    assert after["shards"][1]["zone"] == "b" and after["shards"][0]["attempt"] == 2
    assert after["conditions"][-1] == QUEUED
    ready = next(entry for entry in after["conditions"] if entry["type"] == "Ready")
    assert (ready["reason"], "severity" in ready) == ("Recovering", False), "what it said of another state is over"
    assert difference(after, JobStatus.read(after)) == {}


def test_a_shards_state_of_a_newer_operator_stands_until_more_is_known() -> None:
    def told(**seats: Process) -> str:
        return plan(replace(running(**seats), status=JobStatus.read(NEWER)), NOW).status.shards[1].state

    assert told(shard_1=pod("shard", 1, ready=False)) == "Migrating"
    assert told() == "Serving"
    assert told(shard_1=pod("shard", 1, **ended(1))) == "Pending", "of the next attempt it says nothing"


def test_a_job_that_rests_is_not_written_for_it() -> None:
    quiet = replace(running(), status=JobStatus.read({**NEWER, "phase": "Tuning"}))
    decided = plan(quiet, NOW)
    assert not decided.actions and decided.status.phase == "Running"
    after = written(NEWER, decided.status)
    assert after["standby"] == {"index": 3} and after["conditions"][-1]["type"] == "QuotaReserved"


def test_of_another_run_nothing_stands_but_what_nobody_here_knows() -> None:
    fresh = plan(replace(running(), uid="run-2", processes=(), status=JobStatus.read(NEWER)), NOW).status
    after = written(NEWER, fresh)
    assert "torch" not in after["pinned"] and "zones" not in after["workers"]
    assert [entry["type"] for entry in after["conditions"]] == ["Ready", "Reconciling"]


def test_parts_of_an_older_checkpoint_are_not_told_of_a_newer_one() -> None:
    stored = {**STORED, "checkpoint": {"step": 1, "time": "2026-01-01T00:00:00Z", "digest": "abc"}}
    same = JobStatus.read(stored)
    assert written(stored, same.model_copy(update={"view": 9}))["checkpoint"]["digest"] == "abc"
    assert same.checkpoint is not None
    later = same.model_copy(update={"checkpoint": same.checkpoint.model_copy(update={"step": 2})})
    assert written(stored, later)["checkpoint"] == {"step": 2, "time": "2026-01-01T00:00:00Z"}


WARM = {"index": 1, "attempt": 2, "state": "Warm"}


@pytest.mark.parametrize(
    ("raw", "read"),
    [
        ({"phase": "Draining"}, {"phase": "Draining"}),
        ({"phase": 3, "run": "r"}, {"run": "r"}),
        ({"view": "many", "run": "r"}, {"run": "r"}),
        ({"progress": "soon", "shards": [{"index": 0, "attempt": 4}]}, {"shards": [{"index": 0, "attempt": 4, "state": "Pending"}]}),
        ({"shards": [{"index": 0}, WARM, {"attempt": 3}]}, {"shards": [WARM]}),
        ({"checkpoint": {"time": "t"}, "placement": 2}, {"placement": 2}),
        ({"conditions": "none"}, {}),
    ],
)  # fmt: skip
def test_what_can_be_read_is_read(raw: dict[str, Any], read: dict[str, Any]) -> None:
    made = JobStatus.read(raw).to_manifest()
    assert {
        key: value
        for key, value in made.items()
        if key not in ("workers", "restarts", "conditions", "shards") or value != JobStatus().to_manifest().get(key)
    } == read


def test_what_cannot_be_read_is_not_erased() -> None:
    stored = {**STORED, "progress": "soon", "pinned": {**STORED["pinned"], "wire": "quic"}}
    after = written(stored, JobStatus.read(stored).model_copy(update={"view": 7}))
    assert (after["progress"], after["pinned"]["wire"], after["view"]) == ("soon", "quic", 7)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["index", "attempt", "type", "x"]), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(sorted(NEWER)), VALUES, max_size=6))
def test_whatever_stands_there_a_turn_is_made_of_it(laid: dict[str, Any]) -> None:
    stored = {**copy.deepcopy(NEWER), **laid}
    status = JobStatus.read(stored)
    json.dumps(status.to_manifest())
    decided = plan(replace(running(), status=status), NOW)
    assert difference(stored, decided.status) is not None
    Memory("run-1").see(stored, NOW, ours=False)
