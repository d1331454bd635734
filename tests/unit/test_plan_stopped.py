"""Exit code 0 of a process that was told to end: it has stopped, and its script may not be through.

- Workers that shard 0 names as hung: ended, started again and counted, where the job has a limit and the very process is named.
- Pods that are going: an ended one that somebody keeps holds up neither a suspension nor a resume, and who keeps it is named.

A job that continues from another one by its name: what it waits for, what it is pinned to, and that nothing moves it after that.

- A suspended job may be placed anew: what counts as placement, and what becomes of it at the resumption.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from psjob_operator import render
from psjob_operator.api.status import JobStatus
from psjob_operator.contract import EXIT_DEVICE_LOST, EXIT_HUNG
from psjob_operator.plan.actions import CreateProcess, DeleteProcess, EnsureConfig, Plan
from psjob_operator.plan.observed_state import ObservedState, Process, ResumeSource
from psjob_operator.plan.plan import plan
from psjob_operator.plan.pods import HUNG_GRACE, LOOK_SECONDS, templates_digest
from tests.unit.plan_given import NOW, UID, ended, job, names, pinned_of, pod, running, said, with_internal

TOLD: list[tuple[str, dict[str, Any], str]] = [
    ("deleted by hand", {"deleting": NOW + 30}, "Deleted"),
    ("deleted, and its pod is gone", {"deleting": NOW - 1, "gone": True}, "Deleted"),
    ("drained", {"deleting": NOW + 30, "pod_reason": "EvictionByEvictionAPI"}, "Drained"),
    ("preempted", {"deleting": NOW + 30, "pod_reason": "PreemptionByScheduler"}, "Preempted"),
    ("its node shuts down", {"pod_reason": "Terminated"}, "NodeShutdown"),
]


@pytest.mark.parametrize(("seen", "cause"), [row[1:] for row in TOLD], ids=[row[0] for row in TOLD])
def test_exit_0_after_it_was_told_to_end_is_no_success(seen: dict[str, Any], cause: str) -> None:
    decided = plan(running(worker_1=pod("worker", 1, **ended(0, at=NOW), **seen)), NOW + 60)
    assert decided.status.workers.succeeded_indexes == ""
    assert names(decided) == ["job-worker-1-r2"]
    assert decided.status.restarts.causes == {cause: 1} and decided.status.restarts.counted == 0


def told(state: str, rank: int = 1, run: str = UID) -> dict[str, Any]:
    return {"run": run, "coordinator": {"step": 9, "workers": [{"rank": rank, "clock": 9, "state": state, "start": 1}]}}


@pytest.mark.parametrize(
    ("progress", "through"),
    [
        (told("left"), True),
        (told("joined"), False),
        (told("lost"), False),
        (told("left", rank=0), False),
        (told("left", run="other"), False),
    ],
)
def test_shard_0_knows_who_was_through(progress: dict[str, Any], through: bool) -> None:
    leaving = pod("worker", 1, **ended(0), deleting=NOW + 30)
    decided = plan(replace(running(worker_1=leaving), progress=progress, progress_at=NOW), NOW)
    assert (decided.status.workers.succeeded_indexes == "1") == through
    assert bool(names(decided)) != through


def test_a_success_that_was_stored_before_stays_one() -> None:
    snapshot = running(worker_1=pod("worker", 1, **ended(0)))
    stored = plan(snapshot, NOW).status
    assert stored.workers.succeeded_indexes == "1"
    gone = pod("worker", 1, **ended(0), deleting=NOW, gone=True)
    later = plan(
        replace(snapshot, status=stored, processes=tuple(gone if it.name == gone.name else it for it in snapshot.processes)), NOW + 9
    )
    assert later.status.workers.succeeded_indexes == "1" and not names(later)


def test_shards_that_are_through_say_so_of_their_workers() -> None:
    over = {f"shard_{index}": pod("shard", index, **ended(0)) for index in (0, 1)}
    done = {f"worker_{index}": pod("worker", index, **ended(0), deleting=NOW + 30) for index in (0, 1, 2)}
    assert plan(running(**over, **done), NOW).status.phase == "Complete"
    assert plan(running(job(checkpoint={"disabled": True}), **over, **done), NOW).status.phase == "Complete"


def suspended(snapshot: ObservedState, wanted: bool | None) -> ObservedState:
    return replace(snapshot, spec=snapshot.spec.model_copy(update={"suspend": wanted}), generation=snapshot.generation + 1)


@pytest.mark.parametrize("which", [(0,), (0, 2), (0, 1, 2)])
def test_a_worker_that_a_suspension_ended_with_0_is_made_at_the_resumption(which: tuple[int, ...]) -> None:
    snapshot = suspended(running(), True)
    begun = plan(snapshot, NOW)
    leaving = tuple(
        replace(it, deleting=NOW + 30, **(ended(0, at=NOW + 1) if it.role == "worker" and it.index in which else ended(75)))
        for it in snapshot.processes
    )
    ending = plan(replace(snapshot, status=begun.status, processes=leaving), NOW + 2)
    assert ending.status.workers.succeeded_indexes == ""
    asleep = plan(replace(snapshot, status=ending.status, processes=()), NOW + 9)
    assert asleep.status.phase == "Suspended"
    resumed = plan(suspended(replace(snapshot, status=asleep.status, processes=()), None), NOW + 100)
    assert [name for name in names(resumed) if "worker" in name] == [f"job-worker-{index}-r2" for index in (0, 1, 2)]


def limited(told: Any, limit: int | None = 5, **changes: Any) -> ObservedState:
    """The job in full swing, with a limit for steps; shard 0 tells `told` of who hangs."""
    snapshot = running(job(workers={} if limit is None else {"progressDeadlineSeconds": limit}), **changes)
    return replace(snapshot, progress={"run": UID, "coordinator": {"step": 3, "hung": told}}, progress_at=NOW)


def test_a_worker_that_is_named_is_ended_and_started_again_and_counted() -> None:
    decided = plan(limited([{"rank": 1, "start": 1, "seconds": 6.2}]), NOW)
    assert names(decided) == ["job-worker-1-r2"] and decided.intent
    assert decided.status.restarts.causes == {"Hung": 1} and decided.status.restarts.counted == 1
    (gone,) = [action for action in decided.actions if isinstance(action, DeleteProcess)]
    assert (gone.name, gone.grace_seconds) == ("job-worker-1-r1", HUNG_GRACE)
    assert "no step for 6 s" in decided.events[0].message


@pytest.mark.parametrize(
    "told",
    [
        [],
        None,
        "x",
        [{"rank": 1, "start": 2, "seconds": 6.0}],
        [{"rank": 9, "start": 1, "seconds": 6.0}],
        [{"rank": True, "start": 1, "seconds": 6.0}],
        [{"rank": 1, "start": 1, "seconds": "x"}, {}, 3],
    ],
)
def test_another_process_or_an_odd_word_changes_nothing(told: Any) -> None:
    decided = plan(limited(told), NOW)
    assert not decided.intent and names(decided) == [] and decided.status.restarts.total == 0


def test_without_a_limit_nobody_is_ended() -> None:
    assert not plan(limited([{"rank": 1, "start": 1, "seconds": 6.2}], limit=None), NOW).intent


@pytest.mark.parametrize(("code", "cause"), [(EXIT_HUNG, "Hung"), (EXIT_DEVICE_LOST, "DeviceLost")])
def test_what_the_runtime_says_of_a_failure_is_its_cause_and_is_counted(code: int, cause: str) -> None:
    """A worker that was told that it hangs, and one whose GPU is lost."""
    told = '{"error": "cuda:0 is lost to this process"}'
    decided = plan(limited([], worker_1=pod("worker", 1, **ended(code, message=told))), NOW)
    assert decided.status.restarts.causes == {cause: 1} and decided.status.restarts.counted == 1
    assert any("cuda:0 is lost to this process" in it.message for it in decided.status.conditions)
    assert names(decided) == ["job-worker-1-r2"]


def test_a_worker_that_goes_on_while_its_turn_is_waited_for_is_left_alone() -> None:
    """The second failure waits some seconds for its answer; a step made meanwhile is the better one."""
    first = limited([{"rank": 1, "start": 1, "seconds": 6.2}])
    decided = plan(first, NOW)
    later = replace(
        first,
        status=decided.status,
        processes=tuple(pod("worker", 1, 2) if seat.name == "job-worker-1-r1" else seat for seat in first.processes),
    )
    named = replace(later, progress={"run": UID, "coordinator": {"step": 4, "hung": [{"rank": 0, "start": 1, "seconds": 9.0}]}})
    assert not plan(named, NOW + 5).intent
    goes_on = replace(later, progress={"run": UID, "coordinator": {"step": 5, "hung": []}})
    assert not plan(goes_on, NOW + 60).intent


KEPT = ("example.com/keep",)


def suspended_going(*left: Process, wanted: bool | None = True) -> ObservedState:
    """A job that is to be suspended, of which these pods are left."""
    up = running()
    asked = plan(replace(up, spec=job(suspend=True).spec), NOW - 60)
    return replace(up, spec=job(suspend=wanted).spec, status=asked.status, processes=left)


STUCK = pod("shard", 0, **ended(1), deleting=NOW - 50, finalizers=KEPT)
GOING = pod("shard", 0, **ended(0), deleting=NOW - 1)
ALIVE = pod("worker", 1, deleting=NOW - 50, node="n1")
HELD = pod("worker", 1, deleting=NOW - 50, node="n1", finalizers=KEPT)
SIDECAR = pod("worker", 1, **ended(0), deleting=NOW - 50, lingering=True, node="n1")


@pytest.mark.parametrize(
    ("left", "phase", "words"),
    [
        ((), "Suspended", "last checkpoint"),
        ((STUCK,), "Suspended", "pod job-shard-0-a1 has ended and is kept by its finalizer example.com/keep"),
        ((GOING,), "Suspended", "last checkpoint"),
        ((STUCK, ALIVE), "Running", "pod job-worker-1-r1 was to end by "),
        ((ALIVE,), "Running", "node n1 has not said that it ended"),
        ((HELD,), "Running", "kept by its finalizer example.com/keep"),
        ((SIDECAR,), "Running", "node n1 has not said that it ended"),
        ((replace(ALIVE, deleting=NOW + 20),), "Running", "make a last checkpoint and end"),
    ],
)
def test_what_still_runs_is_waited_for_and_named(left: tuple[Process, ...], phase: str, words: str) -> None:
    decided = plan(suspended_going(*left), NOW)
    assert decided.status.phase == phase and words in said(decided.status)["Ready"].message


def test_a_pod_that_was_not_told_to_go_is_told_though_it_has_ended() -> None:
    decided = plan(suspended_going(replace(STUCK, deleting=None)), NOW)
    assert decided.status.phase == "Running" and [action.name for action in decided.actions if hasattr(action, "uid")] == ["job-shard-0-a1"]


def test_who_is_late_is_named_at_its_time() -> None:
    decided = plan(suspended_going(replace(ALIVE, deleting=NOW + 20)), NOW)
    assert decided.wake_at is not None and NOW + 20 < decided.wake_at <= NOW + 60
    told = plan(replace(suspended_going(replace(ALIVE, deleting=NOW + 20)), status=decided.status), decided.wake_at)
    assert "was to end by" in said(told.status)["Ready"].message


@pytest.mark.parametrize("left", [(STUCK,), (STUCK, GOING), (pod("worker", 1, **ended(143), deleting=NOW - 9, finalizers=KEPT),)])
def test_a_job_is_resumed_beside_ended_pods_that_somebody_keeps(left: tuple[Process, ...]) -> None:
    down = plan(suspended_going(*left), NOW)
    assert down.status.phase == "Suspended"
    resumed = plan(replace(suspended_going(*left, wanted=None), status=down.status), NOW + 1)
    assert {"job-shard-0-a2", "job-worker-1-r2"} <= set(names(resumed))
    at_once = plan(suspended_going(*left, wanted=None), NOW)
    assert {"job-shard-0-a2", "job-worker-1-r2"} <= set(names(at_once)), "before it was seen to be Suspended too"


THERE: dict[str, Any] = {"persistentVolumeClaim": {"claimName": "first-checkpoints"}}
FOUND = ResumeSource("run-1", True, THERE)
ASKS: dict[str, Any] = {"resumeFrom": {"job": "first"}, "volume": THERE}


def asking(source: ResumeSource | None, **checkpoint: Any) -> ObservedState:
    return replace(job(checkpoint={**ASKS, **checkpoint}), resume_source=source)


def later(snapshot: ObservedState, decided: Plan, source: ResumeSource | None) -> ObservedState:
    """The snapshot after the plan's status was stored."""
    return replace(snapshot, status=decided.status, resume_source=source, written_at=NOW)


