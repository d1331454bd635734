"""The status patch: what differs and nothing else.

- A status that a newer operator wrote: read without an exception, served, and not erased where it says what this one does not know.
- When an object counts as written by two, and for how long it is left alone.
- What a pod says about its progress is cut to size before anyone looks at it.

Events are written beside the turns: in order, each once, and seldom while jobs wait for their turn.
- A status as the API server has it after a patch.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from psjob_operator.api.status import Condition, JobStatus, ShardStatus
from psjob_operator.cluster import apply, observe
from psjob_operator.cluster.apply import merge_patch, status_difference, tells_news
from psjob_operator.cluster.cache import REST_SECONDS, Contests, JobEntry, Memory
from psjob_operator.cluster.client import KubernetesClient
from psjob_operator.contract import STATUS_BYTES
from psjob_operator.plan.actions import Event
from psjob_operator.plan.observed_state import Process
from psjob_operator.plan.plan import plan
from tests.unit.plan_given import NOW, ended, names, pod, running, with_internal

VALUES = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.sampled_from("abcd"), VALUES, max_size=4)


@given(OBJECTS, OBJECTS)
def test_the_patch_turns_the_old_into_the_new(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert merged(old, merge_patch(old, new)) == new


@given(OBJECTS)
def test_no_difference_is_no_patch(value: dict[str, Any]) -> None:
    assert merge_patch(value, value) == {}


def _status(**more: Any) -> JobStatus:
    at = "2026-01-01T00:00:00Z"
    ready = Condition(type="Ready", status="False", reason="Starting", message="2 of 4", last_transition_time=at)
    return JobStatus(phase="Pending", run="u", conditions=(ready,), shards=(ShardStatus(index=0, attempt=1),), **more)


def test_a_field_of_a_newer_operator_stays() -> None:
    stored = {**_status().to_manifest(), "standby": {"index": 3}}
    assert status_difference(stored, _status()) == {}


def test_a_field_that_is_no_longer_said_goes() -> None:
    stored = {**_status().to_manifest(), "workersReady": "1/2"}
    assert status_difference(stored, _status()) == {"workersReady": None}


def said(status: str, reason: str) -> dict[str, str]:
    return {"type": "Ready", "status": status, "reason": reason, "message": "words"}


@pytest.mark.parametrize(
    ("change", "at_once"),
    [
        ({"workersReady": "3/4"}, False),
        ({"conditions": [said("False", "Unschedulable")]}, False),
        ({"conditions": [said("True", "Running")]}, True),
        ({"conditions": [said("False", "Starting"), {"type": "Reconciling", "status": "True", "reason": "Starting"}]}, True),
        ({"phase": "Running"}, True),
        ({"restarts": {"total": 1}}, True),
        ({"internal": {"term": 2}}, True),
        ({"internal": {"pendingStarts": ""}}, False),
    ],
)
def test_what_is_written_at_once(change: dict[str, Any], at_once: bool) -> None:
    assert tells_news({"phase": "Pending", "conditions": [said("False", "Starting")]}, change) is at_once


STORED: dict[str, Any] = running().status.to_manifest()  # type: ignore[union-attr]
NEWER = copy.deepcopy(STORED)
NEWER["standby"] = {"index": 3}
NEWER["workers"]["zones"] = {"a": 2}
NEWER["internal"]["pinned"]["torch"] = "2.9"
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
    return dict(merged(stored, status_difference(stored, wanted)))


def test_what_is_not_understood_stands_after_a_turn_that_changes_much() -> None:
    lost = replace(running(shard_0=pod("shard", 0, **ended(1))), status=JobStatus.read(NEWER))
    decided = plan(lost, NOW)
    assert names(decided) == ["job-shard-0-a2"] and decided.status.phase == "Recovering"
    after = written(NEWER, decided.status)
    assert (after["standby"], after["workers"]["zones"], after["internal"]["pinned"]["torch"]) == ({"index": 3}, {"a": 2}, "2.9")
    assert after["shards"][1]["zone"] == "b" and after["shards"][0]["attempt"] == 2
    assert after["conditions"][-1] == QUEUED
    ready = next(entry for entry in after["conditions"] if entry["type"] == "Ready")
    assert (ready["reason"], "severity" in ready) == ("Recovering", False), "what it said of another state is over"
    assert status_difference(after, JobStatus.read(after)) == {}


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
    assert "torch" not in after["internal"]["pinned"] and "zones" not in after["workers"]
    assert [entry["type"] for entry in after["conditions"]] == ["Ready", "Reconciling"]


def test_parts_of_an_older_checkpoint_are_not_told_of_a_newer_one() -> None:
    stored = {**STORED, "checkpoint": {"step": 1, "time": "2026-01-01T00:00:00Z", "digest": "abc"}}
    same = JobStatus.read(stored)
    assert written(stored, with_internal(same, term=9))["checkpoint"]["digest"] == "abc"
    assert same.checkpoint is not None
    later = same.model_copy(update={"checkpoint": same.checkpoint.model_copy(update={"step": 2})})
    assert written(stored, later)["checkpoint"] == {"step": 2, "time": "2026-01-01T00:00:00Z"}


NUMBERS = {"placedTerm": 2, "workerStart": 0, "pendingStarts": ""}
WARM = {"index": 1, "replica": 0, "attempt": 2, "state": "Warm"}


@pytest.mark.parametrize(
    ("raw", "read"),
    [
        ({"phase": "Draining"}, {"phase": "Draining"}),
        ({"phase": 3, "run": "r"}, {"run": "r"}),
        ({"internal": {"term": "many"}, "run": "r"}, {"run": "r"}),
        ({"progress": "soon", "shards": [{"index": 1, "attempt": 2, "state": "Warm"}]}, {"shards": [WARM]}),
        ({"shards": [{"index": 0}, WARM, {"attempt": 3}]}, {"shards": [WARM]}),
        ({"checkpoint": {"time": "t"}, "internal": NUMBERS}, {"internal": NUMBERS}),
        ({"conditions": "none"}, {}),
    ],
)  # fmt: skip
def test_what_can_be_read_is_read(raw: dict[str, Any], read: dict[str, Any]) -> None:
    made = JobStatus.read(raw).to_manifest()
    assert {
        key: value
        for key, value in made.items()
        if key not in ("internal", "workers", "restarts", "conditions", "shards") or value != JobStatus().to_manifest().get(key)
    } == read


def test_what_cannot_be_read_is_not_erased() -> None:
    internal = {**STORED["internal"], "pinned": {**STORED["internal"]["pinned"], "wire": "quic"}}
    stored = {**STORED, "progress": "soon", "internal": internal}
    after = written(stored, with_internal(JobStatus.read(stored), term=7))
    assert (after["progress"], after["internal"]["pinned"]["wire"], after["internal"]["term"]) == ("soon", "quic", 7)


UNKNOWN_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["index", "attempt", "type", "x"]), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(sorted(NEWER)), UNKNOWN_VALUES, max_size=6))
def test_whatever_stands_there_a_turn_is_made_of_it(laid: dict[str, Any]) -> None:
    stored = {**copy.deepcopy(NEWER), **laid}
    status = JobStatus.read(stored)
    json.dumps(status.to_manifest())
    decided = plan(replace(running(), status=status), NOW)
    assert status_difference(stored, decided.status) is not None
    Memory("run-1").see(stored, NOW, ours=False)


LABEL = "NetworkPolicy/job-shards"


def after(*times: float) -> Contests:
    made = Contests()
    for at in times:
        made.correct(LABEL, at)
    return made


@pytest.mark.parametrize(
    ("times", "now", "rests"),
    [
        ((), 0.0, False),
        ((0.0,), 0.1, False),
        ((0.0, 0.1), 0.2, False),
        ((0.0, 0.1, 0.2), 0.3, True),
        ((0.0, 60.0, 119.0), 130.0, True),
        ((0.0, 60.0, 121.0), 130.0, False),
        ((0.0, 0.1, 0.2), 0.2 + REST_SECONDS, False),
        ((0.0, 0.1, 0.2), REST_SECONDS, True),
        ((0.0, 300.0, 300.1, 300.2), 301.0, True),
    ],
)
def test_three_corrections_in_two_minutes_are_a_contest(times: tuple[float, ...], now: float, rests: bool) -> None:
    contests = after(*times)
    until = contests.rests_until(LABEL, now)
    assert (until is not None) == rests
    assert bool(contests.words(now)) == rests
    if rests:
        assert until == times[-1] + REST_SECONDS and LABEL in contests.words(now)


def test_each_object_counts_by_itself_and_one_more_correction_renews_the_rest() -> None:
    contests = after(0.0, 0.1, 0.2)
    assert contests.rests_until("Service/job-shards", 0.3) is None
    contests.correct(LABEL, 700.0)
    assert contests.rests_until(LABEL, 701.0) is None, "it may be over"
    contests.correct(LABEL, 700.1)
    contests.correct(LABEL, 700.2)
    assert contests.rests_until(LABEL, 701.0) == 700.2 + REST_SECONDS


@pytest.mark.parametrize(
    "raw",
    [None, b"", b"[1]", b"3", b"{", b'{"a":' * 5000, b"x" * (STATUS_BYTES + 1), b"\xff\xfe{}", b"[" * 100_000],
    ids=["nothing", "empty", "list", "number", "cut", "deep", "long", "not utf-8", "deeper"],
)
def test_what_is_no_object_of_bounded_size_is_nothing(raw: bytes | None) -> None:
    assert observe.parse_status(raw) is None


def test_numbers_must_be_finite_and_strings_are_cut_and_made_printable() -> None:
    raw = json.dumps(
        {"loss": float("nan"), "rate": 1e400, "step": 12, "huge": 2**70, "text": "a\x1b[31m" + "b" * 400, "deep": {"a": [{"b": 1}]}}
    )
    found = observe.parse_status(raw.encode())
    assert found is not None
    assert found["loss"] is None and found["rate"] is None and found["huge"] is None
    assert found["step"] == 12
    assert found["deep"] == {"a": [{"b": 1}]}
    assert "\x1b" not in found["text"] and len(found["text"]) <= observe.TEXT


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@settings(max_examples=20)
@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_the_result_is_plain_json_whatever_came(value: dict[str, Any]) -> None:
    found = observe.parse_status(json.dumps(value).encode())
    assert found is None or json.dumps(found, allow_nan=False)


JOB = JobEntry("space", "job", "uid-1", 1, "7", 0.0, False, {}, {}, {}, {})


class Written:
    """Takes what would be written, in order."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    async def create(self, kind: object, namespace: str, body: dict[str, Any]) -> None:
        self.notes.append(body["note"])


async def told(busy: bool, longest: float, seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What of three Events told at once is written in that time, where each waits for turns at most `longest` seconds."""
    monkeypatch.setattr(apply, "BUSY_SECONDS", longest)
    written = Written()
    recorder = apply.EventRecorder(cast(KubernetesClient, written), "me", lambda: busy)
    recorder.record(JOB, [Event("Normal", "Running", str(number)) for number in range(3)], 0.0)
    running = asyncio.create_task(recorder.run())
    end = time.monotonic() + seconds
    while len(written.notes) < 3 and time.monotonic() < end:
        await asyncio.sleep(0.01)
    running.cancel()
    return written.notes


def test_all_are_written_at_once_while_no_job_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asyncio.run(told(False, 3600, 30, monkeypatch)) == ["0", "1", "2"]


def test_while_jobs_wait_they_come_slowly_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asyncio.run(told(True, 3600, 0.1, monkeypatch)) == []
    assert asyncio.run(told(True, 0.2, 30, monkeypatch)) == ["0", "1", "2"]


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386, as the API server does it."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result
