"""The conditions of a job, in a fixed order, in the ways that kstatus, Argo CD and `kubectl wait` read them; and what they tell.

A trouble says why a process does not run, in the words of the kubelet, the scheduler, the API server or its log. A warning says what is
wrong with a job that trains on: each matter has a condition of its own, and Ready names the first. It appears when its matter is first
seen, and is False from when it is over. While shard 0 is out of reach, what it said holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from psjob_operator.api.status import Condition, condition_reason, short, stamp, unix
from psjob_operator.api.template import SERVING, TRAINED, container_of
from psjob_operator.plan import objects, pods
from psjob_operator.plan.job_state import JobState, Seat, told_text
from psjob_operator.plan.observed_state import Process
from psjob_operator.plan.pods import CONFLICT, pod_refusal
from psjob_operator.plan.restarts import RestartDecision, ends_at

ORDER = (
    "Ready",
    "Reconciling",
    "Stalled",
    "Suspended",
    "Complete",
    "Failed",
    "CheckpointReady",
    "Degraded",
    "Diverged",
    "WorkersDiffer",
    "BuffersDiffer",
    "DataNotSharded",
    "NonFiniteGradients",
    "LargePushes",
    "LearningRateHigh",
    "Contended",
)
WRITTEN_ANEW = ("Ready", "Reconciling", "Stalled", "Complete", "Failed")
"""Types that are written anew each time: absent means False. All others stay, once they were written."""


UNREMARKABLE = ("", "ContainerCreating", "PodInitializing")
NAMESPACE_GOES = "because it is being terminated"
"""Words of the API server where nothing new may come into a namespace."""
PULLING = ("ErrImagePull", "ImagePullBackOff")
ATTACH_SECONDS = 20.0
"""A process that is waited for within this time after all came up is just starting."""
DEGRADED = "Degraded"
WAITING = "WaitingForMember"
OF_TRAINING: Mapping[str, str] = {
    "LearningRateHigh": "warning",
    "NonFiniteGradients": "nonFinite",
    "LargePushes": "largePush",
    "Diverged": "diverged",
    "WorkersDiffer": "drift",
    "DataNotSharded": "dataProblem",
    "BuffersDiffer": "buffersDiffer",
}
"""Type of a condition, and its reason, by the word of shard 0 that tells it."""


@dataclass(frozen=True)
class Say:
    """One condition without its times."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


def starting_conditions(reason: str, message: str) -> dict[str, Say]:
    """Processes are made, start, restore or wait for something."""
    return {"Ready": Say("False", reason, message), "Reconciling": Say("True", reason, message)}


def running_conditions(reason: str, message: str) -> dict[str, Say]:
    """All that was declared is there."""
    return {"Ready": Say("True", reason, message)}


def suspended_conditions(message: str) -> dict[str, Say]:
    """Suspended, with no process left."""
    return {"Ready": Say("False", "Suspended", message), "Suspended": Say("True", "Suspended", message)}


def resumed_conditions(before: tuple[Condition, ...], wanted: bool) -> dict[str, Say]:
    """Suspended of a job that has processes or has ended, and was suspended once; nothing of any other. `wanted`: the spec asks for it."""
    if not any(condition.type == "Suspended" for condition in before):
        return {}
    if wanted:
        return {"Suspended": Say("False", "NotSuspended", "spec.suspend is true, and processes of it are there, or it has ended")}
    return {"Suspended": Say("False", "Resumed", "it continues from its last checkpoint")}


def complete_conditions(reason: str, message: str) -> dict[str, Say]:
    """Done."""
    return {"Ready": Say("True", reason, message), "Complete": Say("True", reason, message)}


def failed_conditions(reason: str, message: str) -> dict[str, Say]:
    """Failed for good."""
    return {kind: Say("False" if kind == "Ready" else "True", reason, message) for kind in ("Ready", "Stalled", "Failed")}