def ready(status: JobStatus) -> tuple[str, str]:
    found = status.condition("Ready")
    assert found is not None and found.status == "False"
    assert status.condition("Failed") is None
    return found.reason, found.message


@pytest.mark.parametrize(("source", "checkpoint", "reason", "words"), [
    (None, {}, "WaitingForJob", "job first is not there; this job begins when it is and has a checkpoint"),
    (ResumeSource("", False, THERE), {}, "WaitingForJob", "job first has no checkpoint yet; this job begins when it has one"),
    (ResumeSource("run-1", False, THERE), {}, "WaitingForJob", "job first has no checkpoint yet"),
    (ResumeSource("run-1", True, None), {}, "CheckpointElsewhere", "job first keeps no checkpoints (spec.checkpoint.disabled)"),
    (
        FOUND,
        {"volume": None},
        "CheckpointElsewhere",
        "job first keeps its checkpoints on claim first-checkpoints, this job on claim job-checkpoints; "
        "make this job anew with volume: {persistentVolumeClaim: {claimName: first-checkpoints}}",
    ),
    (ResumeSource("", False, {"persistentVolumeClaim": {"claimName": "other"}}), {}, "CheckpointElsewhere",
        "on claim other, this job on claim first-checkpoints"),
    (ResumeSource("run-1", True, {"nfs": {"server": "a", "path": "/b"}}), {"volume": {"nfs": {"server": "a", "path": "/c"}}},
        "CheckpointElsewhere",
        "on a volume of kind nfs, this job on a volume of kind nfs; make this job anew with volume: {nfs: as there}"),
])  # fmt: skip
def test_what_is_in_the_way_is_named_and_waited_for(
    source: ResumeSource | None, checkpoint: dict[str, Any], reason: str, words: str
) -> None:
    snapshot = asking(source, **checkpoint)
    decided = plan(snapshot, NOW)
    said, message = ready(decided.status)
    assert said == reason and words in message and len(message) <= 256
    assert decided.actions == () and decided.wake_at is not None and decided.wake_at <= NOW + LOOK_SECONDS
    assert decided.status.phase == "Pending" and pinned_of(decided.status).resumed_from is None
    again = plan(replace(later(snapshot, decided, source)), NOW + 3600)
    assert ready(again.status)[0] == reason and again.actions == (), "it never ends by itself"


