"""Which end a job has come to, if any, and what is done then: its condition is stored, processes go, the job is deleted in its time.

The order in which ends are asked for is in `plan.POLICIES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from psjob_operator.api.status import JobStatus, Terminal, index_text, short, stamp, unix, with_phase
from psjob_operator.plan import conditions, placement
from psjob_operator.plan.actions import DeleteJob, Event, Plan
from psjob_operator.plan.conditions import explain_failure, warning_text
from psjob_operator.plan.job_state import PATIENCE_SECONDS, JobState, Seat, checkpoint_known, current_progress, told_integer
from psjob_operator.plan.observed_state import Role
from psjob_operator.plan.pods import left_over
from psjob_operator.plan.restarts import counted, counting, unchanged
from psjob_operator.plan.status import deadline, describe, pending_until

_OF_A_TEMPLATE = re.compile(r"spec\.(workers|shards|stages\[\d+\])\.template\b")


@dataclass(frozen=True)
class TerminalPhase:
    """The condition that ends a job, its reason and its sentence."""

    condition: Terminal
    reason: str
    message: str


def spec_reason(problems: Sequence[str]) -> str:
    """TemplateInvalid where each of these sentences is about a pod template, else SpecInvalid."""
    return "TemplateInvalid" if all(_OF_A_TEMPLATE.match(problem) for problem in problems) else "SpecInvalid"


def _once_begun(policy: Callable[[JobState], TerminalPhase | None]) -> Callable[[JobState], TerminalPhase | None]:
    """At first sight and when a suspension ends, nothing that was before is held against a job."""

    @wraps(policy)
    def asked(state: JobState) -> TerminalPhase | None:
        return None if state.afresh else policy(state)

    return asked


def invalid(state: JobState) -> TerminalPhase | None:
    """A new job whose spec has a fault that only the operator can see."""
    problems = [*state.observed.spec_problems, *filter(None, [placement.placement_problem(state.observed)])]
    if state.first_seen and problems:
        return TerminalPhase("Failed", spec_reason(problems), "; ".join(problems))
    return None


def complete(state: JobState) -> TerminalPhase | None:
    """The success policy is met and every shard ended with exit code 0, which it does only after the last manifest."""
    if state.first_seen or not state.success_met or not state.shards_done:
        return None
    if why := warning_text(state, "Diverged", "diverged"):
        return TerminalPhase("Complete", "Diverged", f"training has ended and its last checkpoint is committed, but it diverged: {why}")
    if why := warning_text(state, "WorkersDiffer", "drift"):
        return TerminalPhase("Complete", "WorkersDiffer", f"training has ended and its last checkpoint is committed, but {why}")
    return TerminalPhase("Complete", "Completed", "training is done and its last checkpoint is committed")


@_once_begun
def fatal(state: JobState) -> TerminalPhase | None:
    """A template of which the API server has never taken a pod and never will, or a process that says continuing is no use."""
    # A checkpoint proves that it took pods of these templates, though a suspension has left none of them.
    ran = state.has_run or checkpoint_known(state)
    taken = {seat.role for seat in state.seats if seat.process is not None or seat.outcome.kind == "done"}
    for seat in state.shards if state.success_met else state.seats:
        refused = seat.may_create and seat.refusal is not None and seat.refusal.invalid
        if refused and seat.refusal is not None and not ran and seat.role not in taken:
            return TerminalPhase("Failed", "TemplateInvalid", f"the API server refuses the pod of {seat}: {seat.refusal.message}")
        if seat.outcome.kind == "fatal":
            return TerminalPhase("Failed", seat.outcome.cause, f"{seat}: {seat.outcome.message or 'its exit code says not to try again'}")
    return None


@_once_begun
def lost_for_good(state: JobState) -> TerminalPhase | None:
    """Without checkpoints: a lost shard, or a worker that is not through when the shards have ended."""
    if not state.observed.spec.checkpoint.disabled:
        return None
    ran = state.has_run or current_progress(state) is not None
    for seat in state.shards:
        began = seat.process is not None and seat.process.started is not None
        lost = seat.outcome.kind == "lost" and (began or ran)
        vanished = seat.outcome.kind == "absent" and not seat.may_create and ran and state.observed.live
        if lost or vanished:
            words = f"{seat} was lost ({_why(seat)}) and spec.checkpoint.disabled is true: its parameters are gone"
            return TerminalPhase("Failed", "ShardLost", words)
    late = [*(seat for seat in state.workers if seat.outcome.kind == "lost"), *state.too_late] if state.shards_done else []
    if late:
        words = f"{late[0]} ({_why(late[0]) or 'started again'}) has not finished, the shards have, and spec.checkpoint.disabled is true: "
        return TerminalPhase("Failed", "WorkerFailed", words + "no checkpoint is left to finish from")
    return None


@_once_begun
def too_often(state: JobState) -> TerminalPhase | None:
    """One counted failure more than backoffLimit, or than what backoffLimitPerRole gives the role. Those of one incident are one."""
    policy = state.observed.spec.run_policy
    failures = [seat for seat in state.seats if seat.outcome.counted and not (seat.role == "worker" and state.success_met)]
    added = counting(state, failures)
    if added.new and counted(state) + len(added.new) > policy.backoff_limit:
        return TerminalPhase(
            "Failed", "BackoffLimitExceeded", f"{failures[-1]}, {explain_failure(state, failures[-1], counted(state) + len(added.new))}"
        )
    of_role = policy.backoff_limit_per_role
    limits: tuple[tuple[Role, int | None], ...] = (("shard", of_role.shard), ("worker", of_role.worker)) if of_role is not None else ()
    for role, limit in limits:
        own = [seat for seat in failures if seat.role == role]
        total = counted(state, role) + added.of(role)
        if added.of(role) and limit is not None and total > limit:
            return TerminalPhase(
                "Failed",
                "BackoffLimitExceeded",
                f"{own[-1]}, {explain_failure(state, own[-1], total, f'backoffLimitPerRole.{role}', limit)}",
            )
    return None


@_once_begun
def never_attached(state: JobState) -> TerminalPhase | None:
    """A worker ended well and never joined: the shards and the others would wait for it forever.

    Said only of a first coordinator before the first step; a later one may not know of workers that left before.
    """
    asked, written = state.observed.progress_at, state.observed.written_at
    if asked is None or written is None or asked < written + PATIENCE_SECONDS:
        return None
    if told_integer(state.coordinator, "step") != 0 or any(attempt > 1 for attempt in state.attempts):
        return None
    return never_joined(state.coordinator, state.succeeded_before)


def never_joined(coordinator: Mapping[str, Any], succeeded: Collection[int]) -> TerminalPhase | None:
    """Failed where the coordinator has never seen a worker that `succeeded`."""
    told = coordinator.get("workers")
    absent = [_rank(worker) for worker in told if _rank(worker) in succeeded] if isinstance(told, list | tuple) else []
    if not absent:
        return None
    return TerminalPhase(
        "Failed",
        "NeverAttached",
        f"worker {absent[0]} ended with exit code 0 and never joined the job; "
        "its script must call psjob.attach(model, optimizer) and train with what that gives back",
    )


@_once_begun
def deadline_passed(state: JobState) -> TerminalPhase | None:
    """activeDeadlineSeconds is reached."""
    at = deadline(state, state.stored.start_time)
    if at is None or state.now < at:
        return None
    seconds = state.observed.spec.run_policy.active_deadline_seconds
    return TerminalPhase(
        "Failed", "DeadlineExceeded", f"active for longer than spec.runPolicy.activeDeadlineSeconds: {seconds}; its checkpoints are kept"
    )


@_once_begun
def pending_too_long(state: JobState) -> TerminalPhase | None:
    """pendingTimeoutSeconds is reached."""
    at, ready = pending_until(state, state.stored), state.stored.condition("Ready")
    if at is None or ready is None or state.now < at:
        return None
    seconds = state.observed.spec.run_policy.pending_timeout_seconds
    words = f"not all processes were there for longer than spec.runPolicy.pendingTimeoutSeconds: {seconds}; {ready.reason}: {ready.message}"
    return TerminalPhase("Failed", "PendingTimeout", words)


def _rank(worker: object) -> int | None:
    """Rank of a worker that the coordinator has never seen; None for any other."""
    return told_integer(worker, "rank") if isinstance(worker, Mapping) and worker.get("state") == "absent" else None


def _why(seat: Seat) -> str:
    return seat.outcome.message or seat.outcome.cause


def end(state: JobState, ending: TerminalPhase) -> Plan:
    """The condition that ends the job is stored first, then processes are cleaned up: after a crash in between, it stands."""
    status = _status(state, ending)
    event = Event("Normal" if ending.condition == "Complete" else "Warning", ending.reason, short(ending.message))
    return Plan(status=status, intent=True, actions=left_over(state), events=(event,), wake_at=_deleted_at(state, status))


def after(state: JobState) -> Plan:
    """A finished job: its status stands but for the generation it answers; clean-up, and the deletion of the job in its time."""
    status = state.observed.status or JobStatus()
    if status.observed_generation != state.observed.generation:
        generation = state.observed.generation
        kept = tuple(condition.model_copy(update={"observed_generation": generation}) for condition in status.conditions)
        status = status.model_copy(update={"observed_generation": generation, "conditions": kept})
    due = _deleted_at(state, state.stored)
    if due is not None and due <= state.now:
        return Plan(status=status, intent=False, actions=(DeleteJob(),))
    return Plan(status=status, intent=False, actions=left_over(state), wake_at=due)


def _deleted_at(state: JobState, status: JobStatus) -> float | None:
    """Unix time at which ttlSecondsAfterFinished deletes the job; None where it is kept."""
    seconds = state.observed.spec.run_policy.ttl_seconds_after_finished
    ended = unix(status.completion_time)
    return ended + seconds if seconds is not None and ended is not None else None


def _status(state: JobState, ending: TerminalPhase) -> JobStatus:
    done = ending.condition == "Complete"
    said = (
        conditions.complete_conditions(ending.reason, ending.message)
        if done
        else conditions.failed_conditions(ending.reason, ending.message)
    )
    status = describe(state, unchanged(state), said)
    lost = [] if done else [seat.index for seat in state.workers if seat.outcome.kind in ("lost", "fatal")]
    workers = status.workers.model_copy(update={"failed_indexes": index_text(lost)})
    internal = status.internal.model_copy(update={"pending_starts": ""})
    return with_phase(status.model_copy(update={"workers": workers, "internal": internal, "completion_time": stamp(state.now)}))
