"""What holds a job without ending it: a suspension, a spec or a version that this operator cannot read, a name that is taken."""

from __future__ import annotations

from dataclasses import dataclass

from psjob_operator.api.status import JobStatus, ShardStatus
from psjob_operator.plan import endings, finish, naming, objects, pins, processes, resuming
from psjob_operator.plan.actions import DeleteProcess, Event, Plan
from psjob_operator.plan.conditions import OF_THE_PHASE, Say, conditions, resumed, starting, suspended
from psjob_operator.plan.endings import Ending
from psjob_operator.plan.facts import SUSPENDING, Facts
from psjob_operator.plan.processes import FORCE
from psjob_operator.plan.progress import checkpoint, progress, pull_due
from psjob_operator.plan.recovery import with_recovery
from psjob_operator.plan.restarts import unchanged
from psjob_operator.plan.settle import settle, wake_at
from psjob_operator.plan.snapshot import Process
from psjob_operator.plan.status import describe, report
from psjob_operator.plan.text import short, stamp
from psjob_operator.plan.troubles import troubles

OURS = "psjob.dev/operator"
LATE_SECONDS = 10.0
"""A pod that is still there so long after it was to end is named."""
MOST_KEPT = 3
"""Pods that one sentence names."""


@dataclass(frozen=True)
class Hold:
    """Nothing new is made of the job for now; `plan` is what is done meanwhile."""

    plan: Plan


def not_ours(facts: Facts) -> Hold | None:
    """Another controller's, or being deleted: not even the status is touched."""
    if facts.snapshot.deleting or facts.snapshot.spec.managed_by not in (None, OURS):
        return Hold(Plan(status=facts.snapshot.status or JobStatus(), intent=False))
    return None


def finished(facts: Facts) -> Hold | None:
    """Ended before: its processes are cleaned up, and it is deleted in its time."""
    return Hold(finish.after(facts)) if facts.finished else None


def suspension(facts: Facts) -> Hold | None:
    """To be suspended, or was being suspended and has processes left: that is finished first, whatever the spec says by now."""
    wanted = bool(facts.snapshot.spec.suspend) or (facts.suspending and bool(facts.left))
    return Hold(_suspend(facts)) if wanted else None


def unreadable(facts: Facts) -> Hold | None:
    """This operator cannot read the spec whole. Stalled, until one is back that can; training needs none and goes on."""
    problems = facts.snapshot.spec_problems
    return Hold(_stall(facts, endings.spec_reason(problems), "; ".join(problems))) if problems else None


def another_version(facts: Facts) -> Ending | Hold | None:
    """Begun by a version that this operator does not know: nothing that its processes say is read, so only deadlines may end it."""
    words = pins.another_version(facts)
    if not words:
        return None
    ending = endings.deadline_passed(facts) or endings.pending_too_long(facts)
    return ending or Hold(_stall(facts, "RunOfAnotherVersion", words))


def templates_changed(facts: Facts) -> Hold | None:
    """Suspended, changed in what its pods are, and resumed: no process is made of another program in the middle of a run."""
    words = pins.templates_changed(facts)
    return Hold(_stall(facts, "TemplateChanged", words)) if words else None


def name_taken(facts: Facts) -> Hold | None:
    """A stranger holds a name that the job needs: no number rises and nothing is created until it has gone."""
    words = objects.conflict(facts.snapshot)
    return _wait(facts, "NameConflict", words) if words else None


def resume_source(facts: Facts) -> Hold | None:
    """The job to go on from is not there, has no checkpoint, or has it elsewhere: nothing begins until that changes."""
    waits = resuming.waits(facts)
    return _wait(facts, *waits, again_at=facts.now + resuming.LOOK_SECONDS) if waits else None


def _wait(facts: Facts, reason: str, words: str, again_at: float | None = None) -> Hold:
    raising = unchanged(facts)
    waiting = processes.create(facts, raising, pins.pinned(facts, raising.afresh))
    told = report(facts, raising, troubles(facts, raising, waiting.conflicts), (reason, words))
    status, due = settle(facts, with_recovery(facts, raising, told))
    wake = wake_at(facts, status, due, waiting.wake, again_at)
    return Hold(Plan(status=status, intent=facts.first_seen, wake_at=wake, want_progress=pull_due(facts, status)))


