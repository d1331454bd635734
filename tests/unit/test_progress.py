"""What shard 0 keeps of a job's numbers over time: bounded, in order, from the beginning to now.

- How many steps a script will make in all is estimated by its epochs and its data.
- What the coordinator tells of an interruption, and of what all shards have counted.
- Answers of a status port, as the operator, `psjob run` and the other verbs read them: no answer is more than a wrong number.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psjob import contract
from psjob.api.data_cursor import Totals
from psjob.protocol.coordinator.report import MOST_ENTRIES, MOST_NAMES, JobProgress, MetricHistory, RecoveryTimer
from psjob.protocol.coordinator.step_times import HALF_SECONDS, JobSettings, StepTimed, StepTimes, advice
from psjob.shard.push_metrics import Counters, JobCounts
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


@given(st.integers(1, 3000), st.floats(0.01, 10.0))
def test_it_spans_all_of_the_time_in_a_bounded_list(steps: int, seconds: float) -> None:
    past = MetricHistory(most=16)
    for step in range(steps):
        past.note(step, {"loss": 1.0}, None, 1000.0 + step * seconds, {"loss": step})
    told = past.told()
    times = [entry["time"] for entry in told]
    assert 1 <= len(told) < 16 and times == sorted(times)
    spacing = max((after - before for before, after in pairwise(times)), default=0.0)
    whole = (steps - 1) * seconds
    assert spacing <= max(2 * whole / 4, 2 * seconds, 2.0), "no hole"
    assert whole - (times[-1] - 1000.0) <= max(whole / 2, seconds, 1.0), "the newest is near the end"


def test_its_answer_fits_what_is_read() -> None:
    past = MetricHistory()
    names = {f"{number:064d}": -1.2345678901234567e-300 for number in range(2 * MOST_NAMES)}
    for step in range(MOST_ENTRIES - 1):
        past.note(10**12 + step, names, -1.2345678901234567e-300, 1.8e9 + 2 * step + 0.123456, dict.fromkeys(names, 10**12 + step))
    assert len(past.told()) == MOST_ENTRIES - 1
    assert len(json.dumps({"entries": past.told()})) < contract.STATUS_BYTES


def test_progress_keeps_what_was_reported() -> None:
    progress = JobProgress()
    for step in range(1, 5):
        progress.report(0, {"loss": 1.0 / step})
        progress.passed(step, 1000.0 + 2 * step)
    assert [(entry["step"], entry["metrics"]["loss"]) for entry in progress.past.told()] == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    assert progress.past.told()[-1]["reported"] == [3], "it was given when three steps had passed"
    progress.report(0, {"accuracy": 0.5})
    progress.report(0, {"loss": 0.1})
    said = progress.status(1010.0)
    assert dict(zip(said["metrics"], said["reported"], strict=True)) == {"accuracy": 4, "loss": 4}


def test_a_numbers_first_value_waits_for_no_second() -> None:
    past = MetricHistory()
    past.note(1, {}, None, 1000.0, {})
    past.note(2, {"loss": 0.5}, None, 1000.01, {"loss": 2})
    past.note(3, {"loss": 0.25}, None, 1000.02, {"loss": 3})
    past.note(4, {"loss": 0.2, "grad_norm": 3.0}, None, 1000.03, {"loss": 4, "grad_norm": 4})
    assert [(entry["step"], entry["metrics"]) for entry in past.told()] == [
        (1, {}),
        (2, {"loss": 0.5}),
        (4, {"loss": 0.2, "grad_norm": 3.0}),
    ]


def test_names_without_end_make_no_entries_without_end() -> None:
    past = MetricHistory()
    for step in range(10_000):
        past.note(step, {f"loss_{step}": 1.0}, None, 1000.0 + step * 1e-6, {f"loss_{step}": step})
    assert len(past.told()) == MOST_NAMES


def made(totals: Totals, epochs: int | None, epoch: int, rounds: int | None, batches: int, every: int = 1, clock: int = 0) -> int:
    """An epoch of which so many batches were taken, with a step after each `every` of them; the clock then."""
    totals.begin_epoch(epochs, epoch, clock)
    totals.begin_pass(rounds, 0)
    for number in range(1, batches + 1):
        totals.give()
        clock += number % every == 0
    return clock


@pytest.mark.parametrize(("every", "total"), [(1, 1000), (4, 250)])
@pytest.mark.parametrize("batches", [20, 52, 100])
def test_the_first_epoch_is_estimated_by_its_data(every: int, total: int, batches: int) -> None:
    totals = Totals()
    clock = made(totals, 10, 0, 100, batches, every)
    assert totals.total(clock) == pytest.approx(total, rel=0.05)


def test_later_epochs_are_as_long_as_the_one_before() -> None:
    totals = Totals()
    clock = made(totals, 10, 0, None, 73)
    assert totals.total(clock) is None, "a pass without a length says nothing"
    totals.begin_epoch(10, 1, clock)
    assert totals.total(clock) == 730


def test_a_restart_in_the_middle_counts_what_was_before() -> None:
    totals = Totals()
    totals.begin_epoch(5, 2, 260)  # 130 steps an epoch, of which this one made 0 and continues at batch 40, clock 300
    totals = Totals()
    totals.begin_epoch(5, 2, 300)
    totals.begin_pass(130, 40)
    for _ in range(10):
        totals.give()
    assert totals.total(310) == 260 + 3 * 130
    totals.begin_epoch(5, 3, 390)
    assert totals.total(390) is None, "the epoch before was not seen whole"


@pytest.mark.parametrize("epochs", [None, 0])
def test_a_loop_without_an_end_has_no_total(epochs: int | None) -> None:
    totals = Totals()
    assert totals.total(0) is None
    assert totals.total(made(totals, epochs, 0, 100, 50)) is None


def test_it_is_told_when_it_has_changed() -> None:
    totals = Totals()
    clock = made(totals, 10, 0, 100, 10)
    assert totals.news(clock) == 1000
    assert totals.news(clock) is None
    totals.give()
    assert totals.news(clock + 1) is None, "the same number"
    totals.begin_epoch(10, 1, 101)
    assert totals.news(101) == 1010, "at an epoch's beginning it is known"


def test_what_the_script_tells_counts() -> None:
    totals = Totals()
    clock = made(totals, 10, 0, 100, 10)
    totals.by_script = True
    assert totals.news(clock) is None


def first(comeback: RecoveryTimer) -> tuple[int, int, int, int, float] | None:
    told = comeback.told(100.0)["resumed"]
    return None if told is None else (told["term"], told["start"], told["from"], told["step"], told["age"])


def test_the_first_step_of_a_job_is_told_and_undoes_nothing() -> None:
    comeback = RecoveryTimer()
    assert first(comeback) is None
    comeback.interrupted(0)
    comeback.passed(1, term=1, start=1, wall=90.0)
    comeback.passed(2, term=1, start=1, wall=95.0)
    assert first(comeback) == (1, 1, 0, 1, 10.0) and comeback.steps_lost == 0


def test_steps_undone_count_once_all_have_passed_a_step_again() -> None:
    comeback = RecoveryTimer()
    comeback.passed(1, 1, 1, 10.0)
    comeback.undone(150, 100)
    assert comeback.steps_lost == 0
    comeback.interrupted(100)
    comeback.passed(100, 2, 1, 19.0)  # nothing new: where the checkpoint was
    assert comeback.steps_lost == 0 and first(comeback) == (1, 1, 0, 1, 90.0)
    comeback.passed(101, 2, 1, 20.0)
    assert comeback.steps_lost == 50 and first(comeback) == (2, 1, 100, 101, 80.0)


def test_a_new_coordinator_learns_from_workers_how_far_they_were() -> None:
    comeback = RecoveryTimer()
    comeback.undone(0, 100)
    comeback.heard(149)
    comeback.heard(150)
    comeback.undone(100, 100)
    comeback.passed(101, 2, 1, 20.0)
    assert comeback.steps_lost == 50
    comeback.heard(400)  # a stream that breaks while training continues
    comeback.interrupted(300)
    comeback.passed(301, 2, 2, 30.0)
    assert comeback.steps_lost == 50 and first(comeback) == (2, 2, 300, 301, 70.0)


def test_a_second_loss_before_the_first_step_belongs_to_the_same_interruption() -> None:
    comeback = RecoveryTimer()
    comeback.passed(1, 1, 1, 1.0)
    comeback.undone(150, 100)
    comeback.undone(100, 50)
    comeback.passed(51, 3, 1, 9.0)
    assert comeback.steps_lost == 100


def test_counts_of_all_shards_are_summed_over_their_attempts() -> None:
    counts = JobCounts()
    counts.heard(0, Counters(bytes=10).word(1))
    counts.heard(1, Counters(bytes=5, lost=1).word(1))
    counts.heard(1, Counters(bytes=7, lost=1).word(1))
    assert counts.told() == {"pushBytes": 17, "updatesLost": 1}
    counts.heard(1, Counters(bytes=2, lost=3).word(2))
    counts.heard(1, Counters(bytes=70, lost=70).word(1))  # one that was cut off
    assert counts.told() == {"pushBytes": 19, "updatesLost": 4}


@pytest.mark.parametrize("body", [{}, {"attempt": 1}, {"attempt": 1, "pushBytes": "x", "updatesLost": 0}, {"attempt": 1, "pushBytes": 3}])
def test_what_is_no_count_is_refused(body: dict[str, object]) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        JobCounts().heard(1, body)


def test_counts_that_fall_are_refused() -> None:
    counts = JobCounts()
    counts.heard(1, Counters(bytes=9).word(1))
    with pytest.raises(ValueError, match="never fall"):
        counts.heard(1, Counters(bytes=8).word(1))


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


def timed(parts: Sequence[float], steps: Any = 1) -> StepTimed | None:
    return StepTimed.of(1, {"parts": list(parts), "steps": steps})


@pytest.mark.parametrize(
    "body",
    [
        {}, {"parts": [1.0] * 7}, {"parts": [1.0] * 6, "steps": 1}, {"parts": [1.0] * 8, "steps": 1}, {"parts": 7, "steps": 1},
        {"parts": [1.0] * 7, "steps": 0}, {"parts": [1.0] * 7, "steps": True}, {"parts": [1.0] * 7, "steps": 1.5},
        {"parts": [*[1.0] * 6, "1"], "steps": 1}, {"parts": [*[1.0] * 6, math.inf], "steps": 1},
        {"parts": [*[1.0] * 6, math.nan], "steps": 1}, {"parts": [*[1.0] * 6, -5.0], "steps": 1},
    ],
)  # fmt: skip
def test_what_nobody_can_have_measured_is_not_believed(body: dict[str, Any]) -> None:
    assert StepTimed.of(1, body) is None


def test_the_parts_of_a_step_are_the_mean_of_all_workers_and_mostly_of_the_last_minute() -> None:
    times = StepTimes()
    assert times.mean() is None and not times.settled()
    for rank, seconds in enumerate((1.0, 3.0)):
        told = timed([seconds, *[0.0] * 5, -1e-9], 2)
        assert told is not None
        times.came(rank, (1, 0), told, 100.0)
    assert times.mean() == dict.fromkeys(contract.STEP_PARTS, 0.0) | {"compute": 1.0}
    faster = timed([0.5, *[0.0] * 6], 2)
    assert faster is not None
    times.came(1, (1, 0), faster, 100.0 + HALF_SECONDS)
    mean = times.mean()
    assert mean is not None and mean["compute"] == pytest.approx((0.5 + (1.5 + 0.5) / (1 + 2)) / 2), "what is old counts half"
    times.came(1, (2, 0), faster, 100.0 + HALF_SECONDS)
    mean = times.mean()
    assert mean is not None and mean["compute"] == pytest.approx((0.5 + 0.25) / 2), "another process begins anew"
    assert not times.settled()
    for rank in range(2):
        long = timed([5.0, *[0.0] * 6], 5)
        assert long is not None
        times.came(rank, (2, 0), long, 121.0)
    assert times.settled()


def parts_of(**seconds: float) -> dict[str, float]:
    return dict.fromkeys(contract.STEP_PARTS, 0.001) | seconds


SLOW: dict[str, tuple[dict[str, float], JobSettings, tuple[str, ...]]] = {
    "a slow link": (
        parts_of(wire=0.1),
        JobSettings(workers=2),
        ("for the wire for 100 ms", "push: bf16", "larger batch", "Colocated"),
    ),
    "with compute to hide it": (parts_of(compute=0.08, wire=0.1), JobSettings(), ("overlap=True", "delay: 1", "push: bf16")),
    "with bf16 already": (parts_of(wire=0.1), JobSettings(workers=2, push="bf16"), ("larger batch", "Colocated", "mode: local")),
    "in shared memory": (parts_of(wire=0.1), JobSettings(workers=2, shared=True), ("larger batch", "mode: local")),
    "a slow worker": (parts_of(others=0.1), JobSettings(workers=3), ("other workers", "backupWorkers: 1", "mode: bounded", "mode: async")),
    "in bounded": (parts_of(compute=0.09, others=0.1), JobSettings("bounded", workers=3), ("mode: async", "delay: 1")),
    "with backup workers": (parts_of(others=0.1), JobSettings("backup", workers=3), ("larger batch",)),
    "a long update": (parts_of(update=0.1), JobSettings(), ("wait for the update", "more shards", "larger batch")),
    "copies": (parts_of(copyOut=0.1), JobSettings(shared=True), ("copy gradients out", "larger batch", "mode: local")),
    "of stages": (parts_of(others=0.1), JobSettings(workers=3, stages=True), ("larger batch",)),
    "records": (parts_of(psjob=0.1), JobSettings(), ("records and checks", "periodSeconds")),
}


@pytest.mark.parametrize("case", SLOW)
def test_who_waits_for_more_than_half_of_its_time_is_told_what_helps(case: str) -> None:
    parts, job, words = SLOW[case]
    said = advice(parts, job)
    assert said is not None and [word for word in words if word not in said] == [], said
    assert said.count(";") <= 2 and "\n" not in said
    assert advice(parts | {"compute": sum(parts.values())}, job) is None


def test_nothing_is_said_of_no_time() -> None:
    assert advice(dict.fromkeys(contract.STEP_PARTS, 0.0), JobSettings()) is None
    assert advice(parts_of(compute=0.5), JobSettings()) is None


def test_a_remedy_that_the_job_has_already_is_not_named() -> None:
    for settings in (JobSettings(push="bf16"), JobSettings(shared=True)):
        assert "push: bf16" not in (advice(parts_of(wire=0.1), settings) or "")
    said = advice(parts_of(others=0.1), JobSettings("async", workers=3)) or ""
    assert "mode: async" not in said and "backupWorkers" not in said
