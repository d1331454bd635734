"""The table of failures: what is seen, what counts, what is started again.

How long a recovery took and what it undid: from the loss to the first step after it, as status and an Event say it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psjob_operator.api.status import LARGEST, JobStatus, stamp_exact
from psjob_operator.contract import EXIT_CHECKPOINT_LOST, EXIT_DEVICE_LOST, EXIT_FENCED, EXIT_HUNG, EXIT_REFUSED, EXIT_RETRY, MOST_RISE
from psjob_operator.plan.observed_state import Exit, ObservedState
from psjob_operator.plan.plan import plan
from psjob_operator.plan.process_outcome import NOT_ADMITTED, outcome_of
from tests.unit.api_manifest import MANY_NODES
from tests.unit.plan_given import NOW, after, deleted, ended, job, names, pod, running, said, with_internal

GONE = {"phase": "Failed", "ready": False, "started": None}
OWN = "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi."
PRESSURE = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 90Mi."
GREEDY = PRESSURE + " Container worker was using 5Gi, request is 0, has larger consumption of memory."
TABLE: list[tuple[str, dict[str, Any], str, bool]] = [
    ("exit 1", ended(1), "Error", True),
    ("OOM", ended(137, "OOMKilled"), "OOMKilled", True),
    ("signal without a reason", ended(137), "Error", True),
    ("local signal", {**ended(1), "exit": Exit(0, signal=9, reason="Signal")}, "Signal", True),
    ("cannot run", ended(128, "ContainerCannotRun"), "ContainerCannotRun", True),
    ("init failed", {**GONE, "init_exit": Exit(2, reason="Error")}, "InitFailed", True),
    ("pod's own deadline", {**GONE, "pod_reason": "DeadlineExceeded"}, "DeadlineExceeded", True),
    ("evicted for its own use", {**ended(137), "pod_reason": "Evicted", "pod_message": OWN}, "Evicted", True),
    ("evicted, greedy", {**GONE, "pod_reason": "Evicted", "pod_message": GREEDY}, "Evicted", True),
    ("evicted, exit 75 for it", {**ended(EXIT_RETRY), "pod_reason": "Evicted", "pod_message": OWN}, "Evicted", True),
    ("victim of pressure", {**GONE, "pod_reason": "Evicted", "pod_message": PRESSURE}, "NodePressure", False),
    ("no heartbeat", {"unresponsive": True}, "Unresponsive", True),
    ("exit 75", ended(EXIT_RETRY, message='{"ending": ""}'), "Retry", False),
    ("preempted", {**ended(143), "pod_reason": "PreemptionByScheduler"}, "Preempted", False),
    ("preempted, leaving", {"deleting": NOW, "pod_reason": "PreemptionByScheduler"}, "Preempted", False),
    ("preempted by the kubelet", {**GONE, "pod_reason": "Preempting"}, "Preempted", False),
    ("drained", {**ended(EXIT_RETRY), "deleting": NOW, "pod_reason": "EvictionByEvictionAPI"}, "Drained", False),
    ("tainted node", {"deleting": NOW, "node_lost": True, "pod_reason": "DeletionByTaintManager"}, "NodeLost", False),
    ("node out of reach", {"ready": False, "node": "n1", "node_lost": True}, "NodeLost", False),
    ("node shut down", {**ended(143), "pod_reason": "Terminated"}, "NodeShutdown", False),
    ("kubelet ended it", {**ended(143), "pod_reason": "TerminationByKubelet"}, "TerminationByKubelet", False),
    ("no room after all", {**GONE, "pod_reason": "OutOfcpu"}, "OutOfcpu", False),
    *((f"the kubelet takes it not: {reason}", {**GONE, "pod_reason": reason}, reason, False) for reason in NOT_ADMITTED),
    ("no GPU after all", {**GONE, "pod_reason": "OutOfnvidia.com/gpu"}, "OutOfnvidia.com/gpu", False),
    ("deleted by hand", {"deleting": NOW}, "Deleted", False),
    ("deleted by hand, ended", {**ended(143), "deleting": NOW}, "Deleted", False),
]


@pytest.mark.parametrize(("seen", "cause", "counts"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
@pytest.mark.parametrize("role", ["shard", "worker"])
def test_what_counts(role: str, seen: dict[str, Any], cause: str, counts: bool) -> None:
    apart = job(checkpoint=MANY_NODES)
    snapshot = running(apart, **{f"{role}_1": pod(role, 1, **seen)})
    decided = plan(snapshot, NOW)
    assert decided.intent
    status = decided.status
    assert status.restarts.causes == {cause: 1}
    assert status.restarts.counted == (1 if counts else 0)
    assert (status.restarts.last_counted is not None) == counts
    assert names(decided) == (["job-shard-1-a2"] if role == "shard" else ["job-worker-1-r2"])
    assert [shard.attempt for shard in status.shards] == ([1, 2] if role == "shard" else [1, 1])
    assert status.internal.term == (2 if role == "shard" else 1)
    assert status.internal.worker_start == (1 if role == "shard" else 2)
    assert status.phase == "Recovering"
    assert cause in said(status)["Ready"].message
    assert [event.reason for event in decided.events] == ["Restarted"]
    again = after(snapshot, decided)
    assert again.status == status and not again.intent and names(again) == names(decided)


ALIVE: list[tuple[str, dict[str, Any], str, str]] = [
    ("pull", {"waiting_reason": "ErrImagePull", "waiting_message": "rpc error: not found"}, "ImagePullBackOff", "not found"),
    ("config", {"waiting_reason": "CreateContainerConfigError", "waiting_message": 'secret "x" not found'}, "CreateContainerConfigError",
        "secret"),
    ("room", {"scheduled": None, "unschedulable": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."}, "Unschedulable",
        "nvidia.com/gpu"),
    ("slow", {"scheduled": NOW - 60, "events": ("FailedMount: no such volume",)}, "FailedMount", "no such volume"),
    ("slow, plain words", {"scheduled": NOW - 60, "events": ("something odd",)}, "SlowStart", "something odd"),
]  # fmt: skip


@pytest.mark.parametrize(("seen", "reason", "words"), [row[1:] for row in ALIVE], ids=[row[0] for row in ALIVE])
def test_what_waits_is_not_started_again(seen: dict[str, Any], reason: str, words: str) -> None:
    waiting = pod("worker", 2, phase="Pending", started=None, ready=False, **{"scheduled": NOW - 10, **seen})
    decided = plan(running(worker_2=waiting), NOW)
    assert not decided.intent and not names(decided)
    ready = said(decided.status)["Ready"]
    assert (ready.status, ready.reason) == ("False", reason)
    assert words in ready.message
    problem = decided.status.workers.problems[0]
    assert (problem.index, problem.pod, problem.reason) == (2, "job-worker-2-r1", reason)
    assert decided.status.restarts.total == 0


def test_the_words_of_a_failed_pull_stay() -> None:
    waiting = pod(
        "worker", 2, phase="Pending", started=None, ready=False, waiting_reason="ErrImagePull", waiting_message="manifest unknown"
    )
    snapshot = running(worker_2=waiting)
    first = plan(snapshot, NOW)
    turned = replace(waiting, waiting_reason="ImagePullBackOff", waiting_message='Back-off pulling image "x"')
    others = tuple(process for process in snapshot.processes if process.name != waiting.name)
    second = plan(replace(snapshot, status=first.status, processes=(*others, turned)), NOW + 100)
    assert second.status == first.status


def test_slow_starts_are_looked_at_in_time() -> None:
    waiting = pod("worker", 2, phase="Pending", started=None, ready=False, scheduled=NOW - 20)
    assert plan(running(worker_2=waiting), NOW).wake_at == NOW + 40


def test_a_sidecar_that_crashes_shows_and_stops_nothing() -> None:
    decided = plan(running(worker_0=pod("worker", 0, sidecar_crash="logs: CrashLoopBackOff")), NOW)
    ready = said(decided.status)["Ready"]
    assert (ready.status, ready.reason) == ("True", "SidecarCrashing")
    assert "logs" in ready.message and decided.status.phase == "Running"


def test_several_shards_raise_the_view_once() -> None:
    decided = plan(running(shard_0=pod("shard", 0, **ended(1)), shard_1=pod("shard", 1, deleting=NOW)), NOW)
    assert decided.status.internal.term == 2
    assert [shard.attempt for shard in decided.status.shards] == [2, 2]
    assert names(decided) == ["job-shard-0-a2", "job-shard-1-a2"]
    assert decided.status.restarts.causes == {"Deleted": 1, "Error": 1}


def test_workers_share_one_start_and_others_keep_theirs() -> None:
    lost = running(worker_0=pod("worker", 0, **ended(1)), worker_1=pod("worker", 1, deleting=NOW))
    decided = plan(lost, NOW)
    assert names(decided) == ["job-worker-0-r2", "job-worker-1-r2"]
    assert decided.status.internal.worker_start == 2
    third = replace(lost, status=decided.status, processes=(*lost.processes, pod("worker", 0, 2), pod("worker", 1, 2, **ended(EXIT_RETRY))))
    assert names(plan(third, NOW + 60)) == ["job-worker-1-r3"]


def test_a_fenced_shard_raises_the_view_above_the_one_it_met() -> None:
    fenced = pod("shard", 1, **ended(EXIT_FENCED, message='{"fenced": {"term": 7}}'))
    decided = plan(running(shard_1=fenced), NOW)
    assert decided.status.internal.term == 8
    assert decided.status.restarts.counted == 0 and decided.status.restarts.causes == {"Fenced": 1}


def test_a_view_that_no_process_can_have_met_raises_by_so_much_at_most() -> None:
    fenced = pod("shard", 1, **ended(EXIT_FENCED, message='{"fenced": {"term": 2147483640}}'))
    decided = plan(running(shard_1=fenced), NOW)
    assert decided.status.internal.term == 1 + MOST_RISE + 1


@pytest.mark.parametrize(
    "message", ["", "no json", '{"fenced": 3}', '{"fenced": {"term": "9"}}', '{"fenced": {"term": 99999999999}}', "[]"]
)
def test_a_fence_without_a_view_still_raises(message: str) -> None:
    assert plan(running(shard_1=pod("shard", 1, **ended(EXIT_FENCED, message=message))), NOW).status.internal.term == 2


@pytest.mark.parametrize(
    ("message", "start"),
    [
        ('{"ending": "worker 1: a newer process of this rank is here", "fenced": {"start": 7}}', 8),
        ('{"ending": "worker 1: a newer process of this rank is here"}', 2),
        ('{"ending": "", "fenced": {"start": 2147483640}}', 1 + MOST_RISE + 1),
        ('{"ending": "", "fenced": {"start": "7"}}', 2),
        ('{"ending": "", "fenced": {"term": 7}}', 2),
    ],
)
def test_a_fenced_worker_gets_a_start_above_the_one_it_met(message: str, start: int) -> None:
    """Its status came from an older backup; the run has had more starts than that says."""
    decided = plan(running(worker_1=pod("worker", 1, **ended(EXIT_FENCED, message=message))), NOW)
    assert names(decided) == [f"job-worker-1-r{start}"] and decided.status.internal.worker_start == start
    assert decided.status.restarts.counted == 0 and decided.status.restarts.causes == {"Fenced": 1}


@pytest.mark.parametrize(("code", "reason"), [(EXIT_REFUSED, "Refused"), (EXIT_CHECKPOINT_LOST, "CheckpointLost")])
def test_what_cannot_be_helped_fails_the_job_with_its_sentence(code: int, reason: str) -> None:
    decided = plan(running(shard_0=pod("shard", 0, **ended(code, message='{"error": "no valid manifest in run-1"}'))), NOW)
    assert decided.status.phase == "Failed"
    assert said(decided.status)["Failed"].reason == reason
    assert "no valid manifest in run-1" in said(decided.status)["Failed"].message
    assert decided.intent and not names(decided)


def test_a_worker_cannot_say_that_a_checkpoint_is_lost() -> None:
    assert outcome_of(pod("worker", 0, **ended(EXIT_CHECKPOINT_LOST))).kind == "lost"
    assert outcome_of(pod("worker", 0, **ended(EXIT_REFUSED, message='{"error": "no"}'))).kind == "fatal"
    caught = outcome_of(pod("worker", 0, **ended(0, message='{"error": "no"}')))
    assert (caught.kind, caught.cause, caught.message) == ("fatal", "Refused", "no"), "a script that catches it ends with 0"
    child = outcome_of(pod("worker", 0, **ended(1, message='{"error": "no", "refused": true}')))
    assert (child.kind, child.cause, child.message) == ("fatal", "Refused", "no"), "its parent has an exit code of its own"
    for message in ('{"error": "no", "refused": 1}', '{"error": "no", "refused": true}\n', '{"error": "no", "refused": true, "x": 1}'):
        assert outcome_of(pod("worker", 0, **ended(1, message=message))).kind == "lost"
    for message in ('{"ending": ""}', "a line of its own", '{"error": "no"}\n', ""):
        assert outcome_of(pod("worker", 0, **ended(0, message=message))).kind == "done"


@pytest.mark.parametrize(
    "message",
    ["", '{"error": "no data"}\n', "usage: train.py", '{"level": "error", "msg": "no data"}', '{"error": "x", "step": 3}', "[]", '"error"'],
)
@pytest.mark.parametrize("code", [EXIT_RETRY, EXIT_FENCED, EXIT_REFUSED, EXIT_CHECKPOINT_LOST, EXIT_HUNG, EXIT_DEVICE_LOST])
def test_a_scripts_own_exit_code_is_not_taken_for_the_runtimes(code: int, message: str) -> None:
    """The kubelet gives the end of the log where a process leaves no message, which may be a line of JSON."""
    decided = plan(running(worker_1=pod("worker", 1, **ended(code, message=message))), NOW)
    assert decided.status.restarts.causes == {"Error": 1} and decided.status.restarts.counted == 1


@pytest.mark.parametrize(("step", "known"), [(None, False), (0, False), (1, True), (5, True)])
def test_a_shard_started_after_a_checkpoint_must_find_one(step: int | None, known: bool) -> None:
    """That of step 0 can be made again."""
    kept = {} if step is None else {"checkpoint": {"step": step, "time": NOW, "term": 1, "bytes": 1, "path": "p"}}
    lost = running(shard_1=pod("shard", 1, **ended(1)))
    assert plan(replace(lost, progress={"run": "run-1", "coordinator": {"step": 9, **kept}}), NOW).actions[-1].checkpoint_known == known


def test_absence_is_believed_only_live() -> None:
    gone = running(worker_0=None)
    stale = plan(replace(gone, live=False), NOW)
    assert stale.needs_live and not stale.intent and not stale.actions and stale.status == gone.status
    decided = plan(gone, NOW)
    assert not decided.needs_live and names(decided) == ["job-worker-0-r2"]
    assert decided.status.restarts.causes == {"Missing": 1}


def test_a_failure_that_is_seen_needs_no_live_read() -> None:
    assert plan(replace(running(worker_0=pod("worker", 0, **ended(1))), live=False), NOW).intent


def test_pods_ahead_of_the_status_are_never_adopted() -> None:
    zombies = (pod("shard", 1, 5), pod("worker", 0, 3))
    back = running()
    back = replace(back, processes=(*back.processes, *zombies))
    assert plan(replace(back, live=False), NOW).needs_live
    decided = plan(back, NOW)
    assert [shard.attempt for shard in decided.status.shards] == [1, 6]
    assert decided.status.internal.worker_start == 4
    assert names(decided) == ["job-shard-1-a6", "job-worker-0-r4"]
    assert {"job-shard-1-a5", "job-worker-0-r3", "job-shard-1-a1", "job-worker-0-r1"} == set(deleted(decided))


def test_a_pod_ahead_of_a_seat_that_is_done_asks_for_nothing() -> None:
    done = running(worker_0=pod("worker", 0, **ended(0)))
    done = replace(done, status=plan(done, NOW).status, live=False)
    assert not plan(replace(done, processes=(*done.processes, pod("worker", 0, 9))), NOW).needs_live


def test_pods_of_another_run_are_neither_adopted_nor_touched() -> None:
    leftover = pod("worker", 0, run="another")
    decided = plan(job(processes=(leftover,)), NOW)
    assert "job-worker-0-r1" not in names(decided) and not deleted(decided)
    ready = said(decided.status)["Ready"]
    assert ready.reason == "NameConflict" and "job-worker-0-r1" in ready.message
    freed = after(replace(job(), processes=()), decided)
    assert "job-worker-0-r1" in names(freed)


def test_replaced_pods_go_but_for_the_newest_log() -> None:
    status = running().status
    assert status is not None
    crashed = tuple(pod("worker", 0, number, **ended(1)) for number in (1, 2))
    stuck = pod("worker", 1, 1, phase="Unknown")
    processes = (*running(worker_0=None, worker_1=None).processes, *crashed, stuck, pod("worker", 0, 3), pod("worker", 1, 3))
    newer = with_internal(status, worker_start=3)
    assert deleted(plan(replace(running(), status=newer, processes=processes), NOW)) == ["job-worker-0-r1", "job-worker-1-r1"]


def test_a_pod_whose_sidecar_lives_on_is_deleted_when_replaced() -> None:
    crashed = pod("worker", 0, **ended(1), lingering=True)
    assert deleted(plan(running(worker_0=crashed), NOW)) == ["job-worker-0-r1"]


def test_a_failure_names_container_code_limits_and_log() -> None:
    container = {"name": "trainer", "image": "i", "command": ["python"], "resources": {"limits": {"memory": "2Gi"}}}
    base = job(workers={"template": {"spec": {"containers": [container]}}})
    killed = ended(137, "OOMKilled", log_tail="step 40\nepoch 3")
    message = said(plan(running(base, worker_1=pod("worker", 1, **killed)), NOW).status)["Ready"].message
    for words in ("worker 1", "container trainer", "memory limit 2Gi", "exit code 137", "OOMKilled", "failures: 1", "backoffLimit: 6"):
        assert words in message
    assert len(message) <= 256


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"code": 1, "log_tail": "step 40\nValueError: no data"}, "exit code 1: ValueError: no data"),
        ({"code": 139, "log_tail": "step 40\nFatal Python error: Segmentation fault"}, "exit code 139: Fatal Python error"),
        ({"code": 137, "log_tail": "step 40"}, "exit code 137;"),
        ({"code": 0, "signal": 9, "log_tail": "checkpoint of step 396 committed"}, "signal 9;"),
        ({"code": 143, "message": "epoch 3\n"}, "exit code 143;"),
        ({"code": 137, "message": '{"error": "the disk is full"}'}, "exit code 137: the disk is full"),
        ({"code": 137, "message": "left by the script"}, "exit code 137: left by the script"),
    ],
)
def test_the_last_line_of_a_log_is_a_cause_only_if_the_process_ended_itself(how: dict[str, Any], told: str) -> None:
    worker = pod("worker", 1, phase="Failed", ready=False, exit=Exit(reason="Error", **how))
    message = said(plan(running(worker_1=worker), NOW).status)["Ready"].message
    assert told in message and "step 40;" not in message and "committed" not in message


def test_a_pod_that_went_out_of_sight_without_an_end_is_deleted_when_it_was_replaced() -> None:
    """Its labels were taken away: it runs on unseen, beside the one that takes its place."""
    unseen = pod("worker", 1, gone=True)
    decided = plan(replace(running(worker_1=None), gone=(unseen,)), NOW)
    assert names(decided) == ["job-worker-1-r2"] and deleted(decided) == ["job-worker-1-r1"]
    for over in (replace(unseen, deleting=NOW - 5), pod("worker", 1, gone=True, **ended(1))):
        assert deleted(plan(replace(running(worker_1=None), gone=(over,)), NOW)) == [], "its end is known"


def told(step: int, resumed: Any = None, mode: str = "sync", run: str = "run-1", **counts: int) -> dict[str, Any]:
    said = {"step": step, "mode": mode, "stepsLost": 0, "updatesLost": 0, "resumed": resumed, **counts}
    return {"run": run, "coordinator": said}


def first(term: int = 2, start: int = 1, age: float = 2.0, **other: Any) -> dict[str, Any]:
    return {"term": term, "start": start, "from": 100, "step": 101, "age": age, **other}


def instead(snapshot: ObservedState, name: str, role: str, index: int, **end: Any) -> ObservedState:
    """That process has ended."""
    return replace(snapshot, processes=tuple(pod(role, index, **end) if it.name == name else it for it in snapshot.processes))


def lost(mode: str = "sync") -> tuple[ObservedState, JobStatus]:
    """Shard 1 is killed while training is at step 125; the snapshot with its next process, and the status that raised its number."""
    up = replace(running(), progress=told(125, mode=mode), progress_at=NOW - 1)
    killed = instead(up, "job-shard-1-a1", "shard", 1, **ended(137, "OOMKilled"))
    raised = plan(killed, NOW + 0.25)
    again = replace(killed, status=raised.status, processes=(*killed.processes, pod("shard", 1, 2, created=NOW)))
    return again, raised.status


def test_an_interruption_is_stored_with_the_raise_and_asks_until_the_first_step() -> None:
    again, raised = lost()
    assert raised.interruption is not None
    assert raised.interruption.since == stamp_exact(NOW + 0.25) and raised.interruption.cause == "OOMKilled"
    assert (raised.interruption.step, raised.interruption.attempt) == (125, 1)
    decided = plan(replace(again, progress=told(100), progress_at=NOW + 5), NOW + 5)
    assert decided.status.phase == "Running" and decided.status.interruption == raised.interruption
    assert decided.want_progress, "a running job is asked at once, not in a minute"
    assert [event.reason for event in decided.events] == [], "Restarted has told of the loss, and Recovered will tell of the first step"


def test_the_first_step_after_the_loss_ends_it_with_an_event() -> None:
    again, _ = lost()
    up = plan(again, NOW + 5).status
    decided = plan(replace(again, status=up, progress=told(103, first(age=2.0), stepsLost=25), progress_at=NOW + 14.55), NOW + 14.6)
    last = decided.status.last_recovery
    assert decided.status.interruption is None and last is not None
    assert (last.cause, last.duration_seconds, last.steps_lost, last.updates_lost) == ("OOMKilled", 12.3, 25, None)
    assert decided.status.restarts.steps_lost == 25 and decided.status.restarts.total == 1
    (event,) = decided.events
    assert (event.type, event.reason) == ("Normal", "Recovered")
    assert event.message == "training continues 12.3 s after the loss was seen (OOMKilled), 25 steps done again"
    much = told(900, first(age=400.0), stepsLost=25)
    later = plan(replace(again, status=decided.status, progress=much, progress_at=NOW + 400), NOW + 400)
    assert later.status.last_recovery == last and "Recovered" not in [event.reason for event in later.events]


@pytest.mark.parametrize(
    ("what", "resumed"),
    [
        ("no step yet", None),
        ("so new that other shards may not have told yet", first(age=0.4)),
        ("of the term before", first(term=1)),
        ("of an interruption before the loss", first(age=900.0)),
        ("not all workers", first(start=0)),
        ("nothing", "x"),
        ("no number", first(age="x")),
        ("below zero", first(age=-1.0)),
    ],
)
def test_what_is_no_first_step_of_this_recovery_ends_nothing(what: str, resumed: Any) -> None:
    again, raised = lost()
    decided = plan(replace(again, progress=told(103, resumed, stepsLost=25), progress_at=NOW + 14), NOW + 14)
    assert decided.status.interruption == raised.interruption, what
    assert decided.status.last_recovery is None


def test_in_async_the_cost_is_updates() -> None:
    again, _ = lost("async")
    decided = plan(replace(again, progress=told(130, first(), "async", updatesLost=7, stepsLost=3), progress_at=NOW + 9), NOW + 9)
    last = decided.status.last_recovery
    assert last is not None and (last.steps_lost, last.updates_lost) == (None, 7)
    assert decided.status.restarts.updates_lost == 7 and decided.status.restarts.steps_lost == 0
    assert decided.events[-1].message.endswith("7 updates lost")


def test_a_sum_stays_within_what_the_status_may_hold() -> None:
    """Each number is shard 0's word: two of the largest make a sum that the API server would refuse, and no status would be written."""
    again, _ = lost("async")
    assert again.status is not None
    before = again.status.model_copy(update={"restarts": again.status.restarts.model_copy(update={"updates_lost": LARGEST})})
    told_of = replace(again, status=before, progress=told(130, first(), "async", updatesLost=LARGEST), progress_at=NOW + 9)
    after = plan(told_of, NOW + 9).status
    assert after.restarts.updates_lost == LARGEST and JobStatus.read(after.to_manifest()) == after


