"""Policies one by one: backoff, refusals, objects around the pods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psjob_operator.api.status import CheckpointStatus, stamp, unix
from psjob_operator.contract import EXIT_RETRY
from psjob_operator.plan.actions import CreateProcess, DeleteJob, EnsureClaim, EnsureConfig, EnsureService
from psjob_operator.plan.observed_state import Claim, Exit, Objects, ObservedState, Process, Refusal
from psjob_operator.plan.plan import plan
from psjob_operator.render.objects import pods_of
from tests.unit.api_manifest import MY_CLAIM
from tests.unit.plan_given import NOW, after, deleted, ended, job, names, pod, running, said, stands


def counted(snapshot: ObservedState, failures: int, at: float) -> ObservedState:
    assert snapshot.status is not None
    restarts = snapshot.status.restarts.model_copy(update={"total": failures, "counted": failures, "last_counted": stamp(at)})
    return replace(snapshot, status=snapshot.status.model_copy(update={"restarts": restarts}))


# ---- first sight -------------------------------------------------------------------------------------------------------------------


def test_first_sight_is_one_intent_and_everything_in_one_turn() -> None:
    decided = plan(job(objects=Objects()), NOW)
    assert decided.intent and not decided.needs_live
    assert [type(action) for action in decided.actions[:3]] == [EnsureService, EnsureConfig, EnsureClaim]
    assert names(decided) == ["job-shard-0-a1", "job-shard-1-a1", "job-worker-0-r1", "job-worker-1-r1", "job-worker-2-r1"]
    assert decided.grants == set(names(decided))
    status = decided.status
    assert (status.run, status.internal.term, status.internal.worker_start, status.phase) == ("run-1", 1, 1, "Pending")
    assert status.observed_generation == 1 and status.start_time == stamp(NOW)
    assert stands(status) == {"Ready": "False", "Reconciling": "True"}
    assert not decided.events
    assert status.selector == ",".join(f"{label}={value}" for label, value in pods_of(job(), "worker").items())
    assert (status.replicas, plan(running(), NOW).status.replicas) == (0, 3)


def test_a_status_of_another_run_gives_only_minimum_numbers() -> None:
    old = running(shard_0=pod("shard", 0, **ended(1)))
    old_status = plan(old, NOW).status.model_copy(update={"run": "another", "phase": "Complete", "completion_time": stamp(NOW)})
    decided = plan(job(status=old_status), NOW)
    assert decided.status.run == "run-1" and decided.status.phase == "Pending"
    assert [shard.attempt for shard in decided.status.shards] == [3, 2]
    assert (decided.status.internal.term, decided.status.internal.worker_start) == (3, 2)
    assert decided.status.restarts.total == 0 and decided.status.checkpoint is None
    assert names(decided)[0] == "job-shard-0-a3"


def test_nothing_is_done_to_a_job_of_another_controller_or_one_that_goes() -> None:
    for snapshot in (job(managedBy="kueue.x-k8s.io/multikueue"), job(deleting=True), replace(running(shard_0=None), deleting=True)):
        decided = plan(snapshot, NOW)
        assert not decided.actions and not decided.intent and decided.status == (snapshot.status or decided.status)
    assert names(plan(job(managedBy="psjob.dev/operator"), NOW))


# ---- backoff -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("failures", "wait"), [(0, 0), (1, 10), (2, 20), (3, 40), (5, 160), (6, 320), (7, 360), (60, 360)])
def test_each_further_failure_waits_longer(failures: int, wait: int) -> None:
    failing = running(job(runPolicy={"backoffLimit": 1000}), worker_1=pod("worker", 1, **ended(1, log_tail="boom")))
    snapshot = counted(failing, failures, NOW)
    assert plan(snapshot, NOW + wait).intent
    if wait:
        held = plan(snapshot, NOW + wait - 1)
        assert not held.intent and held.wake_at == NOW + wait
        assert said(held.status)["Ready"].reason == "BackOff"
        assert stamp(NOW + wait) in said(held.status)["Ready"].message
        assert after(snapshot, held, NOW + wait - 0.5).status == held.status


@pytest.mark.parametrize(
    ("age", "since", "at_once"),
    [(90, 0.2, True), (90, 3, True), (90, 4, False), (2, 0.2, False)],
    ids=["with it", "just after it", "another event", "a crash loop"],
)
def test_what_fails_with_the_failure_counted_last_does_not_wait(age: float, since: float, at_once: bool) -> None:
    """A node takes several processes with it; a process that was only just started again waits."""
    failing = counted(running(worker_1=pod("worker", 1, created=NOW - age, **ended(1))), 3, NOW - since)
    assert names(plan(failing, NOW)) == (["job-worker-1-r2"] if at_once else [])


@pytest.mark.parametrize(("age", "at_once"), [(90, True), (2, False)], ids=["ran for a while", "a crash loop"])
def test_what_fails_after_a_commit_does_not_wait(age: float, at_once: bool) -> None:
    """The job continued since the last counted failure."""
    kept = CheckpointStatus(step=40, time=stamp(NOW - 10), bytes=1, path="m")
    failing = counted(running(worker_1=pod("worker", 1, created=NOW - age, **ended(1))), 3, NOW - 20)
    assert failing.status is not None
    assert not names(plan(failing, NOW))
    went_on = replace(failing, status=failing.status.model_copy(update={"checkpoint": kept}))
    assert names(plan(went_on, NOW)) == (["job-worker-1-r2"] if at_once else [])


def test_what_does_not_count_does_not_wait_for_what_does() -> None:
    both = counted(running(worker_0=pod("worker", 0, **ended(1)), worker_1=pod("worker", 1, deleting=NOW)), 2, NOW)
    assert names(plan(both, NOW + 4)) == ["job-worker-1-r2"]


def test_uncounted_losses_of_a_young_pod_are_spaced() -> None:
    young = running(worker_0=pod("worker", 0, created=NOW - 1, phase="Failed", started=None, pod_reason="OutOfcpu"))
    held = plan(young, NOW)
    assert not held.intent and held.wake_at == NOW + 9
    assert plan(young, NOW + 9).intent
    assert plan(running(worker_0=pod("worker", 0, created=NOW - 1, deleting=NOW)), NOW).intent


def test_starts_that_end_at_once_by_no_fault_of_theirs_come_ever_later() -> None:
    waits = []
    snapshot, number, waited, now = running(), 1, 0, NOW
    for _ in range(6):
        turned_away = pod("worker", 0, number, created=now, phase="Failed", started=None, pod_reason="OutOfcpu", waited=waited)
        others = tuple(it for it in snapshot.processes if (it.role, it.index) != ("worker", 0))
        snapshot = replace(snapshot, processes=(*others, turned_away))
        waits.append(next(after for after in range(200) if names(plan(snapshot, now + after))))
        decided = plan(snapshot, now + waits[-1])
        (made,) = (it for it in decided.actions if isinstance(it, CreateProcess))
        snapshot, number, waited, now = replace(snapshot, status=decided.status), made.number, made.waited, now + waits[-1]
    assert waits == [10, 20, 40, 80, 120, 120]
    assert plan(snapshot, now).status.restarts.counted == 0
    lasted = Exit(137, reason="Error", at=now + 70)
    drained = pod("worker", 0, number, created=now, started=now + 1, phase="Failed", exit=lasted, pod_reason="Preempting", waited=waited)
    others = tuple(it for it in snapshot.processes if (it.role, it.index) != ("worker", 0))
    assert names(plan(replace(snapshot, processes=(*others, drained)), now + 71)), "it ran for a minute: the next is not held back for long"


@pytest.mark.parametrize(("commit", "after"), [(None, 80), (-1, 80), (20, 10)])
def test_a_start_that_training_came_to_a_checkpoint_with_is_no_loop(commit: int | None, after: int) -> None:
    """A node that is reset again and again, while the job continues between."""
    reset = Exit(255, reason="Unknown", at=NOW + 25)
    lost = pod("worker", 0, created=NOW - 5, started=NOW, phase="Failed", exit=reset, waited=40)
    snapshot = running(worker_0=lost)
    if commit is not None:
        assert snapshot.status is not None
        kept = CheckpointStatus(step=50, time=stamp(NOW + commit), path="run-1/step-50")
        snapshot = replace(snapshot, status=snapshot.status.model_copy(update={"checkpoint": kept}))
    (due,) = [it for it in range(26, 200) if names(plan(snapshot, NOW + it))][:1]
    assert due == max(26, after - 5)


def test_one_failure_too_many_fails_the_job_and_says_why() -> None:
    crash = pod("worker", 1, **ended(3, log_tail="ValueError: no such column"))
    snapshot = counted(running(job(runPolicy={"backoffLimit": 2}), worker_1=crash), 2, NOW)
    decided = plan(snapshot, NOW + 1)
    failed = said(decided.status)["Failed"]
    assert failed.reason == "BackoffLimitExceeded"
    for word in ("worker 1", "container worker", "exit code 3", "no such column", "failures: 3", "backoffLimit: 2"):
        assert word in failed.message
    assert decided.status.phase == "Failed" and decided.status.workers.failed_indexes == "1"
    assert decided.status.restarts == snapshot.status.restarts if snapshot.status else False


def test_a_limit_of_zero_allows_no_failure() -> None:
    assert plan(running(job(runPolicy={"backoffLimit": 0}), shard_0=pod("shard", 0, **ended(1))), NOW).status.phase == "Failed"
    assert plan(running(job(runPolicy={"backoffLimit": 0}), shard_0=pod("shard", 0, **ended(EXIT_RETRY))), NOW).status.phase == "Recovering"


@pytest.mark.parametrize("ahead", [-600.0, 0.0, 600.0])
def test_a_clock_that_is_wrong_forgets_no_failure_and_hides_no_crash_loop(ahead: float) -> None:
    """Shard 0's node is ten minutes ahead, or behind: the checkpoint's age counts, not its time."""
    failing = running(job(runPolicy={"backoffLimit": 6}), worker_1=pod("worker", 1, **ended(1)))

    def told(age: float) -> dict[str, object]:
        kept = {"step": 5, "time": NOW + ahead - age, "age": age, "term": 1, "bytes": 1, "path": "p"}
        return {"run": "run-1", "coordinator": {"step": 9, "checkpoint": kept}}

    young = counted(replace(failing, progress=told(30.0), progress_at=NOW), 6, NOW - 20)
    assert plan(young, NOW).status.phase == "Failed", "no commit since the last failure, and far from ten minutes of them"
    checkpoint = plan(replace(young, spec=job(runPolicy={"backoffLimit": 60}).spec), NOW).status.checkpoint
    assert checkpoint is not None and checkpoint.time == stamp(NOW - 30)
    calm = counted(replace(failing, progress=told(1.0), progress_at=NOW), 6, NOW - 700)
    assert plan(calm, NOW).status.restarts.counted == 1, "ten minutes of commits after it"


def test_ten_minutes_of_commits_forget_failures() -> None:
    told = {"run": "run-1", "coordinator": {"step": 9, "checkpoint": {"step": 5, "time": NOW, "term": 1, "bytes": 1, "path": "p"}}}
    failing = running(job(runPolicy={"backoffLimit": 6}), worker_1=pod("worker", 1, **ended(1)))
    kept = plan(counted(replace(failing, progress=told), 6, NOW - 599), NOW)
    assert kept.status.phase == "Failed"
    forgotten = plan(counted(replace(failing, progress=told), 6, NOW - 600), NOW)
    assert forgotten.status.restarts.counted == 1 and forgotten.intent
    assert forgotten.status.restarts.last_reset == stamp(NOW)


# ---- refusals and objects ----------------------------------------------------------------------------------------------------------


def refused(code: int, message: str, tries: int = 1) -> ObservedState:
    snapshot = running(worker_1=None)
    decided = plan(snapshot, NOW)
    name = "job-worker-1-r2"
    refusal = Refusal(name, code, message, NOW, tries)
    return replace(snapshot, status=decided.status, granted=frozenset({name}), refusals=(refusal,))


def test_a_namespace_that_goes_is_named_as_the_reason() -> None:
    words = 'pods "job-worker-1-r2" is forbidden: unable to create new content in namespace ns because it is being terminated'
    ready = said(plan(refused(403, words), NOW + 1).status)["Ready"]
    assert ready.reason == "NamespaceTerminating" and words in ready.message


@pytest.mark.parametrize(("tries", "wait"), [(1, 3), (2, 6), (3, 10), (99, 10)])
def test_what_is_refused_is_asked_again(tries: int, wait: int) -> None:
    snapshot = refused(403, "exceeded quota: gpus, requested: nvidia.com/gpu=1", tries)
    held = plan(snapshot, NOW + wait - 1)
    assert not names(held) and held.wake_at == NOW + wait
    assert said(held.status)["Ready"].reason == "CreateRefused" and "exceeded quota" in said(held.status)["Ready"].message
    assert names(plan(snapshot, NOW + wait)) == ["job-worker-1-r2"]
    assert held.status.restarts.counted == 0


def invalid(name: str) -> Refusal:
    return Refusal(name, 422, "spec.containers[0].image: Required value", NOW, 1, invalid=True)


def test_a_template_that_was_never_taken_and_is_invalid_fails_the_job() -> None:
    first = plan(job(), NOW)
    shards = tuple(pod("shard", index, phase="Pending", started=None, ready=False) for index in range(2))
    begun = replace(job(), status=first.status, processes=shards, granted=frozenset({"job-worker-1-r1"}))
    decided = plan(replace(begun, refusals=(invalid("job-worker-1-r1"),)), NOW + 1)
    assert said(decided.status)["Failed"].reason == "TemplateInvalid"
    assert "Required value" in said(decided.status)["Failed"].message
    one_is_there = replace(begun, processes=(*shards, pod("worker", 0)), refusals=(invalid("job-worker-1-r1"),))
    assert plan(one_is_there, NOW + 1).status.phase == "Pending", "the API server has taken a worker of this template"


@pytest.mark.parametrize("code", [400, 403, 418, 422, 500])
def test_a_denial_of_a_restart_is_waited_for_whatever_its_code(code: int) -> None:
    words = "ValidatingAdmissionPolicy 'frozen' with binding 'frozen' denied request: nothing new today"
    decided = plan(refused(code, words), NOW + 1)
    assert decided.status.phase == "Recovering" and words in said(decided.status)["Ready"].message
    assert decided.status.restarts.counted == 0 and decided.wake_at == NOW + 3
    snapshot = refused(422, "spec.x: Invalid value")
    assert plan(replace(snapshot, refusals=(invalid("job-worker-1-r2"),)), NOW + 1).status.phase == "Recovering", (
        "the template was taken before"
    )


def test_a_name_that_is_held_waits() -> None:
    decided = plan(refused(409, "pod exists and is terminating"), NOW + 1)
    assert said(decided.status)["Ready"].reason == "NameConflict" and decided.wake_at == NOW + 3


def test_a_grant_of_another_process_is_worth_nothing() -> None:
    snapshot = replace(refused(403, "no"), granted=frozenset(), refusals=())
    assert names(plan(snapshot, NOW)) == ["job-worker-1-r3"]


@pytest.mark.parametrize(
    "objects", [Objects(strangers=("ConfigMap/job-config",)), Objects(service=True, claim=Claim("job-checkpoints", ours=False, bound=True))]
)
def test_strangers_under_our_names_stop_all_creates(objects: Objects) -> None:
    decided = plan(job(objects=objects), NOW)
    assert not decided.actions and said(decided.status)["Ready"].reason == "NameConflict"
    freed = plan(job(status=decided.status), NOW)
    assert len(names(freed)) == 5 and freed.status.internal.term == 1 and freed.status.restarts.total == 0


def test_an_object_that_is_refused_shows_the_servers_words() -> None:
    refusal = Refusal("job-checkpoints", 403, "exceeded quota: storage", NOW, 1)
    decided = plan(job(objects=Objects(), refusals=(refusal,)), NOW)
    ready = said(decided.status)["Ready"]
    assert ready.reason == "CreateRefused" and ready.message == "job-checkpoints: exceeded quota: storage"


def test_a_refused_config_of_a_running_job_is_told_while_it_is_wanted() -> None:
    up = running()
    edited = replace(up, spec=job(training={"mode": "async"}).spec, refusals=(Refusal("job-config", 403, "not today", NOW, 1),))
    ready = said(plan(edited, NOW).status)["Ready"]
    assert (ready.status, ready.reason, ready.message) == ("True", "CreateRefused", "job-config: not today")
    taken_back = plan(replace(edited, spec=up.spec), NOW)
    assert said(taken_back.status)["Ready"].reason == "Running"


def test_missing_objects_are_made_again() -> None:
    assert [type(action) for action in plan(replace(running(), objects=Objects()), NOW).actions] == [
        EnsureService,
        EnsureConfig,
        EnsureClaim,
    ]


def test_no_claim_where_the_spec_names_a_volume_or_keeps_nothing() -> None:
    for checkpoint in (MY_CLAIM, {"disabled": True}):
        kinds = {type(action) for action in plan(job(checkpoint=checkpoint, objects=Objects()), NOW).actions}
        assert EnsureClaim not in kinds and EnsureConfig in kinds


def test_a_claim_that_cannot_bind_tells_why() -> None:
    claim = Claim("job-checkpoints", ours=True, bound=False, message='storageclass "fast" not found')
    base = job()
    decided = plan(replace(base, objects=replace(base.objects, claim=claim)), NOW)
    status = said(decided.status)
    assert status["CheckpointReady"].reason == "ClaimPending" and "fast" in status["CheckpointReady"].message
    assert status["Ready"].reason == "ClaimPending"


GOING = Claim("job-checkpoints", ours=True, bound=True, deleting=True)


@pytest.mark.parametrize(
    ("checkpoint", "objects", "reason", "name"),
    [
        ({}, {"claim": GOING}, "ClaimTerminating", "job-checkpoints"),
        ({}, {"claim": replace(GOING, bound=False)}, "ClaimTerminating", "job-checkpoints"),
        (MY_CLAIM, {"claim": None, "named": "going"}, "ClaimTerminating", "mine"),
        (MY_CLAIM, {"claim": None, "named": "missing"}, "ClaimMissing", "mine"),
        (MY_CLAIM, {"claim": GOING}, "Committed", ""),
    ],
)
def test_a_claim_that_goes_is_no_place_for_checkpoints(checkpoint: dict[str, Any], objects: dict[str, Any], reason: str, name: str) -> None:
    up = running(job(checkpoint=checkpoint))
    assert up.status is not None
    kept = CheckpointStatus(step=7, time="2026-01-01T00:00:00Z")
    up = replace(up, status=up.status.model_copy(update={"checkpoint": kept}), objects=replace(up.objects, **objects))
    told = said(plan(up, NOW).status)["CheckpointReady"]
    assert (told.status, told.reason) == ("True" if reason == "Committed" else "False", reason) and name in told.message


def test_a_suspension_says_that_the_checkpoints_go_with_it() -> None:
    up = running()
    assert up.status is not None
    kept = up.status.model_copy(update={"checkpoint": CheckpointStatus(step=7, time="2026-01-01T00:00:00Z")})
    asked = replace(up, spec=job(suspend=True).spec, status=kept, objects=replace(up.objects, claim=GOING))
    ending = plan(asked, NOW)
    assert "claim job-checkpoints is being deleted" in said(ending.status)["Ready"].message
    assert (ending.events[0].type, ending.events[0].reason) == ("Warning", "Suspending")
    for claim, words in (
        (GOING, "nothing is left to continue from"),
        (None, "has gone with its checkpoints"),
        (up.objects.claim, "its last checkpoint"),
    ):
        over = plan(replace(asked, processes=(), status=ending.status, objects=replace(up.objects, claim=claim)), NOW)
        assert words in said(over.status)["Suspended"].message


# ---- without checkpoints -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [pod("shard", 1, **ended(1)), pod("shard", 1, deleting=NOW), None])
def test_without_checkpoints_a_lost_shard_fails_the_job(lost: Process | None) -> None:
    decided = plan(running(job(checkpoint={"disabled": True}), shard_1=lost), NOW)
    failed = said(decided.status)["Failed"]
    assert failed.reason == "ShardLost" and "shard 1" in failed.message and "spec.checkpoint.disabled" in failed.message
    assert said(decided.status)["CheckpointReady"].reason == "Disabled"


def test_without_checkpoints_a_shard_that_never_began_is_just_started() -> None:
    first = plan(job(checkpoint={"disabled": True}), NOW)
    snapshot = job(checkpoint={"disabled": True}, status=first.status, granted=frozenset(names(first)) - {"job-shard-1-a1"})
    assert "job-shard-1-a2" in names(plan(snapshot, NOW + 20))


# ---- a spec that cannot be read ----------------------------------------------------------------------------------------------------


def test_a_bad_spec_fails_a_new_job_and_leaves_a_running_one_alone() -> None:
    problems = ("spec.workers.template: has no container",)
    decided = plan(job(spec_problems=problems, objects=Objects()), NOW)
    assert decided.status.phase == "Failed" and said(decided.status)["Stalled"].reason == "TemplateInvalid"
    assert problems[0] in said(decided.status)["Failed"].message and not decided.actions
    other = plan(job(spec_problems=("spec.checkpoint.volume: x", *problems), objects=Objects()), NOW)
    assert said(other.status)["Failed"].reason == "SpecInvalid"
    going = plan(replace(running(shard_0=None), spec_problems=problems), NOW)
    assert going.status.phase == "Running" and not going.actions and not going.intent
    assert stands(going.status) == {"Ready": "False", "Stalled": "True"}
    cured = plan(replace(running(), status=going.status), NOW)
    assert stands(cured.status) == {"Ready": "True"}


def test_a_stalled_job_ends_is_suspended_and_keeps_its_deadline() -> None:
    """Only creates need a spec that can be read."""
    problems = ("spec.training.lrScaling: linear is for mode sync",)
    over = {f"worker_{index}": pod("worker", index, **ended(0)) for index in range(3)}
    over |= {f"shard_{index}": pod("shard", index, **ended(0)) for index in range(2)}
    done = plan(replace(running(**over), spec_problems=problems), NOW)  # type: ignore[arg-type]
    assert done.status.phase == "Complete"
    paused = plan(replace(running(job(suspend=True)), spec_problems=problems), NOW)
    assert len(deleted(paused)) == 5
    timed = replace(running(job(runPolicy={"activeDeadlineSeconds": 500})), spec_problems=problems)
    end = (unix(timed.status.start_time) or 0.0) + 500 if timed.status else 0.0
    assert plan(timed, end - 1).wake_at == end
    assert said(plan(timed, end).status)["Failed"].reason == "DeadlineExceeded"
    ttl = replace(running(job(runPolicy={"ttlSecondsAfterFinished": 9}), **over), spec_problems=problems)  # type: ignore[arg-type]
    assert plan(replace(ttl, status=plan(ttl, NOW).status), NOW + 10).actions == (DeleteJob(),)


def test_a_stalled_job_goes_on_telling_its_progress() -> None:
    told = {"run": "run-1", "coordinator": {"step": 41, "checkpoint": {"step": 40, "time": NOW - 5}}}
    stalled = plan(replace(running(), spec_problems=("spec.x: no",), progress=told, progress_at=NOW), NOW)
    assert stalled.status.progress is not None and stalled.status.progress.step == 41
    assert stalled.status.checkpoint is not None and stalled.status.checkpoint.step == 40


def test_another_mode_is_written_into_the_config_and_touches_no_process() -> None:
    up = running()
    other = replace(up, spec=job(training={"mode": "async"}).spec)
    decided = plan(other, NOW)
    assert [type(action) for action in decided.actions] == [EnsureConfig]
    assert up.status is not None and (decided.status.internal.term, decided.status.workers) == (up.status.internal.term, up.status.workers)