@pytest.mark.parametrize(
    ("volume", "there"),
    [
        (THERE, THERE),
        ({"persistentVolumeClaim": {"claimName": "first-checkpoints", "readOnly": False}}, THERE),
        ({"nfs": {"server": "a", "path": "/b"}}, {"nfs": {"server": "a", "path": "/b"}}),
    ],
)
def test_it_begins_from_the_run_that_is_found_and_is_pinned_to_it(volume: dict[str, Any], there: dict[str, Any]) -> None:
    snapshot = asking(ResumeSource("run-1", True, there), volume=volume)
    decided = plan(snapshot, NOW)
    assert pinned_of(decided.status).resumed_from == "run-1" and decided.intent
    (action,) = [action for action in decided.actions if isinstance(action, EnsureConfig)]
    assert action.resumed_from == "run-1" and any(isinstance(it, CreateProcess) for it in decided.actions)
    config = json.loads(render.config(snapshot, action.format, action.encryption, action.resumed_from)["data"]["config.json"])
    assert config["checkpoint"]["resumeFrom"] == {"path": "/psjob-checkpoints/run-1"}


@pytest.mark.parametrize("source", [None, ResumeSource("run-2", True, THERE), ResumeSource("", False, None)], ids=["gone", "anew", "other"])
def test_what_becomes_of_the_other_job_later_changes_nothing(source: ResumeSource | None) -> None:
    snapshot = asking(FOUND)
    decided = plan(snapshot, NOW)
    after = plan(later(snapshot, decided, source), NOW + 1)
    assert pinned_of(after.status) == pinned_of(decided.status)
    assert {it.resumed_from for it in after.actions if isinstance(it, EnsureConfig)} <= {"run-1"}


