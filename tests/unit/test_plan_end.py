"""How jobs end, are cleaned up, and are suspended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psjob_operator.api.status import JobStatus, stamp, unix
from psjob_operator.plan.actions import DeleteJob, DeleteProcess
from psjob_operator.plan.observed_state import Objects, ObservedState, Process
from psjob_operator.plan.plan import plan
from tests.unit.plan_given import NOW, after, deleted, ended, job, names, pod, running, said, stands, with_internal

OVER = {
    "shard_0": pod("shard", 0, **ended(0)),
    "shard_1": pod("shard", 1, **ended(0)),
    "worker_0": pod("worker", 0, **ended(0)),
    "worker_1": pod("worker", 1, **ended(0)),
    "worker_2": pod("worker", 2, **ended(0)),
}


# ---- the end -----------------------------------------------------------------------------------------------------------------------


def test_complete_when_all_shards_and_the_workers_ended_well() -> None:
    decided = plan(running(**OVER), NOW)
    assert decided.intent and decided.status.phase == "Complete"
    assert stands(decided.status) == {"Ready": "True", "Complete": "True"}
    assert decided.status.completion_time == stamp(NOW)
    assert decided.status.workers.succeeded_indexes == "0-2"
    assert decided.status.shards_ready == "2/2" and decided.status.workers_ready == "3/3"
    assert [event.reason for event in decided.events] == ["Completed"]


@pytest.mark.parametrize(("key", "reason"), [("diverged", "Diverged"), ("drift", "WorkersDiffer")])
def test_a_job_that_ends_with_weights_of_no_use_says_so(key: str, reason: str) -> None:
    heard = {"run": "run-1", "coordinator": {"step": 9, key: "this and that"}}
    decided = plan(replace(running(**OVER), progress=heard), NOW)
    complete = said(decided.status)["Complete"]
    assert (decided.status.phase, complete.status, complete.reason) == ("Complete", "True", reason)
    assert complete.message.endswith("this and that") and [event.reason for event in decided.events] == [reason]
    before = plan(replace(running(), progress=heard), NOW).status
    kept = said(plan(replace(running(**OVER), status=before), NOW).status)["Complete"]
    assert kept.reason == reason and kept.message.endswith("this and that"), "shard 0 says nothing any more"
    ended_so = plan(replace(running(**OVER), status=before), NOW).status
    assert stands(ended_so) == {"Ready": "True", "Complete": "True", reason: "True"}, "a program that reads no reason sees it too"


def test_not_complete_before_the_last_shard() -> None:
    decided = plan(running(**{**OVER, "shard_1": pod("shard", 1)}), NOW)
    assert decided.status.phase == "Running" and not names(decided)
    assert decided.status.workers.succeeded_indexes == "0-2"


def test_first_worker_decides_where_the_policy_says_so() -> None:
    policy = job(runPolicy={"successPolicy": "FirstWorker"})
    shards = {key: OVER[key] for key in ("shard_0", "shard_1")}
    assert plan(running(policy, **shards, worker_1=OVER["worker_1"]), NOW).status.phase != "Complete"
    won = running(policy, **shards, worker_0=OVER["worker_0"], worker_1=pod("worker", 1, **ended(1)))
    decided = plan(won, NOW)
    assert decided.status.phase == "Complete" and deleted(decided) == ["job-worker-2-r1"]
    waiting = plan(running(policy, worker_0=OVER["worker_0"], worker_1=pod("worker", 1, **ended(1))), NOW)
    assert not names(waiting), "once the policy is met no worker is started again"


def test_success_is_remembered_when_pods_are_collected() -> None:
    most = running(**{**OVER, "shard_1": pod("shard", 1)})
    stored = replace(most, status=plan(most, NOW).status)
    left = replace(stored, processes=(pod("shard", 1, **ended(0)),))
    assert plan(left, NOW).status.phase == "Complete"


def test_a_done_job_whose_pods_were_collected_before_any_word_runs_through_again() -> None:
    decided = plan(running(shard_0=None, shard_1=None, worker_0=None, worker_1=None, worker_2=None), NOW)
    assert names(decided) == ["job-shard-0-a2", "job-shard-1-a2", "job-worker-0-r2", "job-worker-1-r2", "job-worker-2-r2"]


def test_a_worker_that_failed_after_the_last_manifest_brings_the_shards_back() -> None:
    decided = plan(running(**{**OVER, "worker_2": pod("worker", 2, **ended(1))}), NOW)
    assert names(decided) == ["job-shard-0-a2", "job-shard-1-a2", "job-worker-2-r2"]
    assert decided.status.restarts.causes == {"Error": 1, "Finished": 2} and decided.status.restarts.counted == 1


@pytest.mark.parametrize(("number", "last_words", "back"), [
    (2, '{"met": "1:0-2", "status": {}}', True),
    (2, '{"met": "1:0-1 2:2", "status": {}}', False),
    (1, '{"met": "1:0-2", "status": {}}', False),
    (2, '{"met": 1}', False),
    (2, '{"met": "nobody"}', True),
    (2, "", False),
], ids=["comes too late", "was told", "takes long to end", "no text", "met nobody", "no words"])  # fmt: skip
def test_shards_come_back_for_a_worker_that_has_not_met_them(number: int, last_words: str, back: bool) -> None:
    over = {**OVER, "shard_0": pod("shard", 0, **ended(0, message=last_words)), "worker_2": pod("worker", 2, number)}
    snapshot = started_again(running(**over), number)
    decided = plan(snapshot, NOW)
    assert names(decided) == (["job-shard-0-a2", "job-shard-1-a2"] if back else [])
    assert decided.intent == back and decided.status.internal.worker_start == number
    assert decided.status.restarts.causes == ({"Finished": 2} if back else {}) and decided.status.restarts.counted == 0
    assert not after(snapshot, decided).intent, "raised once"


def test_shards_do_not_come_back_before_the_worker_does() -> None:
    """It waits in the queue of its node, or for its turn after a second failure."""
    over = {**OVER, "shard_0": pod("shard", 0, **ended(0, message='{"met": "1:0-2"}'))}
    queued = started_again(running(**{**over, "worker_2": pod("worker", 2, 2, phase="Pending", started=None, ready=False)}), 2)
    assert not names(plan(queued, NOW))
    failed = running(**{**over, "worker_2": pod("worker", 2, **ended(1))})
    assert failed.status is not None
    once = failed.status.restarts.model_copy(update={"counted": 1, "last_counted": stamp(NOW - 4)})
    failed = replace(failed, status=failed.status.model_copy(update={"restarts": once}))
    assert not names(plan(failed, NOW)) and plan(failed, NOW).wake_at == NOW + 6
    assert names(plan(failed, NOW + 6)) == ["job-shard-0-a2", "job-shard-1-a2", "job-worker-2-r2"]


@pytest.mark.parametrize(("worker", "words"), [(pod("worker", 2, **ended(5)), "exit code 5"), (pod("worker", 2, 2), "started again")])
def test_without_checkpoints_nothing_could_tell_a_late_worker(worker: Process, words: str) -> None:
    over = {**OVER, "shard_0": pod("shard", 0, **ended(0, message='{"met": "1:0-2"}')), "worker_2": worker}
    decided = plan(started_again(running(job(checkpoint={"disabled": True}), **over), worker.number), NOW)
    failed = said(decided.status)["Failed"]
    assert failed.reason == "WorkerFailed" and "worker 2" in failed.message and words in failed.message
    assert "spec.checkpoint.disabled" in failed.message


def started_again(snapshot: ObservedState, start: int) -> ObservedState:
    """The status has given this start."""
    assert snapshot.status is not None
    return replace(snapshot, status=with_internal(snapshot.status, worker_start=start))


FINISHED = ["job-shard-0-a1", "job-shard-1-a1", "job-worker-0-r1"]


@pytest.mark.parametrize(
    ("policy", "gone"),
    [("Running", ["job-worker-1-r1", "job-worker-2-r1"]), ("All", [*FINISHED, "job-worker-1-r1", "job-worker-2-r1"]), ("None", [])],
)
def test_what_is_deleted_at_the_end(policy: str, gone: list[str]) -> None:
    shards = {key: OVER[key] for key in ("shard_0", "shard_1", "worker_0")}
    lingering = pod("worker", 1, **ended(0), lingering=True)
    won = running(job(runPolicy={"successPolicy": "FirstWorker", "cleanPodPolicy": policy}), **shards, worker_1=lingering)
    decided = plan(won, NOW)
    assert decided.intent, "the phase is stored before anything is deleted"
    assert sorted(deleted(decided)) == sorted(gone)
    crashed = after(won, decided, NOW + 5)
    assert sorted(deleted(crashed)) == sorted(gone) and crashed.status == decided.status


def test_a_finished_job_does_nothing_but_answer_a_new_generation() -> None:
    done = running(**OVER)
    done = replace(done, status=plan(done, NOW).status)
    for snapshot in (done, replace(done, processes=()), replace(done, processes=(), live=False), replace(done, objects=Objects())):
        decided = plan(snapshot, NOW + 1e6)
        assert decided.status == done.status and not decided.actions and not decided.intent and decided.wake_at is None
    newer = plan(replace(done, generation=2), NOW + 9).status
    assert newer.observed_generation == 2 and newer.phase == "Complete" and newer.completion_time == stamp(NOW)
    suspended = replace(done, spec=done.spec.model_copy(update={"suspend": True}))
    assert plan(suspended, NOW).status == done.status


def test_a_worker_that_never_joined_fails_the_job() -> None:
    workers = [{"rank": rank, "clock": 0, "state": "absent" if rank == 1 else "joined"} for rank in range(3)]
    told = {"run": "run-1", "coordinator": {"step": 0, "workers": workers}}
    left = running(worker_1=OVER["worker_1"])
    stored = replace(left, status=plan(left, NOW).status, progress=told, written_at=NOW, progress_at=NOW + 60)
    decided = plan(stored, NOW + 60)
    assert said(decided.status)["Failed"].reason == "NeverAttached" and "worker 1" in said(decided.status)["Failed"].message
    later = {"run": "run-1", "coordinator": {"step": 4, "workers": workers}}
    for other in (replace(stored, progress_at=NOW + 1), replace(stored, progress=later), replace(stored, written_at=None)):
        assert plan(other, NOW + 60).status.phase == "Running"


def exited(**changed: object) -> ObservedState:
    """Worker 1 has ended with exit code 0 and the status says so; shard 0 was asked a minute later, and has not heard of its end."""
    workers = [{"rank": rank, "clock": 4, "state": "joined", "start": 1, "here": rank != 1} for rank in range(3)]
    left = running(worker_1=OVER["worker_1"])
    told = {"run": "run-1", "attempt": 1, "state": "serving", "coordinator": {"step": 4, "workers": workers}}
    before = replace(left, status=plan(left, NOW).status, progress=told, written_at=NOW, progress_at=NOW + 60)
    return replace(before, **changed)  # type: ignore[arg-type]


def test_a_worker_that_ended_with_0_and_did_not_leave_is_a_counted_failure() -> None:
    assert exited().status is not None and exited().status.workers.succeeded_indexes == "1"  # type: ignore[union-attr]
    decided = plan(exited(), NOW + 60)
    assert names(decided) == ["job-worker-1-r2"] and decided.status.workers.succeeded_indexes == ""
    assert decided.status.restarts.causes == {"UnfinishedExit": 1} and decided.status.restarts.counted == 1
    again = after(exited(), decided, NOW + 60)
    assert again.status.workers.succeeded_indexes == "" and again.status.restarts.counted == 1, "raised once"
    limited = exited(spec=job(runPolicy={"backoffLimit": 0}).spec)
    assert said(plan(limited, NOW + 60).status)["Failed"].reason == "BackoffLimitExceeded"
    assert "os._exit" in said(plan(limited, NOW + 60).status)["Failed"].message


@pytest.mark.parametrize("changed", [
    {"progress_at": NOW + 1},
    {"progress_at": None},
    {"written_at": None},
    {"state": "restoring"},
    {"attempt": 2},
    {"run": "run-2"},
    {"member": {"state": "left"}},
    {"member": {"here": True}},
    {"member": {"here": None}},
    {"member": {"start": 2}},
    {"member": {"rank": 7}},
    {"checkpoint": {"final": True}},
    {"workers": None},
], ids=str)  # fmt: skip
def test_a_worker_that_ended_with_0_is_through_while_nothing_speaks_against_it(changed: dict[str, Any]) -> None:
    """It was asked too early, or of another process, or the job is over."""
    snapshot = exited()
    told = {**(snapshot.progress or {})}
    coordinator = {**told["coordinator"]}
    for key in set(changed) & {"state", "attempt", "run"}:
        told[key] = changed[key]
    if "member" in changed:
        coordinator["workers"] = [{**worker, **(changed["member"] if worker["rank"] == 1 else {})} for worker in coordinator["workers"]]
    coordinator |= {key: changed[key] for key in set(changed) & {"checkpoint", "workers"}}
    times = {key: changed[key] for key in set(changed) & {"progress_at", "written_at"}}
    decided = plan(replace(snapshot, progress={**told, "coordinator": coordinator}, **times), NOW + 60)
    assert not names(decided) and decided.status.workers.succeeded_indexes == "1"


def test_the_others_are_through_when_the_first_worker_has_left_and_decides() -> None:
    policy = job(runPolicy={"successPolicy": "FirstWorker"}).spec
    assert names(plan(exited(spec=policy), NOW + 60)) == ["job-worker-1-r2"]
    told = exited().progress or {}
    workers = [{**worker, "state": "left" if worker["rank"] == 0 else "joined"} for worker in told["coordinator"]["workers"]]
    assert not names(plan(exited(spec=policy, progress={**told, "coordinator": {"step": 4, "workers": workers}}), NOW + 60))


def test_on_one_machine_the_end_of_a_worker_is_known_by_its_clock() -> None:
    gone = pod("worker", 1, **ended(0))
    assert gone.exit is not None
    late = replace(gone, exit=replace(gone.exit, at=NOW + 58))
    here = {"one_machine": True, "written_at": None}
    early = replace(gone, exit=replace(gone.exit, at=NOW))
    for process, again in ((early, ["job-worker-1-r2"]), (late, [])):
        others = tuple(it for it in exited().processes if it.name != process.name)
        assert names(plan(exited(processes=(*others, process), **here), NOW + 60)) == again


def test_ttl_deletes_the_job_exactly_in_time() -> None:
    done = running(job(runPolicy={"ttlSecondsAfterFinished": 60}), **OVER)
    first = plan(done, NOW)
    assert first.wake_at == NOW + 60
    done = replace(done, status=first.status)
    assert plan(done, NOW + 59.9).wake_at == NOW + 60 and not plan(done, NOW + 59.9).actions
    assert plan(done, NOW + 60).actions == (DeleteJob(),)
    at_once = replace(running(job(runPolicy={"ttlSecondsAfterFinished": 0}), **OVER))
    assert plan(replace(at_once, status=plan(at_once, NOW).status), NOW).actions == (DeleteJob(),)


def test_the_deadline_is_exact_and_stops_what_runs() -> None:
    timed = running(job(runPolicy={"activeDeadlineSeconds": 500}))
    assert timed.status is not None
    assert plan(job(runPolicy={"activeDeadlineSeconds": 500}), NOW).wake_at == NOW + 500
    end = (unix(timed.status.start_time) or 0) + 500
    early = plan(timed, end - 0.5)
    assert early.status.phase == "Running" and early.wake_at == end
    late = plan(timed, end)
    assert said(late.status)["Failed"].reason == "DeadlineExceeded" and "500" in said(late.status)["Failed"].message
    assert stands(late.status) == {"Ready": "False", "Stalled": "True", "Failed": "True"}
    assert len(deleted(late)) == 5


def test_a_job_that_lacks_pods_for_too_long_fails_with_the_words_of_who_keeps_them() -> None:
    waits = job(runPolicy={"pendingTimeoutSeconds": 300})
    first = plan(waits, NOW)
    assert first.wake_at is not None and first.wake_at <= NOW + 300
    alone = pod(
        "worker", 0, phase="Pending", ready=False, started=None, unschedulable="0/3 nodes are available: 3 Insufficient nvidia.com/gpu"
    )
    there = (pod("shard", 0), pod("shard", 1), alone, pod("worker", 1), pod("worker", 2))
    held = replace(waits, status=first.status, processes=there)
    told = plan(held, NOW + 10)
    assert told.status.phase == "Pending" and told.wake_at is not None and told.wake_at <= NOW + 300
    ended = plan(replace(held, status=told.status), NOW + 300)
    failed = said(ended.status)["Failed"]
    assert failed.reason == "PendingTimeout" and "300" in failed.message and "Insufficient nvidia.com/gpu" in failed.message
    assert plan(running(waits), NOW + 1000).status.phase == "Running", "all are there"


# ---- suspension --------------------------------------------------------------------------------------------------------------------


def suspend(snapshot: ObservedState, wanted: bool | None = True) -> ObservedState:
    spec = snapshot.spec.model_copy(update={"suspend": wanted})
    return replace(snapshot, spec=spec, generation=snapshot.generation + 1)


def test_suspension_ends_all_at_once_and_is_told_when_nothing_is_left() -> None:
    snapshot = suspend(running(worker_0=OVER["worker_0"]))
    first = plan(snapshot, NOW)
    assert first.intent and len(deleted(first)) == 5
    assert {action.grace_seconds for action in first.actions if isinstance(action, DeleteProcess)} == {None}
    assert stands(first.status) == {"Ready": "False", "Reconciling": "True"}
    assert said(first.status)["Ready"].reason == "Suspending" and first.status.start_time
    assert first.status.workers.succeeded_indexes == "0"
    leaving = tuple(replace(process, deleting=NOW + 30) for process in snapshot.processes)
    second = after(replace(snapshot, processes=leaving), first, NOW + 1)
    assert not second.actions and second.status.phase == "Running"
    empty = replace(snapshot, status=second.status, processes=())
    assert plan(replace(empty, live=False), NOW + 9).needs_live
    last = plan(empty, NOW + 9)
    assert last.status.phase == "Suspended" and last.status.start_time is None
    assert stands(last.status) == {"Ready": "False", "Suspended": "True"}
    assert [event.reason for event in (*first.events, *second.events, *last.events)] == ["Suspending", "Suspended"]
    idle = plan(replace(empty, status=last.status, live=False), NOW + 1e6)
    assert idle.status == last.status and not idle.actions and not idle.needs_live


def test_resumption_gives_everything_new_numbers() -> None:
    snapshot = suspend(running(worker_0=OVER["worker_0"]))
    told = plan(snapshot, NOW).status
    status = plan(replace(snapshot, status=told, processes=()), NOW + 9).status
    decided = plan(suspend(replace(snapshot, status=status, processes=()), None), NOW + 100)
    assert decided.intent and decided.status.internal.term == 2
    assert names(decided) == ["job-shard-0-a2", "job-shard-1-a2", "job-worker-1-r2", "job-worker-2-r2"]
    assert decided.status.start_time == stamp(NOW + 100), "the deadline counts from the resumption"
    assert decided.status.restarts.total == 0 and decided.status.phase == "Pending"
    assert [event.reason for event in decided.events] == ["Resumed"]


def test_a_flip_back_waits_until_what_was_told_to_end_has_ended() -> None:
    snapshot = suspend(running())
    first = plan(snapshot, NOW)
    leaving = tuple(replace(process, deleting=NOW + 30) for process in snapshot.processes)
    flipped = suspend(replace(snapshot, status=first.status, processes=leaving), None)
    assert not names(plan(flipped, NOW + 1)) and not plan(flipped, NOW + 1).intent
    resumed = plan(replace(flipped, processes=()), NOW + 9)
    assert resumed.status.internal.term == 2 and len(names(resumed)) == 5


def test_a_job_that_goes_on_is_suspended_false_from_then_on() -> None:
    up = running()
    asked = up.spec.model_copy(update={"suspend": True})
    stopped = replace(up, spec=asked, status=plan(replace(up, spec=asked, processes=()), NOW).status, processes=())
    assert said(stopped.status or JobStatus())["Suspended"].status == "True"
    resumed = replace(stopped, spec=up.spec)
    for snapshot in (resumed, replace(resumed, status=plan(resumed, NOW + 5).status)):
        condition = said(plan(snapshot, NOW + 9).status)["Suspended"]
        assert (condition.status, condition.reason) == ("False", "Resumed")
    again = plan(replace(resumed, status=plan(resumed, NOW + 5).status, spec=asked, processes=(pod("shard", 0, 2),)), NOW + 9).status
    assert (said(again)["Suspended"].status, said(again)["Suspended"].reason) == ("False", "NotSuspended"), "its shard makes a checkpoint"
    unread = plan(replace(resumed, status=plan(resumed, NOW + 5).status, spec_problems=("x",)), NOW + 9).status
    assert said(unread)["Stalled"].status == "True" and said(unread)["Suspended"].reason == "Resumed"


def test_a_job_made_suspended_has_no_numbers_and_no_objects() -> None:
    decided = plan(suspend(job(objects=Objects())), NOW)
    assert not decided.actions and decided.status.phase == "Suspended"
    assert decided.status.internal.term is None and decided.status.shards == ()
    resumed = plan(suspend(job(status=decided.status), None), NOW)
    assert names(resumed)[0] == "job-shard-0-a1" and resumed.status.internal.term == 1


def test_only_a_lost_node_is_forced() -> None:
    stuck = pod("worker", 1, deleting=NOW - 40, node_lost=True)
    slow = pod("worker", 2, deleting=NOW - 40)
    decided = plan(suspend(running(worker_1=stuck, worker_2=slow)), NOW)
    forced = {action.name: action.grace_seconds for action in decided.actions if isinstance(action, DeleteProcess)}
    assert forced["job-worker-1-r1"] == 0 and "job-worker-2-r1" not in forced


def test_a_done_job_is_complete_though_it_is_to_be_suspended() -> None:
    assert plan(suspend(running(**OVER)), NOW).status.phase == "Complete"


def test_without_checkpoints_suspension_is_no_failure() -> None:
    leaving = {f"shard_{index}": pod("shard", index, **ended(143), deleting=NOW) for index in (0, 1)}
    decided = plan(suspend(running(job(checkpoint={"disabled": True}), **leaving)), NOW)
    assert decided.status.phase == "Running"


def test_without_checkpoints_a_resumed_job_starts_anew_with_everyone_and_says_so() -> None:
    snapshot = suspend(running(job(checkpoint={"disabled": True}), worker_0=OVER["worker_0"]))
    told = plan(snapshot, NOW).status
    stopped = plan(replace(snapshot, status=told, processes=()), NOW + 9).status
    assert stopped.workers.succeeded_indexes == "0"
    decided = plan(suspend(replace(snapshot, status=stopped, processes=()), None), NOW + 100)
    assert "job-worker-0-r2" in names(decided) and decided.status.workers.succeeded_indexes == ""
    assert "training starts anew" in decided.events[0].message