def with_times(said: Mapping[str, Say], before: tuple[Condition, ...], generation: int, now: float) -> tuple[Condition, ...]:
    """What is said, as conditions: the time of a status that did not change is kept."""
    known = {condition.type: condition for condition in before}
    made = []
    for kind in ORDER:
        if kind not in said:
            continue
        say, old = said[kind], known.get(kind)
        since = old.last_transition_time if old and old.status == say.status else stamp(now)
        made.append(
            Condition(
                type=kind,
                status=say.status,
                reason=say.reason,
                message=short(say.message),
                last_transition_time=since,
                observed_generation=generation,
            )
        )
    # Aspects that only a newer operator tells are its own.
    return (*made, *(condition for condition in before if condition.type not in ORDER))


@dataclass(frozen=True)
class Trouble:
    """Why one seat has no running process."""

    seat: Seat
    reason: str
    message: str


def troubles(state: JobState, decision: RestartDecision, conflicts: tuple[str, ...]) -> tuple[Trouble, ...]:
    """One for each seat that is kept from running, shards first."""
    found = (_trouble(state, seat, decision, conflicts) for seat in state.seats)
    return tuple(trouble for trouble in found if trouble)


def slow_at(state: JobState) -> float | None:
    """When the first process that is scheduled but has not started becomes slow; its Events are looked up then."""
    waiting = (seat.process for seat in state.seats if seat.process is not None and seat.outcome.kind == "waiting")
    return min((pod.slow_at for pod in waiting if pod.slow_at is not None and pod.slow_at > state.now), default=None)


def _trouble(state: JobState, seat: Seat, decision: RestartDecision, conflicts: tuple[str, ...]) -> Trouble | None:
    name = decision.name(state.observed.name, seat)
    if name in conflicts:
        return Trouble(seat, "NameConflict", f"pod {name} exists and is not this job's; it starts when that pod is gone")
    refusal = pod_refusal(seat)
    if refusal is not None:
        if refusal.code == CONFLICT:
            return Trouble(seat, "NameConflict", refusal.message)
        return Trouble(seat, "NamespaceTerminating" if NAMESPACE_GOES in refusal.message else "CreateRefused", refusal.message)
    until = decision.held_until(seat)
    if until is not None and seat.role == "shard" and any(ends_at(other) > state.now for other in state.shards):
        words = (
            f"{seat.outcome.cause}: shards take a last checkpoint; it starts again when they have ended, at {stamp(until)} at the latest"
        )
        return Trouble(seat, "Ending", words)
    if until is not None:
        return Trouble(seat, "BackOff", f"{seat.outcome.message or seat.outcome.cause}; starts again at {stamp(until)}")
    if decision.is_raised(seat) or seat.process is None:
        return None
    pod = seat.process
    if seat.outcome.kind != "waiting":
        return None
    return _waiting(state, seat, pod)


def _waiting(state: JobState, seat: Seat, pod: Process) -> Trouble | None:
    if pod.unschedulable:
        return Trouble(seat, "Unschedulable", pod.unschedulable)
    if pod.waiting_reason in PULLING:
        return Trouble(seat, "ImagePullBackOff", _pull_words(state, seat, pod))
    if pod.waiting_reason not in UNREMARKABLE:
        return Trouble(seat, condition_reason(pod.waiting_reason), pod.waiting_message)
    if pod.events and pod.slow_at is not None and pod.slow_at <= state.now:
        first, _, rest = pod.events[0].partition(": ")
        return Trouble(seat, condition_reason(first, "SlowStart"), rest or first) if rest else Trouble(seat, "SlowStart", first)
    return None


def _pull_words(state: JobState, seat: Seat, pod: Process) -> str:
    """The kubelet turns between the error and "Back-off pulling image": the error stays."""
    if not pod.waiting_message.startswith("Back-off"):
        return pod.waiting_message
    for problem in state.stored.workers.problems:
        if seat.role == "worker" and problem.index == seat.index and problem.reason == "ImagePullBackOff" and problem.pod == pod.name:
            return problem.message
    ready = state.stored.condition("Ready")
    if seat.role == "shard" and ready and ready.message.startswith(f"{seat}: ") and short(pod.waiting_message) not in ready.message:
        return ready.message.removeprefix(f"{seat}: ")
    return pod.waiting_message