def test_it_begins_when_the_wait_is_over_and_counts_no_restart() -> None:
    snapshot = asking(None)
    waiting = plan(snapshot, NOW)
    begun = plan(replace(later(snapshot, waiting, FOUND), live=True), NOW + 60)
    assert pinned_of(begun.status).resumed_from == "run-1" and begun.intent
    assert any(isinstance(it, CreateProcess) for it in begun.actions) and begun.status.restarts.total == 0


def test_a_job_that_was_suspended_goes_on_from_its_own_run() -> None:
    """A resumed run is pinned anew, and its first checkpoint stays what it was."""
    snapshot = asking(FOUND)
    begun = plan(snapshot, NOW).status
    suspended = begun.model_copy(update={"start_time": None})
    decided = plan(replace(snapshot, status=suspended, resume_source=None, live=True), NOW + 60)
    assert pinned_of(decided.status).resumed_from == "run-1"
    assert pinned_of(decided.status).key == 2


def test_a_run_by_its_uid_waits_for_nothing() -> None:
    decided = plan(asking(None, resumeFrom={"run": "run-0"}, volume=None), NOW)
    assert pinned_of(decided.status).resumed_from == "run-0"
    assert [it.resumed_from for it in decided.actions if isinstance(it, EnsureConfig)] == ["run-0"]
    anew = plan(job(), NOW)
    assert pinned_of(anew.status).resumed_from is None
    assert not any(isinstance(it, EnsureConfig) for it in anew.actions), "the config that is there is right"


