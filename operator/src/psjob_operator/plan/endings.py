"""Which end a job has come to, if any. Their order is in `plan.POLICIES`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

from psjob_operator.api.status import JobStatus
from psjob_operator.plan import pairs
from psjob_operator.plan.facts import PATIENCE_SECONDS, Facts, Seat
from psjob_operator.plan.incidents import counting
from psjob_operator.plan.progress import checkpoint_known, progress, whole
from psjob_operator.plan.restarts import counted
from psjob_operator.plan.snapshot import Role
from psjob_operator.plan.text import unix
from psjob_operator.plan.troubles import explain
from psjob_operator.plan.warnings import told

_OF_A_TEMPLATE = re.compile(r"spec\.(workers|ps|stages\[\d+\])\.template\b")


@dataclass(frozen=True)
class Ending:
    """A terminal phase: the word, the reason and the sentence."""

    phase: Literal["Complete", "Failed"]
    reason: str
    message: str


def spec_reason(problems: Sequence[str]) -> str:
    """TemplateInvalid where each of these sentences is about a pod template, else SpecInvalid."""
    return "TemplateInvalid" if all(_OF_A_TEMPLATE.match(problem) for problem in problems) else "SpecInvalid"


def _once_begun(policy: Callable[[Facts], Ending | None]) -> Callable[[Facts], Ending | None]:
    """At first sight and when a suspension ends, nothing that was before is held against a job."""

    @wraps(policy)
    def asked(facts: Facts) -> Ending | None:
        return None if facts.afresh else policy(facts)

    return asked


def invalid(facts: Facts) -> Ending | None:
    """A new job whose spec has a fault that only the operator can see."""
    problems = [*facts.snapshot.spec_problems, *filter(None, [pairs.problem(facts.snapshot)])]
    if facts.first_seen and problems:
        return Ending("Failed", spec_reason(problems), "; ".join(problems))
    return None


def complete(facts: Facts) -> Ending | None:
    """The success policy is met and every shard ended with exit code 0, which it does only after the last manifest."""
    if facts.first_seen or not facts.success_met or not facts.shards_done:
        return None
    if why := told(facts, "Diverged", "diverged"):
        return Ending("Complete", "Diverged", f"training has ended and its last checkpoint is committed, but it diverged: {why}")
    if why := told(facts, "WorkersDiffer", "drift"):
        return Ending("Complete", "WorkersDiffer", f"training has ended and its last checkpoint is committed, but {why}")
    return Ending("Complete", "Completed", "training is done and its last checkpoint is committed")


@_once_begun
def fatal(facts: Facts) -> Ending | None:
    """A template of which the API server has never taken a pod and never will, or a process that says going on is no use."""
    # A checkpoint proves that it took pods of these templates, though a suspension has left none of them.
    ran = facts.has_run or checkpoint_known(facts)
    taken = {seat.role for seat in facts.seats if seat.process is not None or seat.fate.kind == "done"}
    for seat in facts.shards if facts.success_met else facts.seats:
        refused = seat.may_create and seat.refusal is not None and seat.refusal.invalid
        if refused and seat.refusal is not None and not ran and seat.role not in taken:
            return Ending("Failed", "TemplateInvalid", f"the API server refuses the pod of {seat}: {seat.refusal.message}")
        if seat.fate.kind == "fatal":
            return Ending("Failed", seat.fate.cause, f"{seat}: {seat.fate.message or 'its exit code says not to try again'}")
    return None


@_once_begun
def lost_for_good(facts: Facts) -> Ending | None:
    """Without checkpoints: a lost shard, or a worker that is not through when the shards have ended."""
    if not facts.snapshot.spec.checkpoint.disabled:
        return None
    ran = facts.has_run or progress(facts) is not None
    for seat in facts.shards:
        began = seat.process is not None and seat.process.started is not None
        lost = seat.fate.kind == "lost" and (began or ran)
        vanished = seat.fate.kind == "absent" and not seat.may_create and ran and facts.snapshot.live
        if lost or vanished:
            words = f"{seat} was lost ({_why(seat)}) and spec.checkpoint.disabled is true: its parameters are gone"
            return Ending("Failed", "ShardLost", words)
    late = [*(seat for seat in facts.workers if seat.fate.kind == "lost"), *facts.too_late] if facts.shards_done else []
    if late:
        words = f"{late[0]} ({_why(late[0]) or 'started again'}) has not finished, the shards have, and spec.checkpoint.disabled is true: "
        return Ending("Failed", "WorkerFailed", words + "no checkpoint is left to finish from")
    return None


@_once_begun
def too_often(facts: Facts) -> Ending | None:
    """One counted failure more than backoffLimit, or than what backoffLimitPerRole gives the role. Those of one incident are one."""
    policy = facts.snapshot.spec.run_policy
    failures = [seat for seat in facts.seats if seat.fate.counted and not (seat.role == "worker" and facts.success_met)]
    added = counting(facts, failures)
    if added.new and counted(facts) + len(added.new) > policy.backoff_limit:
        return Ending("Failed", "BackoffLimitExceeded", f"{failures[-1]}, {explain(facts, failures[-1], counted(facts) + len(added.new))}")
    of_role = policy.backoff_limit_per_role
    limits: tuple[tuple[Role, int | None], ...] = (("shard", of_role.shard), ("worker", of_role.worker)) if of_role is not None else ()
    for role, limit in limits:
        own = [seat for seat in failures if seat.role == role]
        total = counted(facts, role) + added.of(role)
        if added.of(role) and limit is not None and total > limit:
            return Ending(
                "Failed", "BackoffLimitExceeded", f"{own[-1]}, {explain(facts, own[-1], total, f'backoffLimitPerRole.{role}', limit)}"
            )
    return None


@_once_begun
def never_attached(facts: Facts) -> Ending | None:
    """A worker ended well and never joined: the shards and the others would wait for it for ever.

    Said only of a first coordinator before the first step; a later one may not know of workers that left before.
    """
    asked, written = facts.snapshot.progress_at, facts.snapshot.written_at
    if asked is None or written is None or asked < written + PATIENCE_SECONDS:
        return None
    if whole(facts.coordinator, "step") != 0 or any(attempt > 1 for attempt in facts.attempts):
        return None
    return never_joined(facts.coordinator, facts.succeeded_before)


def never_joined(coordinator: Mapping[str, Any], succeeded: Collection[int]) -> Ending | None:
    """Failed where the coordinator has never seen a worker that `succeeded`."""
    told = coordinator.get("workers")
    absent = [_rank(worker) for worker in told if _rank(worker) in succeeded] if isinstance(told, list | tuple) else []
    if not absent:
        return None
    return Ending(
        "Failed",
        "NeverAttached",
        f"worker {absent[0]} ended with exit code 0 and never joined the job; "
        "its script must call psjob.attach(model, optimizer) and train with what that gives back",
    )


@_once_begun
def deadline_passed(facts: Facts) -> Ending | None:
    """activeDeadlineSeconds is reached."""
    at = deadline(facts, facts.stored.start_time)
    if at is None or facts.now < at:
        return None
    seconds = facts.snapshot.spec.run_policy.active_deadline_seconds
    return Ending(
        "Failed", "DeadlineExceeded", f"active for longer than spec.runPolicy.activeDeadlineSeconds: {seconds}; its checkpoints are kept"
    )


@_once_begun
def pending_too_long(facts: Facts) -> Ending | None:
    """pendingTimeoutSeconds is reached."""
    at, ready = pending_until(facts, facts.stored), facts.stored.condition("Ready")
    if at is None or ready is None or facts.now < at:
        return None
    seconds = facts.snapshot.spec.run_policy.pending_timeout_seconds
    words = f"not all processes were there for longer than spec.runPolicy.pendingTimeoutSeconds: {seconds}; {ready.reason}: {ready.message}"
    return Ending("Failed", "PendingTimeout", words)


def deadline(facts: Facts, start_time: str | None) -> float | None:
    """Unix time at which activeDeadlineSeconds ends a job active since `start_time`; None without one, or while it is not active."""
    seconds = facts.snapshot.spec.run_policy.active_deadline_seconds
    begun = unix(start_time)
    return begun + seconds if seconds is not None and begun is not None else None


def pending_until(facts: Facts, status: JobStatus) -> float | None:
    """Unix time at which pendingTimeoutSeconds ends a job that lacks processes; None without one, or while it has them all."""
    seconds, ready = facts.snapshot.spec.run_policy.pending_timeout_seconds, status.condition("Ready")
    since = unix(ready.last_transition_time) if ready is not None and ready.status == "False" else None
    if seconds is None or since is None or status.phase not in ("Pending", "Recovering"):
        return None
    return since + seconds


def _rank(worker: object) -> int | None:
    """Rank of a worker that the coordinator has never seen; None for any other."""
    return whole(worker, "rank") if isinstance(worker, Mapping) and worker.get("state") == "absent" else None


def _why(seat: Seat) -> str:
    return seat.fate.message or seat.fate.cause