def explain_failure(state: JobState, seat: Seat, failures: int, field: str = "backoffLimit", limit: int | None = None) -> str:
    """`container worker, memory limit 2Gi: exit code 137 (OOMKilled): …; failures: 2, spec.runPolicy.backoffLimit: 6`.

    `limit`: of `field`; None: of backoffLimit.
    """
    container = _container(state, seat)
    name = container.get("name") or (SERVING if seat.role == "shard" else TRAINED)
    memory = ((container.get("resources") or {}).get("limits") or {}).get("memory")
    room = f", memory limit {memory}" if memory and seat.outcome.cause == "OOMKilled" else ""
    most = state.observed.spec.run_policy.backoff_limit if limit is None else limit
    why = short(seat.outcome.message or seat.outcome.cause, 130)
    return f"container {name}{room}: {why}; failures: {failures}, spec.runPolicy.{field}: {most}"


def _container(state: JobState, seat: Seat) -> dict[str, Any]:
    spec = state.observed.spec
    if seat.role == "worker":
        return container_of(spec.worker_template(seat.index), TRAINED) or {}
    return (container_of(spec.shards.template, SERVING) if spec.shards.template else None) or {}


CLEARED = Say("False", "Cleared", "it is over, or was of processes that have been replaced since")


def ready_condition(state: JobState) -> dict[str, Say]:
    """Ready of a job of which all is up: the first thing that is wrong, or that it runs."""
    before, after = list(_around(state)), list(_unread(state))
    of_training = [(kind, words) for kind, key in OF_TRAINING.items() if (words := told_text(state, key))]
    for reason, words in (*before, *of_training, *after):
        return running_conditions(reason, words)
    kept = state.stored.condition("Ready")
    if kept and kept.reason in (WAITING, *OF_TRAINING) and not state.coordinator:
        return running_conditions(kept.reason, kept.message)
    return running_conditions("Running", "all shards and workers are running")


def warning_conditions(state: JobState, trains: bool) -> dict[str, Say]:
    """Degraded, of a job that `trains`, and the conditions of training; those that are over, too."""
    said = {kind: Say("True", kind, words) for kind, key in OF_TRAINING.items() if (words := warning_text(state, kind, key))}
    around = [*_around(state), *_unread(state)] if trains else []
    if around:
        said[DEGRADED] = Say("True", around[0][0], "; ".join(words for _, words in around))
    elif trains and not state.coordinator and (kept := state.stored.condition(DEGRADED)) and kept.reason == WAITING:
        said[DEGRADED] = Say(kept.status, kept.reason, kept.message)
    over = {kind: CLEARED for kind in (DEGRADED, *OF_TRAINING) if kind not in said and state.stored.condition(kind)}
    return said | over


def warning_text(state: JobState, kind: str, key: str) -> str:
    """What shard 0 says of a matter of training; what was said before holds where it says nothing any more."""
    if state.coordinator:
        return told_text(state, key)
    for kept in (state.stored.condition(kind), state.stored.condition("Ready")):
        if kept is not None and kept.status == "True" and kept.reason == kind:
            return kept.message
    return ""


def _around(state: JobState) -> Iterator[tuple[str, str]]:
    """(reason, words) of what is wrong beside the training itself."""
    if around := objects.object_refusal(state.observed, pods.pinned(state, afresh=False)):
        yield "CreateRefused", around
    crashing = [(seat, seat.process.sidecar_crash) for seat in state.seats if seat.process is not None and seat.process.sidecar_crash]
    if crashing:
        seat, sidecar = crashing[0]
        yield "SidecarCrashing", f"{seat}: sidecar {sidecar}"
    waiting = told_text(state, "waiting")
    kept = state.stored.condition("Ready")
    since = unix(kept.last_transition_time) if kept and kept.status == "True" else None
    if waiting and since is not None and since + ATTACH_SECONDS <= state.now:
        yield WAITING, waiting


def _unread(state: JobState) -> Iterator[tuple[str, str]]:
    if state.observed.progress_problem:
        yield "ProgressUnknown", state.observed.progress_problem