Template = dict[str, Any]


def laid(base: Template, over: Template) -> Template:
    made = deepcopy(base)
    for key, value in over.items():
        made[key] = laid(made[key], value) if isinstance(value, dict) and isinstance(made.get(key), dict) else value
    return made


PLACED: list[tuple[str, Template]] = [
    ("labels", {"metadata": {"labels": {"team": "a"}}}),
    ("annotations", {"metadata": {"annotations": {"a": "b"}}}),
    ("nodeSelector", {"spec": {"nodeSelector": {"pool": "spot"}}}),
    ("tolerations", {"spec": {"tolerations": [{"operator": "Exists"}]}}),
    ("affinity", {"spec": {"affinity": {"nodeAffinity": {}}}}),
    ("schedulingGates", {"spec": {"schedulingGates": [{"name": "example.com/gate"}]}}),
]
OTHER: list[tuple[str, Template]] = [
    ("image", {"spec": {"containers": [{"name": "worker", "image": "me/other:2", "command": ["python", "train.py"]}]}}),
    ("a volume", {"spec": {"volumes": [{"name": "data", "emptyDir": {}}]}}),
    ("priorityClassName", {"spec": {"priorityClassName": "high"}}),
    ("finalizers", {"metadata": {"finalizers": ["example.com/a"]}}),
]


def asleep() -> ObservedState:
    """A job that ran and was suspended."""
    snapshot = running()
    stops = replace(snapshot, spec=snapshot.spec.model_copy(update={"suspend": True}))
    told = plan(stops, NOW).status
    over = plan(replace(stops, status=told, processes=()), NOW + 9).status
    assert over.phase == "Suspended"
    return replace(stops, status=over, processes=())


def changed(snapshot: ObservedState, over: Template, role: str = "workers", suspend: bool | None = None) -> ObservedState:
    spec = snapshot.spec
    part = spec.workers if role == "workers" else spec.shards
    made = part.model_copy(update={"template": laid(part.template or {}, over)})
    return replace(snapshot, spec=spec.model_copy(update={role: made, "suspend": suspend}), generation=snapshot.generation + 1)


@pytest.mark.parametrize("role", ["workers", "shards"])
@pytest.mark.parametrize("over", [row[1] for row in PLACED], ids=[row[0] for row in PLACED])
def test_what_places_pods_takes_effect_at_the_resumption(over: Template, role: str) -> None:
    slept = asleep()
    resumed = changed(slept, over, role)
    assert templates_digest(resumed.spec) == templates_digest(slept.spec)
    decided = plan(resumed, NOW + 100)
    assert len(names(decided)) == 5
    wanted = "worker" if role == "workers" else "shard"
    action = next(it for it in decided.actions if isinstance(it, CreateProcess) and it.role == wanted)
    pod = render.Pods(resumed, 65532).pod(action)
    for part, fields in over.items():
        for name, value in fields.items():
            there = pod[part][name]
            if name == "tolerations":
                assert value[0] in there
            elif isinstance(value, dict):
                assert value.items() <= there.items()
            else:
                assert there == value


@pytest.mark.parametrize("role", ["workers", "shards"])
@pytest.mark.parametrize("over", [row[1] for row in OTHER], ids=[row[0] for row in OTHER])
def test_a_run_is_not_resumed_as_another_program(over: Template, role: str) -> None:
    held = changed(asleep(), over, role)
    decided = plan(held, NOW + 100)
    assert not decided.actions and decided.status.phase == "Suspended"
    stalled = said(decided.status)["Stalled"]
    assert stalled.reason == "TemplateChanged" and "Set spec.suspend to true, put it back" in stalled.message
    # Put back, it continues.
    again = plan(replace(asleep(), status=decided.status, spec=running().spec), NOW + 200)
    assert len(names(again)) == 5 and "Stalled" not in said(again.status)


def test_a_job_that_never_ran_may_become_any_other_before_it_does() -> None:
    made = job(suspend=True)
    slept = replace(made, status=plan(made, NOW).status)
    decided = plan(changed(slept, OTHER[0][1]), NOW + 9)
    assert len(names(decided)) == 5


def test_a_status_of_an_older_operator_has_no_digest_and_gets_one() -> None:
    snapshot = running()
    assert snapshot.status is not None
    old = with_internal(snapshot.status, pinned=pinned_of(snapshot.status).model_copy(update={"templates": None}))
    decided = plan(replace(snapshot, status=old), NOW)
    assert pinned_of(decided.status).templates == templates_digest(snapshot.spec)
