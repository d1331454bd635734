"""Answers of a status port, as the operator, `psjob run` and the other verbs read them: no answer is more than a wrong number."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from psjob_client.jobs import translate
from psjob_client.jobs.translate import coordinator_facts, finite, shard_view, worker_view
from psjob_client.local import console, record, run, status
from psjob_client.local.faults import FaultRecovery, Faults, parse_faults
from psjob_client.local.monitor import RunWatch, Standstill
from psjob_client.local.status import lateness, shaped
from psjob_operator import keys
from psjob_operator.cluster import node_loss, observe
from psjob_operator.plan.plan import plan
from tests.support.fuzzing import Change, JsonChange, byte_changes, changed_bytes, changed_json, counts, fuzz, json_changes, written
from tests.unit.plan_given import NOW, UID, ended, job, pod, running

KEY = bytes(range(32))
LATE = {"count": 4, "sum": 6.0, "max": 3.0, "buckets": [[0, 1], [1, 2], [3, 4]]}
CHECKPOINT = {"step": 3, "term": 1, "time": 999_000.0, "age": 3.5, "bytes": 1000, "path": "/checkpoints/run-1", "final": False}
STAGE = {
    "index": 0, "name": "front", "desired": 2, "ready": 1, "step": 5, "delay": 0.0, "idle": 0.5, "rssBytes": 1 << 28, "peakBytes": 1 << 29,
    "devicePeakBytes": 1 << 30, "waiting": "gradients of micro-batch 1 of step 5 from worker 2 (stage 1), for 4 s",
}  # fmt: skip
COORDINATOR: dict[str, Any] = {
    "mode": "async", "staleness": LATE, "gap": LATE, "step": 5, "loss": 0.5, "rate": 2.0, "eta": 10.0, "totalSteps": 100,
    "metrics": {"loss": 0.5}, "workers": [{"rank": 0, "clock": 5, "state": "joined", "start": 1, "rewinds": 0, "idle": 0.1, "here": True,
        "passesAgain": 1}],
    "checkpoint": CHECKPOINT, "stages": [STAGE],
    "checkpointProgress": {"doing": "writing", "shards": [{"index": 0, "doing": "writing", "done": 1, "total": 2}], "done": 1, "total": 2},
    "checkpointProblem": None, "waiting": "workers 1 have not pushed step 5", "hung": [{"rank": 0, "start": 1, "seconds": 9.0}],
    "codecs": None, "weightsSha256": None, "failure": None, "transport": "tcp", "nonFinite": None, "dataProblem": None, "diverged": None,
    "drift": None, "buffersDiffer": None,
    "warning": None, "pushBytes": 1, "updatesLost": 0, "stepsLost": 0, "committed": 2,
    "resumed": {"term": 1, "start": 1, "from": 3, "step": 4, "age": 5.0}, "passed": [[3, 999_990.0], [4, 999_995.0]],
}  # fmt: skip
STATUS: dict[str, Any] = {
    "run": UID, "index": 0, "attempt": 1, "term": 1, "pod": "shard-0", "state": "serving",
    "transfer": {"doing": "writing", "done": 1, "total": 2}, "problem": None,
    "counters": {"pushes": 9, "pushBytes": 90, "applied": 8, "dropped": 0, "duplicatesRefused": 0, "fenced": 0,
    "updatesLost": 0, "acknowledged": {"0": 5}, "firstApplied": 999_000.0, "badConnections": 0}, "transports": {"0": "tcp"},
    "memory": {"rssBytes": 1 << 28}, "nonFinite": {"pushes": 1, "worker": 0, "step": 3, "tensor": "w"}, "staleness": LATE, "gap": LATE,
    "coordinator": COORDINATOR,
}  # fmt: skip
MOST = 8 << 20
"""Bytes of memory for one answer here, which is a few KiB: JSON takes some ten times its bytes, and each reader makes its own of it."""
Case = tuple[list[JsonChange], list[Change] | None]


def make(random: Random) -> Case:
    return json_changes(random), byte_changes(random) if random.random() < 0.2 else None


def raw(case: Case) -> bytes:
    body = written(changed_json(STATUS, case[0]))
    return body if case[1] is None else changed_bytes(body, case[1])


class Child:
    """What `Watch` looks at of a process."""

    uid, index, number, created, running, role = "shard-0", 0, 1, 0.0, True, "shard"


@counts(100, 100_000)
def test_the_operator_plans_whatever_shard_0_tells(cases: int) -> None:
    """On its status port while it lives, and in its last words."""
    base = running(job(workers={"progressDeadlineSeconds": 5}, stages=[{"name": "front", "replicas": 2}, {"name": "back", "cut": "x"}]))

    def read(case: Case) -> None:
        body = raw(case)
        told = observe.parse_status(body)
        assert node_loss.joined_shard_0(told, pod("worker", 0)) in (True, False)
        assert observe.nonce_of(body) == ""
        if len(body) % 4:  # to plan takes ten times as long
            return
        last = json.dumps({"status": told, "met": "1:0-1"}) if case[1] is None else body.decode("utf-8", "replace")
        gone = running(job(), shard_0=pod("shard", 0, **ended(0, message=last)))
        for snapshot in (replace(base, progress=told, progress_at=NOW), gone):
            decided = plan(snapshot, NOW)
            assert len(decided.status.model_dump_json(by_alias=True, exclude_none=True)) < 32 << 10

    fuzz(cases, make, read, MOST)


@counts(100, 100_000)
def test_the_client_shows_whatever_shards_tell(cases: int) -> None:
    """As `psjob run` watches its own shards, and as the other verbs show a job."""
    hit = [FaultRecovery(fault, "shard-0", 0, 1.0, 1) for fault in parse_faults(["kill:shard-0@step=1", "kill:worker-0@step=1"], 1, 1)]
    child: Any = Child()

    def read(case: Case) -> None:
        told = status._object(raw(case))
        watch = RunWatch(10.0, KEY)
        watch.hearers.append(Faults(recoveries=[replace(one) for one in hit]).hear)
        watch.hear(child, told)
        watch.ended(child, raw(case).decode("utf-8", "replace"))
        assert watch.step >= -(1 << 1000) and watch.total("applied") is not None and watch.unsaved in (True, False)
        coordinator = watch.coordinator
        record.News().of(told, time.time())
        json.dumps([record.waste(watch), run.last_metrics(coordinator), lateness(watch.told.values())])
        Standstill().see(watch.step, coordinator, 1.0)
        console.progress_words(coordinator, "step"), console.checkpoint_words(coordinator, 1.0, "step")
        for one in (told, shaped(dict(observe.parse_status(raw(case)) or {}))):
            coordinator_facts(status.part(one, "coordinator"), 1.0)
            shard_view(0, "Serving", 1, one)
            for worker in status.part(one, "coordinator").get("workers") or ():
                worker_view(0, "Running", 1, worker, 5)
            translate.history_view([entry for entry in [status.part(one, "coordinator")] if entry])

    fuzz(cases, make, read, MOST)


@pytest.mark.parametrize("said", ["\udcff" * 64, "é" * 64, "", "x"])
def test_a_proof_that_is_no_text_is_not_right(said: str) -> None:
    """aiohttp gives bytes of a header that are no UTF-8 as lone surrogates."""
    assert not keys.same(said, keys.answer(KEY, "a1", "/status", b"{}"))
    assert not observe.is_proven(KEY, "a1", "/status", b"{}", said)


@pytest.mark.parametrize("odd", ["NaN", "Infinity", "-1e999", "1" + "0" * 400, "true", '"5"', "[]", "null"])
def test_a_number_that_is_none_is_nothing(odd: str) -> None:
    told = json.loads(f'{{"step": {odd}}}')
    assert status.numbers(told, "step") == 0 and finite(told["step"]) is None


def test_entries_of_another_shape_are_left_out() -> None:
    odd = {
        "workers": [3, {"rank": 1}],
        "passed": [[1, 2.0], [1], "x", [1, None]],
        "staleness": {"buckets": {"x": 1}},
        "hung": 5,
        "loss": [1],
    }
    assert shaped(odd) == {"workers": [{"rank": 1}], "passed": [[1, 2.0]], "staleness": {"buckets": []}, "hung": [], "loss": [1]}
