"""Suspension: every process is told to end, which makes the last cut; the job is Suspended when none is left."""

from __future__ import annotations

from psjob_operator.api.status import JobStatus, ShardStatus
from psjob_operator.plan import report
from psjob_operator.plan.actions import DeleteProcess, Event, Plan
from psjob_operator.plan.conditions import Say, conditions, find, starting, suspended
from psjob_operator.plan.facts import SUSPENDING, Facts
from psjob_operator.plan.progress import checkpoint, progress
from psjob_operator.plan.raising import restarts, unchanged
from psjob_operator.plan.settle import settle


def wanted(facts: Facts) -> bool:
    """The job is to be suspended, or was being suspended and is not at zero processes yet: that is finished first."""
    return bool(facts.snapshot.spec.suspend) or (facts.suspending and bool(facts.pods))


def plan(facts: Facts) -> Plan:
    """Deletes what is left, with its own grace; Suspended once nothing is."""
    if not facts.pods and not facts.snapshot.live and not facts.first_seen and facts.stored.phase != "Suspended":
        return Plan(status=facts.snapshot.status or JobStatus(), intent=False, needs_live=True)
    fresh = _status(facts)
    status, wake = settle(facts, fresh)
    deletes = tuple(
        # A kubelet out of reach never confirms; only then is a pod taken off by force.
        DeleteProcess(pod.name, pod.uid, None if pod.deleting is None else 0, why="the job is suspended")
        for pod in facts.pods
        if pod.deleting is None or pod.node_lost
    )
    events: tuple[Event, ...] = ()
    if _reason(facts.stored) != _reason(status):
        words = "all processes end; shards make a last checkpoint" if facts.pods else "no process is left"
        events = (Event("Normal", _reason(status), words),)
    return Plan(status=status, intent=bool(deletes) and status != facts.snapshot.status, actions=deletes, events=events, wake_at=wake)


def _status(facts: Facts) -> JobStatus:
    stored = facts.stored
    as_they_are = unchanged(facts)
    ended = not facts.pods
    said = suspended("spec.suspend is true; it goes on from its last checkpoint") if ended else _ending()
    said |= report.checkpoint_said(facts)
    shards = tuple(
        ShardStatus(index=shard.index, attempt=shard.attempt, state=shard.state if shard.state == "Finished" else "Pending")
        if ended
        else shard
        for shard in report.shards(facts, as_they_are)
    )
    return JobStatus(
        observed_generation=facts.snapshot.generation,
        phase="Suspended" if ended else stored.phase or "Pending",
        conditions=conditions(said, stored.conditions, facts.snapshot.generation, facts.now),
        run=facts.snapshot.uid,
        view=as_they_are.view or None,
        shards=shards,
        shards_ready=f"{sum(seat.up for seat in facts.shards)}/{facts.snapshot.spec.ps.shards}",
        workers=report.workers(facts, as_they_are, ()).model_copy(update={"pending_starts": ""}),
        workers_ready=f"{sum(seat.up for seat in facts.workers)}/{facts.snapshot.spec.workers.replicas}",
        checkpoint=checkpoint(facts),
        progress=progress(facts),
        restarts=restarts(facts, as_they_are),
        start_time=None if ended else stored.start_time,
    )


def _ending() -> dict[str, Say]:
    return starting(SUSPENDING, "spec.suspend is true; processes make a last checkpoint and end")


def _reason(status: JobStatus) -> str:
    ready = find(status.conditions, "Ready")
    return ready.reason if ready else ""
