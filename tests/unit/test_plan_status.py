"""Status: what it says in each situation, when it is written, and that a decision repeated changes nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob_operator.api.status import (
    Condition,
    JobStatus,
    condition_reason,
    index_set,
    index_text,
    named_indexes,
    short,
    stamp,
    starts_map,
    starts_text,
    unix,
)
from psjob_operator.plan.job_state import JobState, checkpoint_unanswered
from psjob_operator.plan.observed_state import Exit, ObservedState, Process
from psjob_operator.plan.plan import plan
from psjob_operator.plan.status import wake_at
from tests.simulation.world import check_transition
from tests.unit.plan_given import NOW, after, ended, job, names, pod, running, said, stands, with_internal


def told(step: int = 9, **coordinator: Any) -> dict[str, Any]:
    """What shard 0 says."""
    checkpoint = {"step": 5, "term": 1, "time": NOW - 30, "bytes": 10, "path": "run-1", "final": False}
    return {"run": "run-1", "coordinator": {"step": step, "loss": 0.5, "rate": 2.0, "eta": None, "checkpoint": checkpoint, **coordinator}}


# ---- the table of conditions -----------------------------------------------------------------------------------------------------


def test_starting_running_recovering() -> None:
    first = plan(job(), NOW)
    assert stands(first.status) == {"Ready": "False", "Reconciling": "True"} and said(first.status)["Ready"].reason == "Starting"
    up = running()
    assert up.status is not None
    assert stands(up.status) == {"Ready": "True"} and up.status.phase == "Running"
    assert (up.status.shards_ready, up.status.workers_ready) == ("2/2", "3/3")
    assert {shard.state for shard in up.status.shards} == {"Serving"}
    lost = running(shard_1=pod("shard", 1, **ended(137, "OOMKilled")))
    decided = plan(lost, NOW)
    assert stands(decided.status) == {"Ready": "False", "Reconciling": "True"} and decided.status.phase == "Recovering"
    assert said(decided.status)["Ready"].message == (
        "shard 1 is restored from the last checkpoint (OOMKilled);"
        " container shard: exit code 137 (OOMKilled); failures: 1, spec.runPolicy.backoffLimit: 6"
    )
    restoring = replace(lost, status=decided.status, processes=(*lost.processes, pod("shard", 1, 2, ready=False)))
    second = plan(restoring, NOW + 20)
    assert said(second.status)["Ready"].message == said(decided.status)["Ready"].message, "it is told until it is over"
    assert second.status.shards[1].state == "Starting"
    third = plan(replace(restoring, processes=(*lost.processes, pod("shard", 1, 2))), NOW + 30)
    assert third.status.phase == "Running" and [event.reason for event in third.events] == []


def test_a_condition_keeps_its_time_while_its_status_does() -> None:
    up = running()
    assert up.status is not None
    since = said(up.status)["Ready"].last_transition_time
    crashing = plan(replace(up, processes=(*up.processes[:-1], pod("worker", 2, sidecar_crash="x: y"))), NOW)
    assert said(crashing.status)["Ready"].last_transition_time == since
    lost = plan(replace(up, processes=(*up.processes[:-1], pod("worker", 2, **ended(1)))), NOW)
    assert said(lost.status)["Ready"].last_transition_time == stamp(NOW)


def test_a_new_generation_is_answered_at_once() -> None:
    status = plan(replace(running(), generation=7, written_at=NOW - 1), NOW).status
    assert status.observed_generation == 7
    assert {condition.observed_generation for condition in status.conditions} == {7}


# ---- when it is written ------------------------------------------------------------------------------------------------------------


def test_nothing_new_writes_nothing() -> None:
    up = running()
    for later in (0, 30, 1e5):
        decided = plan(up, NOW + later)
        assert decided.status == up.status and not decided.actions and not decided.intent and not decided.events


def test_progress_is_written_once_a_minute() -> None:
    up = replace(running(), progress=told(9), progress_at=NOW)
    first = plan(up, NOW)
    assert first.status.progress is not None and first.status.progress.step == 9
    assert first.status.checkpoint is not None and first.status.checkpoint.step == 5
    assert said(first.status)["CheckpointReady"].status == "True"
    moved = replace(up, status=first.status, progress=told(20), progress_at=NOW + 30, written_at=NOW)
    second = plan(moved, NOW + 30)
    assert second.status == first.status and second.wake_at == NOW + 60
    third = plan(replace(moved, progress_at=NOW + 60), NOW + 60)
    assert third.status.progress is not None and third.status.progress.step == 20
    still = replace(moved, status=third.status, progress_at=NOW + 400)
    assert plan(still, NOW + 400).status == third.status, "a job that stands still writes nothing"


def test_an_answered_numberis_written_at_once_and_kept() -> None:
    def answers(request: Any, step: int = 5) -> dict[str, Any]:
        checkpoint = {"step": step, "term": 1, "time": NOW - 30, "bytes": 10, "path": "run-1", "final": False}
        return told(9, checkpoint={**checkpoint, "observedRequest": request})

    up = replace(running(), progress=answers(None), progress_at=NOW)
    status = plan(up, NOW).status
    assert status.checkpoint is not None and status.checkpoint.observed_request is None
    for request, step in ((7, 8), (9, 8), (3, 12)):
        moved = replace(up, status=status, progress=answers(request, step), progress_at=NOW + 2, written_at=NOW + 1)
        status = plan(moved, NOW + 2).status
        assert status.checkpoint is not None
        assert (status.checkpoint.observed_request, status.checkpoint.step) == (request, step), "not a minute later"
    away = plan(replace(up, status=status, progress=None), NOW + 100).status
    assert away.checkpoint is not None and away.checkpoint.observed_request == 3, "shard 0 is out of reach"
    for strange in ("9", -1, True, 2**60, 1.5, [], float("nan")):
        found = plan(replace(up, status=status, progress=answers(strange, 20), progress_at=NOW + 99), NOW + 99).status.checkpoint
        assert found is not None and (found.step, found.observed_request) == (20, None)


@pytest.mark.parametrize(
    ("number", "kept", "asks"),
    [
        (None, {"observedRequest": None}, False),
        (7, {"observedRequest": None}, True),
        (7, {"observedRequest": 6}, True),
        (7, {"observedRequest": 7}, False),
        (3, {"observedRequest": 7}, True),
        (7, {"step": 3}, False),
        (7, None, False),
        (7, "strange", False),
    ],
)
def test_while_a_numberis_open_shard_0_is_asked_soon(number: int | None, kept: Any, asks: bool) -> None:
    assert checkpoint_unanswered(told(checkpoint=kept), number) is asks
    for nothing in (None, {}, {"coordinator": "strange"}):
        assert not checkpoint_unanswered(nothing, number)


def test_progress_rides_along_with_any_other_write() -> None:
    up = replace(running(), progress=told(9), progress_at=NOW)
    moved = replace(up, status=plan(up, NOW).status, progress=told(20), progress_at=NOW + 5)
    lost = plan(replace(moved, processes=(*moved.processes[:-1], pod("worker", 2, **ended(1)))), NOW + 5)
    assert lost.status.progress is not None and lost.status.progress.step == 20


def test_out_of_reach_keeps_what_was_told() -> None:
    up = replace(running(), progress=told(9), progress_at=NOW)
    status = plan(up, NOW).status
    for strange in (None, {}, {"run": "other", "coordinator": {"step": 99}}, {"run": "run-1", "coordinator": "x"}):
        assert plan(replace(up, status=status, progress=strange), NOW + 100).status == status


def test_the_last_words_of_shard_0_are_the_final_progress() -> None:
    words = {"status": {"attempt": 1, "coordinator": told(150)["coordinator"]}}
    over = {f"worker_{index}": pod("worker", index, **ended(0)) for index in range(3)} | {"shard_1": pod("shard", 1, **ended(0))}
    done = running(**over, shard_0=pod("shard", 0, **ended(0, message=json.dumps(words))))
    decided = plan(replace(done, progress=told(140), progress_at=NOW - 50), NOW)
    assert decided.status.phase == "Complete"
    assert decided.status.progress is not None and decided.status.progress.step == 150
    crashed = plan(running(shard_0=pod("shard", 0, **ended(1, message=json.dumps(words), log_tail="boom"))), NOW)
    assert "boom" in said(crashed.status)["Ready"].message and "coordinator" not in said(crashed.status)["Ready"].message


def test_last_words_count_though_the_pod_was_removed_before_anybody_looked() -> None:
    """A suspension: shard 0 makes a last checkpoint, ends, and its pod goes within one turn; nothing was pulled before."""
    words = json.dumps({"status": {"attempt": 1, "coordinator": told(150)["coordinator"]}})
    gone = pod("shard", 0, **ended(75, message=words), deleting=NOW - 1)
    ending = replace(running(job(suspend=True)), processes=(), farewell=gone)
    decided = plan(ending, NOW)
    assert decided.status.phase == "Suspended" and decided.status.checkpoint is not None
    assert decided.status.progress is not None and decided.status.progress.step == 150
    older = plan(replace(ending, progress={**told(140), "attempt": 1}, progress_at=NOW - 9), NOW)
    assert older.status.progress is not None and older.status.progress.step == 150, "words of the end are newer than those of the same pod"
    newer = plan(replace(ending, progress={**told(160), "attempt": 2}, progress_at=NOW - 9), NOW)
    assert newer.status.progress is not None and newer.status.progress.step == 160
    other = plan(replace(ending, farewell=replace(gone, run="run-0")), NOW)
    assert other.status.checkpoint is None, "words of another run of that name"


@pytest.mark.parametrize("value", [None, "9", -1, True, 2**60, 1.5, [], float("nan")])
def test_progress_is_parsed_with_suspicion(value: Any) -> None:
    decided = plan(replace(running(), progress=told(value)), NOW)
    assert decided.status.progress is None
    odd = told(3, loss=float("nan"), rate=float("inf"), eta="soon", checkpoint={"step": value, "time": value})
    progress = plan(replace(running(), progress=odd), NOW).status.progress
    assert progress is not None and (progress.loss, progress.steps_per_second, progress.eta_seconds) == (None, None, None)


def test_a_problem_of_checkpoints_is_told() -> None:
    decided = plan(replace(running(), progress=told(checkpointProblem="disk full:\n 0 bytes left")), NOW)
    assert said(decided.status)["CheckpointReady"].message == "disk full: 0 bytes left"


def test_who_is_waited_for_is_told_once_a_minute() -> None:
    up = replace(running(), progress=told(9), progress_at=NOW)
    up = replace(up, status=plan(up, NOW).status)
    waiting = [replace(up, progress=told(9, waiting=f"worker 2, block 7, for {n} s"), progress_at=NOW + n) for n in (10, 61)]
    assert plan(waiting[0], NOW + 10).status == up.status
    ready = said(plan(waiting[1], NOW + 61).status)["Ready"]
    assert (ready.status, ready.reason) == ("True", "WaitingForMember") and "61 s" in ready.message


@pytest.mark.parametrize(
    ("key", "reason", "warning"),
    [
        ("warning", "LearningRateHigh", "lr 0.6 is 2.8 times the 0.213 that gradients 13 updates old tolerate"),
        ("nonFinite", "NonFiniteGradients", "worker 3's gradient of 1.weight held NaN or inf at step 7 and was applied"),
        ("largePush", "LargePushes", "worker 3's push of block 0 at step 7 is beyond training.maxPushNorm 10"),
        ("drift", "WorkersDiffer", "weights differ after step 16: parameter a of worker 1 is not that of worker 0"),
        ("buffersDiffer", "BuffersDiffer", "buffers differ after step 16: buffer a of worker 1 and of worker 0"),
    ],
)
def test_what_is_wrong_with_the_numbers_is_told_and_stays_told_out_of_reach(key: str, reason: str, warning: str) -> None:
    up = plan(replace(running(), progress=told(9, **{key: warning}), progress_at=NOW), NOW).status
    ready = said(up)["Ready"]
    assert (ready.status, ready.reason, ready.message) == ("True", reason, warning)
    silent = plan(replace(running(), status=up, progress=None), NOW + 90)
    assert said(silent.status)["Ready"] == ready


OF_TRAINING = {
    "warning": "LearningRateHigh",
    "nonFinite": "NonFiniteGradients",
    "largePush": "LargePushes",
    "diverged": "Diverged",
    "drift": "WorkersDiffer",
    "dataProblem": "DataNotSharded",
    "buffersDiffer": "BuffersDiffer",
}


def roles(snapshot: ObservedState, now: float = NOW) -> dict[str, tuple[int, ...]]:
    told_of = plan(snapshot, now).status.roles
    return {it.name: (it.desired, it.active, it.ready, it.succeeded, it.failed) for it in told_of or ()}


def test_processes_are_counted_in_integers() -> None:
    assert roles(job()) == {"shard": (2, 0, 0, 0, 0), "worker": (3, 0, 0, 0, 0)}
    assert roles(running()) == {"shard": (2, 2, 2, 0, 0), "worker": (3, 3, 3, 0, 0)}
    waiting = pod("worker", 2, phase="Pending", started=None, ready=False)
    mixed = running(shard_1=pod("shard", 1, ready=False), worker_1=pod("worker", 1, **ended(0)), worker_2=waiting)
    assert roles(mixed) == {"shard": (2, 2, 1, 0, 0), "worker": (3, 2, 1, 1, 0)}
    over = {f"{role}_{i}": pod(role, i, **ended(0)) for role, many in (("shard", 2), ("worker", 3)) for i in range(many)}
    assert roles(running(**over)) == {"shard": (2, 0, 0, 2, 0), "worker": (3, 0, 0, 3, 0)}
    no_more = running(job(runPolicy={"backoffLimit": 0}), worker_1=pod("worker", 1, **ended(1)))
    assert plan(no_more, NOW).status.phase == "Failed" and roles(no_more)["worker"] == (3, 2, 2, 0, 1)


def test_no_warning_hides_another() -> None:
    all_of_it = {key: f"words of {key}" for key in OF_TRAINING}
    up = plan(replace(running(), progress=told(9, **all_of_it), progress_at=NOW), NOW).status
    for key, kind in OF_TRAINING.items():
        one = said(up)[kind]
        assert (one.status, one.reason, one.message) == ("True", kind, f"words of {key}")
    assert said(up)["Ready"].reason == "LearningRateHigh", "the first, for people"
    some = plan(replace(running(), status=up, progress=told(19, drift="others"), progress_at=NOW + 60), NOW + 90).status
    assert {kind for kind in OF_TRAINING.values() if said(some)[kind].status == "True"} == {"WorkersDiffer"}
    assert said(some)["Diverged"].reason == "Cleared" and said(some)["WorkersDiffer"].message == "others"


def test_a_job_that_was_never_warned_of_has_none_of_these() -> None:
    assert not {*OF_TRAINING.values(), "Degraded", "Suspended"} & said(plan(running(), NOW).status).keys()


def test_what_is_wrong_beside_training_degrades_the_job_until_it_is_over() -> None:
    crash = pod("worker", 1, sidecar_crash="logger restarts")
    up = replace(running(worker_1=crash), progress=told(9, waiting="worker 2, block 7", drift="apart"), progress_at=NOW)
    up = replace(up, progress_problem="shard 0 does not take this key")
    status = plan(up, NOW).status
    degraded = said(status)["Degraded"]
    assert (degraded.status, degraded.reason) == ("True", "SidecarCrashing")
    assert degraded.message == "worker 1: sidecar logger restarts; worker 2, block 7; shard 0 does not take this key"
    assert said(status)["WorkersDiffer"].status == "True"
    over = plan(replace(running(), status=status, progress=told(29), progress_at=NOW + 60), NOW + 90).status
    assert (said(over)["Degraded"].status, said(over)["Degraded"].reason) == ("False", "Cleared")
    lost = plan(replace(running(shard_1=None), status=status), NOW + 90).status
    assert lost.phase == "Recovering" and said(lost)["Degraded"].status == "False", "Ready says what is wrong then"


def test_counters_and_words_are_spaced_facts_are_not() -> None:
    starting = plan(job(), NOW)
    some = tuple(pod(role, index) for role, index in (("shard", 0), ("worker", 1)))
    half = job(status=starting.status, processes=some, granted=frozenset(names(starting)) - {it.name for it in some}, written_at=NOW)
    early = plan(half, NOW + 1)
    assert early.status == starting.status and early.wake_at == NOW + 10
    assert plan(half, NOW + 10).status.workers_ready == "1/3"
    assert plan(replace(half, written_at=None), NOW + 1).status.workers_ready == "1/3"
    full = pod("worker", 2, phase="Pending", started=None, ready=False, scheduled=None, unschedulable="0/2 nodes")
    stuck = running(worker_2=full)
    first = plan(stuck, NOW)
    said_again = replace(full, unschedulable="0/3 nodes")
    more = replace(stuck, status=first.status, processes=(*stuck.processes[:-1], said_again), written_at=NOW)
    assert plan(more, NOW + 59).status == first.status and plan(more, NOW + 59).wake_at == NOW + 60
    assert "0/3" in said(plan(more, NOW + 60).status)["Ready"].message


def test_a_job_that_just_came_up_is_not_said_to_wait() -> None:
    up = replace(running(), progress=told(0, waiting="worker 0 has not attached its model, for 2 s"))
    assert said(plan(up, NOW - 35).status)["Ready"].reason == "Running"
    assert said(plan(up, NOW - 30).status)["Ready"].reason == "WaitingForMember"


def test_progress_is_pulled_while_shard_0_serves() -> None:
    assert plan(running(), NOW).want_progress
    young = plan(running(), NOW - 45)
    assert not young.want_progress and young.wake_at == NOW - 40, "workers are just attaching"
    full = pod("worker", 2, phase="Pending", started=None, ready=False, scheduled=None, unschedulable="0/2 nodes")
    first = plan(job(), NOW - 100)
    part = job(status=first.status, processes=(*running().processes[:-1], full))
    assert not plan(part, NOW - 41).want_progress and plan(part, NOW).want_progress, "the others may train without it"
    assert not plan(running(shard_0=pod("shard", 0, ready=False)), NOW).want_progress
    assert plan(replace(running(), progress_at=NOW - 20), NOW).wake_at == NOW + 40


# ---- size --------------------------------------------------------------------------------------------------------------------------


def test_a_large_job_stays_small_in_status_and_quick() -> None:
    large = job(shards={"replicas": 256}, workers={"replicas": 4000, "template": job().spec.workers.template})
    first = plan(large, NOW)
    assert len(names(first)) == 4256
    pods = [pod("shard", i) for i in range(256)]
    pods += [pod("worker", i, **(ended(1) if i % 2 else {})) for i in range(4000)]
    limit = large.spec.run_policy.model_copy(update={"backoff_limit": 5000})
    crashed = replace(large, spec=large.spec.model_copy(update={"run_policy": limit}), status=first.status, processes=tuple(pods))
    decided = plan(crashed, NOW)
    assert len(names(decided)) == 2000 and len(decided.status.workers.problems) <= 8
    assert len(decided.status.model_dump_json(by_alias=True, exclude_none=True)) < 32 * 1024


# ---- properties --------------------------------------------------------------------------------------------------------------------

exits = st.none() | st.builds(
    Exit,
    st.sampled_from([0, 1, 75, 76, 77, 78, 137]),
    reason=st.sampled_from(["", "Error", "OOMKilled"]),
    message=st.sampled_from(["", '{"fenced": {"term": 12}}', '{"error": "no"}', "x" * 3000]),
)
words = st.sampled_from(["", "Evicted", "OutOfmemory", "ErrImagePull", "EvictionByEvictionAPI", "strange words"])


@st.composite
def processes(draw: st.DrawFn) -> tuple[Process, ...]:
    made = {}
    for role, index, number in draw(
        st.lists(st.tuples(st.sampled_from(["shard", "worker"]), st.integers(0, 3), st.integers(1, 4)), max_size=12)
    ):
        exit = draw(exits)
        pending = draw(st.booleans())
        phase = "Pending" if pending else "Running"
        if exit is not None:
            phase = "Failed" if exit.code else "Succeeded"
        made[role, index, number] = pod(
            role,
            index,
            number,
            exit=exit,
            phase=phase,
            started=None if pending and exit is None else NOW - 80,
            ready=draw(st.booleans()),
            deleting=draw(st.none() | st.just(NOW)),
            node_lost=draw(st.booleans()),
            run=draw(st.sampled_from(["run-1", "run-1", "run-1", "another"])),
            pod_reason=draw(words),
            waiting_reason=draw(words),
            unschedulable=draw(words),
        )
    return tuple(made.values())


BEGUN = [None, JobStatus(), plan(job(), NOW - 100).status, running().status]


@st.composite
def snapshots(draw: st.DrawFn) -> ObservedState:
    base = job(checkpoint={"disabled": draw(st.booleans())}, runPolicy={"backoffLimit": draw(st.sampled_from([0, 3, 100]))})
    status = draw(st.sampled_from(BEGUN))
    if status is not None and draw(st.booleans()):
        status = with_internal(status, term=5).model_copy(update={"run": draw(st.sampled_from(["run-1", "another", None]))})
    suspend = draw(st.sampled_from([None, True, False]))
    return replace(
        base,
        spec=base.spec.model_copy(update={"suspend": suspend}),
        status=status,
        processes=draw(processes()),
        live=draw(st.booleans()),
        progress=draw(st.sampled_from([None, told()])),
        granted=draw(st.sampled_from([frozenset(), frozenset(["job-shard-0-a1", "job-worker-2-r1", "elsewhere-shard-0-a1"])])),
    )


def test_a_time_that_has_come_wakes_nobody() -> None:
    facts = JobState.of(running(), NOW)
    later = wake_at(facts, running().status or JobStatus())
    assert wake_at(facts, running().status or JobStatus(), NOW, NOW - 1, None) == later
    assert wake_at(facts, running().status or JobStatus(), NOW, NOW + 0.5) == NOW + 0.5


@settings(max_examples=60)
@given(snapshots())
def test_a_decision_is_monotone_and_repeated_changes_nothing(snapshot: ObservedState) -> None:
    decided = plan(snapshot, NOW)
    if decided.needs_live:
        assert not snapshot.live and not decided.actions and decided.status == (snapshot.status or JobStatus())
        return
    check_transition(snapshot.status, decided.status)
    assert len(names(decided)) == len(set(names(decided)))
    assert decided.wake_at is None or decided.wake_at > NOW
    assert JobStatus.model_validate(decided.status.to_manifest()) == decided.status
    again = after(replace(snapshot, live=True), decided)
    assert again.status == decided.status, "the plan's own status yields no write"
    assert decided.status.phase in ("Complete", "Failed") or not again.intent


@given(st.sets(st.integers(0, 300)))
def test_indexes_go_round(which: set[int]) -> None:
    assert index_set(index_text(which), 301) == which


@pytest.mark.parametrize(
    ("text", "which"), [("", set()), ("0-2,5", {0, 1, 2, 5}), ("x,3", {3}), ("5-1,-2,1-", {1}), ("0-99999999999", set(range(9)))]
)
def test_indexes_are_read_leniently(text: str, which: set[int]) -> None:
    assert index_set(text, 9) == which


@given(st.dictionaries(st.integers(0, 50), st.integers(1, 4)))
def test_pending_starts_go_round(which: dict[int, int]) -> None:
    assert starts_map(starts_text(which), 51, 4) == which


def test_pending_starts_are_read_leniently() -> None:
    assert starts_map("x 1 2: 0:1 3:0-1,9 9:0 2:1", 5, 4) == {0: 3, 1: 3}


def test_words() -> None:
    assert short("a\n  b") == "a b" and len(short("x" * 900)) == 256 and short("y" * 500 + "end").endswith("end")
    assert named_indexes("shard", [1]) == "shard 1" and named_indexes("worker", [0, 1, 4]) == "workers 0-1,4"
    assert condition_reason("ErrImagePull") == "ErrImagePull" and condition_reason("two words") == "Waiting"
    assert unix(stamp(NOW + 0.9)) == NOW and unix(None) is None and unix("yesterday") is None


@pytest.mark.parametrize(
    ("words", "age", "says"),
    [("", None, ""), ("now", None, "now"), ("now", 60, "before"), ("", 60, "before"), ("", 3600, ""), ("now", 3600, "before")],
)
def test_a_contest_is_told_in_words_that_two_operators_do_not_write_in_turns(words: str, age: float | None, says: str) -> None:
    snapshot = running()
    assert snapshot.status is not None
    if age is not None:
        kept = Condition(
            type="Contended",
            status="True",
            reason="OtherWriter",
            message="before",
            last_transition_time=stamp(NOW - age),
            observed_generation=1,
        )
        snapshot = replace(snapshot, status=snapshot.status.model_copy(update={"conditions": (*snapshot.status.conditions, kept)}))
    decided = plan(replace(snapshot, contended=words), NOW)
    told = said(decided.status).get("Contended")
    assert (told.message if told else "") == says
    assert [event.reason for event in decided.events] == (["Contended"] if words and age is None else [])