def test_what_was_counted_before_the_loss_is_not_counted_again() -> None:
    up = replace(running(), progress=told(125, stepsLost=10), progress_at=NOW - 1)
    lost = instead(up, "job-shard-1-a1", "shard", 1, **ended(137))
    raised = plan(lost, NOW).status
    again = replace(lost, status=raised, processes=(*lost.processes, pod("shard", 1, 2, created=NOW)))
    decided = plan(replace(again, progress=told(103, first(), stepsLost=35), progress_at=NOW + 9), NOW + 9)
    assert decided.status.last_recovery is not None and decided.status.last_recovery.steps_lost == 25


def test_where_every_process_went_the_step_known_before_tells_the_cost() -> None:
    """A node takes all of them: the new coordinator was told of no step by anybody."""
    gone = {f"worker_{index}": pod("worker", index, **ended(137)) for index in range(3)}
    gone |= {f"shard_{index}": pod("shard", index, **ended(137)) for index in range(2)}
    all_lost = replace(running(**gone), progress=told(125), progress_at=NOW - 1)
    raised = plan(all_lost, NOW).status
    anew = [pod("shard", index, 2, created=NOW) for index in range(2)] + [pod("worker", index, 2, created=NOW) for index in range(3)]
    again = replace(all_lost, status=raised, processes=(*all_lost.processes, *anew))
    decided = plan(replace(again, progress=told(103, first(start=2)), progress_at=NOW + 9), NOW + 9)
    assert decided.status.last_recovery is not None and decided.status.last_recovery.steps_lost == 25