def _suspend(facts: Facts) -> Plan:
    """Tells every process to end, which makes the last checkpoint; Suspended once no process is left."""
    if not facts.left and not facts.snapshot.live and not facts.first_seen and facts.stored.phase != "Suspended":
        return Plan(status=facts.snapshot.status or JobStatus(), intent=False, needs_live=True)
    status, due = settle(facts, _status(facts))
    wake = min((at for at in (due, *(_late_at(pod) for pod in facts.left)) if at is not None and at > facts.now), default=None)
    deletes = tuple(
        # A kubelet out of reach never confirms; only then is a pod taken off by force.
        DeleteProcess(pod.name, pod.uid, FORCE if pod.node_lost else None, why="the job is suspended")
        for pod in facts.pods
        if pod.deleting is None or pod.node_lost
    )
    events: tuple[Event, ...] = ()
    if _reason(facts.stored) != _reason(status):
        words = "all processes end; shards make a last checkpoint" if facts.left else "no process is left"
        leaving = objects.leaving(facts.snapshot)
        events = (Event("Warning" if leaving else "Normal", _reason(status), short(f"{words}; {leaving[1]}" if leaving else words)),)
    return Plan(status=status, intent=bool(deletes) and status != facts.snapshot.status, actions=deletes, events=events, wake_at=wake)


def _stall(facts: Facts, reason: str, message: str) -> Plan:
    said = {kind: Say("False" if kind == "Ready" else "True", reason, message) for kind in ("Ready", "Stalled")}
    kept = {it.type: Say(it.status, it.reason, it.message) for it in facts.stored.conditions if it.type not in OF_THE_PHASE}
    kept |= resumed(facts.stored.conditions, bool(facts.snapshot.spec.suspend))
    generation = facts.snapshot.generation
    update = {
        "checkpoint": checkpoint(facts),
        "progress": progress(facts),
        "observed_generation": generation,
        "conditions": conditions({**said, **kept}, facts.stored.conditions, generation, facts.now),
    }
    status, wake = settle(facts, facts.stored.model_copy(update=update))
    events = () if _reason(facts.stored) == _reason(status) else (Event("Warning", reason, short(message)),)
    wake = wake_at(facts, status, wake)
    return Plan(status=status, intent=False, events=events, wake_at=wake, want_progress=pull_due(facts, status))


def _status(facts: Facts) -> JobStatus:
    leaving = objects.leaving(facts.snapshot)
    if facts.left:
        ends = f"processes end, and {leaving[1]}" if leaving else "processes make a last checkpoint and end"
        ending = starting(SUSPENDING, f"spec.suspend is true; {ends}{_kept(facts)}")
        status = describe(facts, unchanged(facts), facts.stored.phase or "Pending", ending)
        return status.model_copy(update={"workers": status.workers.model_copy(update={"pending_starts": ""})})
    status = describe(facts, unchanged(facts), "Suspended", suspended(f"spec.suspend is true; {_goes_on(facts)}{_kept(facts)}"))
    # A run that never began, or of which nothing is left that an older operator made, is pinned when it begins.
    shards = tuple(
        ShardStatus(index=shard.index, attempt=shard.attempt, state=shard.state if shard.state == "Finished" else "Pending")
        for shard in status.shards
    )
    workers = status.workers.model_copy(update={"pending_starts": ""})
    return status.model_copy(update={"shards": shards, "workers": workers, "start_time": None, "pinned": facts.stored.pinned})


def _late_at(pod: Process) -> float | None:
    """When a pod that was told to end is late, so that people are told who keeps it; None of one that was not told."""
    return None if pod.deleting is None else pod.deleting + LATE_SECONDS


def _kept(facts: Facts) -> str:
    """Which pods are told to go and still there, and who keeps them; empty where none is late."""
    late = [pod for pod in facts.pods if pod.deleting is not None and (pod.ended or pod.deleting + LATE_SECONDS <= facts.now)]
    words = [text for pod in late if (text := _keeper(pod))]
    more = f" and {len(words) - MOST_KEPT} more" if len(words) > MOST_KEPT else ""
    return "".join(f"; {text}" for text in words[:MOST_KEPT]) + more


def _keeper(pod: Process) -> str:
    """Who keeps this pod; empty where an ended one is just going."""
    by = f"kept by its finalizer {', '.join(pod.finalizers)}" if pod.finalizers else ""
    if pod.ended:
        return f"pod {pod.name} has ended and is {by}" if by else ""
    silent = f"node {pod.node} has not said that it ended" if pod.node else "it has no node"
    return f"pod {pod.name} was to end by {stamp(pod.deleting or 0.0)}: {by or silent}"


def _goes_on(facts: Facts) -> str:
    """What a suspended job goes on from; a claim that was never made has not gone."""
    snapshot = facts.snapshot
    if leaving := objects.leaving(snapshot):
        return f"nothing is left to go on from: {leaving[1]}"
    if objects.makes_claim(snapshot.spec) and snapshot.objects.claim is None and facts.stored.checkpoint is not None:
        name = naming.claim(snapshot.name)
        return f"claim {name} has gone with its checkpoints, or has lost its label; put it back before spec.suspend is false"
    return "it starts anew" if snapshot.spec.checkpoint.disabled else "it goes on from its last checkpoint"


def _reason(status: JobStatus) -> str:
    ready = status.condition("Ready")
    return ready.reason if ready else ""
