"""What keeps a job from going on without ending it: a suspension, a spec that this operator cannot read, a run of another version."""

from __future__ import annotations

from psjob_operator.api.status import JobStatus, ShardStatus
from psjob_operator.plan import endings
from psjob_operator.plan.actions import DeleteProcess, Event, Plan
from psjob_operator.plan.conditions import Say, conditions, starting, suspended
from psjob_operator.plan.facts import SUSPENDING, Facts
from psjob_operator.plan.processes import FORCE
from psjob_operator.plan.progress import checkpoint, progress, pull_at, pull_due
from psjob_operator.plan.restarts import unchanged
from psjob_operator.plan.settle import settle
from psjob_operator.plan.status import describe
from psjob_operator.plan.text import short


def suspension_wanted(facts: Facts) -> bool:
    """The job is to be suspended, or was being suspended and is not at zero processes yet: that is finished first."""
    return bool(facts.snapshot.spec.suspend) or (facts.suspending and bool(facts.pods))


def suspend(facts: Facts) -> Plan:
    """Tells every process to end, which makes the last checkpoint; Suspended once no process is left."""
    if not facts.pods and not facts.snapshot.live and not facts.first_seen and facts.stored.phase != "Suspended":
        return Plan(status=facts.snapshot.status or JobStatus(), intent=False, needs_live=True)
    status, wake = settle(facts, _status(facts))
    deletes = tuple(
        # A kubelet out of reach never confirms; only then is a pod taken off by force.
        DeleteProcess(pod.name, pod.uid, FORCE if pod.node_lost else None, why="the job is suspended")
        for pod in facts.pods
        if pod.deleting is None or pod.node_lost
    )
    events: tuple[Event, ...] = ()
    if _reason(facts.stored) != _reason(status):
        words = "all processes end; shards make a last checkpoint" if facts.pods else "no process is left"
        events = (Event("Normal", _reason(status), words),)
    return Plan(status=status, intent=bool(deletes) and status != facts.snapshot.status, actions=deletes, events=events, wake_at=wake)


def stall(facts: Facts, reason: str, message: str) -> Plan:
    """Stalled, until an operator that can serve it is back: nothing is created. Training itself needs none and goes on."""
    said = {kind: Say("False" if kind == "Ready" else "True", reason, message) for kind in ("Ready", "Stalled")}
    kept = {it.type: Say(it.status, it.reason, it.message) for it in facts.stored.conditions if it.type == "CheckpointReady"}
    generation = facts.snapshot.generation
    update = {
        "checkpoint": checkpoint(facts),
        "progress": progress(facts),
        "observed_generation": generation,
        "conditions": conditions({**said, **kept}, facts.stored.conditions, generation, facts.now),
    }
    status, wake = settle(facts, facts.stored.model_copy(update=update))
    wakes = (wake, endings.deadline(facts, status.start_time), endings.pending_until(facts, status), pull_at(facts, status))
    due = [at for at in wakes if at is not None and at > facts.now]
    events = () if _reason(facts.stored) == _reason(status) else (Event("Warning", reason, short(message)),)
    return Plan(status=status, intent=False, events=events, wake_at=min(due, default=None), want_progress=pull_due(facts, status))


def _status(facts: Facts) -> JobStatus:
    if facts.pods:
        ending = starting(SUSPENDING, "spec.suspend is true; processes make a last checkpoint and end")
        status = describe(facts, unchanged(facts), facts.stored.phase or "Pending", ending)
        return status.model_copy(update={"workers": status.workers.model_copy(update={"pending_starts": ""})})
    status = describe(facts, unchanged(facts), "Suspended", suspended("spec.suspend is true; it goes on from its last checkpoint"))
    # A run that never began, or of which nothing is left that an older operator made, is pinned when it begins.
    shards = tuple(
        ShardStatus(index=shard.index, attempt=shard.attempt, state=shard.state if shard.state == "Finished" else "Pending")
        for shard in status.shards
    )
    workers = status.workers.model_copy(update={"pending_starts": ""})
    return status.model_copy(update={"shards": shards, "workers": workers, "start_time": None, "pinned": facts.stored.pinned})


def _reason(status: JobStatus) -> str:
    ready = status.condition("Ready")
    return ready.reason if ready else ""