def test_a_second_loss_before_the_first_step_is_of_the_same_interruption() -> None:
    again, raised = lost()
    up = plan(again, NOW + 5).status
    shot = replace(again, status=up, progress=told(100), progress_at=NOW + 6)
    shot = instead(shot, "job-worker-0-r1", "worker", 0, **ended(1))
    second = plan(shot, NOW + 20)
    assert second.status.internal.worker_start == 2 and second.status.interruption == raised.interruption
    unheard = plan(replace(shot, progress=None, progress_at=NOW - 1), NOW + 20)
    assert unheard.status.interruption is not None and unheard.status.interruption.since == stamp_exact(NOW + 20)


def test_a_loss_that_waits_for_its_turn_counts_from_when_it_was_seen() -> None:
    up = running()
    assert up.status is not None
    failed = up.status.restarts.model_copy(update={"counted": 1, "last_counted": stamp_exact(NOW - 5)})
    loop = replace(up, status=up.status.model_copy(update={"restarts": failed}))
    loop = instead(loop, "job-worker-0-r1", "worker", 0, **ended(1))
    seen = plan(loop, NOW).status
    assert seen.phase == "Recovering" and seen.interruption is None, "nothing was started again yet"
    raised = plan(replace(loop, status=seen), NOW + 6).status
    assert raised.internal.worker_start == 2 and raised.interruption is not None
    assert raised.interruption.since == stamp_exact(NOW)


def test_a_runtime_that_does_not_tell_leaves_nothing_open() -> None:
    again, _ = lost()
    old = {"run": "run-1", "coordinator": {"step": 103, "mode": "sync"}}
    decided = plan(replace(again, progress=old, progress_at=NOW + 9), NOW + 9)
    assert decided.status.interruption is None and decided.status.last_recovery is None


def test_a_job_that_starts_or_resumes_has_not_recovered() -> None:
    up = running()
    assert up.status is not None and up.status.interruption is None
    again, raised = lost()
    assert raised.interruption is not None
    asleep = with_internal(raised, ready_time=None, lost_time=None).model_copy(update={"start_time": None})
    stopped = replace(again, status=asleep, processes=())
    resumed = plan(stopped, NOW + 60).status
    assert resumed.interruption is None and resumed.restarts == raised.restarts
