"""Why a process does not run, or failed, in the words of the kubelet, the scheduler, the API server or its log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psjob_operator.api.template import SERVING, TRAINED, container_of
from psjob_operator.plan.facts import Facts, Seat
from psjob_operator.plan.processes import CONFLICT, refused
from psjob_operator.plan.restarts import Raising, ends_at
from psjob_operator.plan.snapshot import Process
from psjob_operator.plan.text import reason, short, stamp

UNREMARKABLE = ("", "ContainerCreating", "PodInitializing")
NAMESPACE_GOES = "because it is being terminated"
"""Words of the API server where nothing new may come into a namespace."""
PULLING = ("ErrImagePull", "ImagePullBackOff")


@dataclass(frozen=True)
class Trouble:
    """Why one seat has no running process."""

    seat: Seat
    reason: str
    message: str


def troubles(facts: Facts, raising: Raising, conflicts: tuple[str, ...]) -> tuple[Trouble, ...]:
    """One for each seat that is kept from running, shards first."""
    found = (_trouble(facts, seat, raising, conflicts) for seat in facts.seats)
    return tuple(trouble for trouble in found if trouble)


def slow_at(facts: Facts) -> float | None:
    """When the first process that is scheduled but has not started becomes slow; its Events are looked up then."""
    waiting = (seat.process for seat in facts.seats if seat.process is not None and seat.fate.kind == "waiting")
    return min((pod.slow_at for pod in waiting if pod.slow_at is not None and pod.slow_at > facts.now), default=None)


def _trouble(facts: Facts, seat: Seat, raising: Raising, conflicts: tuple[str, ...]) -> Trouble | None:
    name = raising.name(facts.snapshot.name, seat)
    if name in conflicts:
        return Trouble(seat, "NameConflict", f"pod {name} exists and is not this job's; it starts when that pod is gone")
    refusal = refused(seat)
    if refusal is not None:
        if refusal.code == CONFLICT:
            return Trouble(seat, "NameConflict", refusal.message)
        return Trouble(seat, "NamespaceTerminating" if NAMESPACE_GOES in refusal.message else "CreateRefused", refusal.message)
    until = raising.held_until(seat)
    if until is not None and seat.role == "shard" and any(ends_at(other) > facts.now for other in facts.shards):
        words = f"{seat.fate.cause}: shards take a last checkpoint; it starts again when they have ended, at {stamp(until)} at the latest"
        return Trouble(seat, "Ending", words)
    if until is not None:
        return Trouble(seat, "BackOff", f"{seat.fate.message or seat.fate.cause}; starts again at {stamp(until)}")
    if raising.is_raised(seat) or seat.process is None:
        return None
    pod = seat.process
    if seat.fate.kind != "waiting":
        return None
    return _waiting(facts, seat, pod)


def _waiting(facts: Facts, seat: Seat, pod: Process) -> Trouble | None:
    if pod.unschedulable:
        return Trouble(seat, "Unschedulable", pod.unschedulable)
    if pod.waiting_reason in PULLING:
        return Trouble(seat, "ImagePullBackOff", _pull_words(facts, seat, pod))
    if pod.waiting_reason not in UNREMARKABLE:
        return Trouble(seat, reason(pod.waiting_reason), pod.waiting_message)
    if pod.events and pod.slow_at is not None and pod.slow_at <= facts.now:
        first, _, rest = pod.events[0].partition(": ")
        return Trouble(seat, reason(first, "SlowStart"), rest or first) if rest else Trouble(seat, "SlowStart", first)
    return None


def _pull_words(facts: Facts, seat: Seat, pod: Process) -> str:
    """The kubelet turns between the error and "Back-off pulling image": the error stays."""
    if not pod.waiting_message.startswith("Back-off"):
        return pod.waiting_message
    for problem in facts.stored.workers.problems:
        if seat.role == "worker" and problem.index == seat.index and problem.reason == "ImagePullBackOff" and problem.pod == pod.name:
            return problem.message
    ready = next((condition.message for condition in facts.stored.conditions if condition.type == "Ready"), "")
    if seat.role == "shard" and ready.startswith(f"{seat}: ") and short(pod.waiting_message) not in ready:
        return ready.removeprefix(f"{seat}: ")
    return pod.waiting_message


def explain(facts: Facts, seat: Seat, failures: int, field: str = "backoffLimit", limit: int | None = None) -> str:
    """`container worker, memory limit 2Gi: exit code 137 (OOMKilled): …; failures: 2, spec.runPolicy.backoffLimit: 6`.

    `limit`: of `field`; None: of backoffLimit.
    """
    container = _container(facts, seat)
    name = container.get("name") or (SERVING if seat.role == "shard" else TRAINED)
    memory = ((container.get("resources") or {}).get("limits") or {}).get("memory")
    room = f", memory limit {memory}" if memory and seat.fate.cause == "OOMKilled" else ""
    most = facts.snapshot.spec.run_policy.backoff_limit if limit is None else limit
    why = short(seat.fate.message or seat.fate.cause, 130)
    return f"container {name}{room}: {why}; failures: {failures}, spec.runPolicy.{field}: {most}"


def _container(facts: Facts, seat: Seat) -> dict[str, Any]:
    spec = facts.snapshot.spec
    if seat.role == "worker":
        return container_of(spec.worker_template(seat.index), TRAINED) or {}
    return (container_of(spec.ps.template, SERVING) if spec.ps.template else None) or {}
