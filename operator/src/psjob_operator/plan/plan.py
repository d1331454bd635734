"""The decision: a job, what exists and the time go in; a status and acts come out. The same for a cluster and a laptop.

Policies are asked in turn. Those in this file hold a job without ending it: a suspension, a spec or a version that this operator cannot
read, a name that is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from psjob_operator.api.status import JobStatus, ShardStatus, short, stamp
from psjob_operator.plan import objects, pods, restarts, terminal
from psjob_operator.plan.actions import DeleteProcess, Event, Plan
from psjob_operator.plan.conditions import (
    WRITTEN_ANEW,
    Say,
    resumed_conditions,
    starting_conditions,
    suspended_conditions,
    troubles,
    with_times,
)
from psjob_operator.plan.job_state import SUSPENDING, JobState, current_checkpoint, current_progress, pull_due
from psjob_operator.plan.observed_state import ObservedState, Process
from psjob_operator.plan.pods import FORCE
from psjob_operator.plan.restarts import RestartDecision, unchanged
from psjob_operator.plan.status import describe, recovered, recovering, running_status, settle, wake_at, with_recovery
from psjob_operator.plan.terminal import TerminalPhase

OURS = "psjob.dev/operator"
"""spec.managedBy of this operator's jobs, which is what no value means too; and who reports its Events."""
LATE_SECONDS = 10.0
"""A pod that is still there so long after it was to end is named."""
MOST_KEPT = 3
"""Pods that one sentence names."""


@dataclass(frozen=True)
class Hold:
    """Nothing new is made of the job for now; `plan` is what is done meanwhile."""

    plan: Plan


Policy = Callable[[JobState], TerminalPhase | Hold | RestartDecision | None]
"""What one rule makes of a job: an end, a hold, numbers to raise, or None where it has nothing to say."""


def plan(observed: ObservedState, now: float) -> Plan:
    """What to store and do about `observed` at unix time `now`. Never raises for what it can hold."""
    state = JobState.of(observed, now)
    for policy in POLICIES:
        match policy(state):
            case TerminalPhase() as ending:
                return terminal.end(state, ending)
            case Hold() as hold:
                return hold.plan
            case RestartDecision() as decision:
                return _run(state, decision)
    raise AssertionError("the last policy always answers")


def _run(state: JobState, decision: RestartDecision) -> Plan:
    """Stores the numbers that rise, creates what is missing, deletes what was replaced."""
    observed = state.observed
    # An absence in what the watches brought may be a delay of theirs: the API server is asked before a number rises for it.
    if decision.rests_on_absence and not observed.live:
        return Plan(status=observed.status or JobStatus(), intent=False, needs_live=True)
    pinned = pods.pinned(state, decision.afresh)
    # What was raised now, and what was granted before and is not there yet.
    creating = pods.create_pods(state, decision, pinned)
    keys = objects.ensure_key(observed, pinned) if creating.actions else ()
    pairs = objects.ensure_pairs(observed, creating.actions)
    # The status tells who keeps each seat empty, and what a recovery has cost.
    told = with_recovery(state, decision, running_status(state, decision, troubles(state, decision, creating.conflicts)))
    # Counters, words and progress are written no oftener than they are worth.
    status, due = settle(state, told)
    return Plan(
        status=status,
        intent=bool(decision.raised) or state.first_seen or pinned != state.stored.internal.pinned,
        grants=frozenset(decision.name(observed.name, seat) for seat in decision.raised),
        # Deletes of what was replaced stand before creates: on a full node the new pod needs the place.
        actions=(*objects.ensure(observed, pinned), *keys, *pairs, *pods.replaced(state, decision), *creating.actions),
        events=_events(state, decision, status),
        wake_at=wake_at(state, status, due, creating.wake, *(at for at, _ in decision.held)),
        want_progress=pull_due(state, status),
    )


def _events(state: JobState, decision: RestartDecision, status: JobStatus) -> tuple[Event, ...]:
    events = []
    if decision.afresh and not state.first_seen:
        anew = state.observed.spec.checkpoint.disabled
        words = "spec.checkpoint.disabled is true: training starts anew" if anew else "all processes start from the last checkpoint"
        events.append(Event("Warning" if anew else "Normal", "Resumed", words))
    elif decision.raised and not state.first_seen:
        counted = any(seat.outcome.counted for seat in decision.raised)
        events.append(Event("Warning" if counted else "Normal", "Restarted", short(recovering(state, decision))))
    taken, pinned = state.observed.key_taken, status.internal.pinned
    if taken is not None and pinned is not None and pinned.key == taken + 1 and state.stored.internal.pinned != pinned:
        name = objects.key_secret_name(state.observed.name, state.observed.uid, taken)
        events.append(Event("Warning", "KeysTaken", f"Secret {name} was there before any pod; others may know its keys, new ones are made"))
    if state.observed.contended and state.stored.condition("Contended") is None:
        events.append(Event("Warning", "Contended", state.observed.contended))
    # After a loss Restarted says why it stood still, and Recovered that training continues.
    if status.running and not state.has_run:
        events.append(Event("Normal", "Running", "all shards and workers are running"))
    return (*events, *recovered(state.stored, status))


def not_ours(state: JobState) -> Hold | None:
    """Another controller's, or being deleted: not even the status is touched."""
    if state.observed.deleting or state.observed.spec.managed_by not in (None, OURS):
        return Hold(Plan(status=state.observed.status or JobStatus(), intent=False))
    return None


def finished(state: JobState) -> Hold | None:
    """Ended before: its processes are cleaned up, and it is deleted in its time."""
    return Hold(terminal.after(state)) if state.finished else None


def suspension(state: JobState) -> Hold | None:
    """To be suspended, or was being suspended and has processes left: that is finished first, whatever the spec says by now."""
    wanted = bool(state.observed.spec.suspend) or (state.suspending and bool(state.left))
    return Hold(_suspend(state)) if wanted else None


def unreadable(state: JobState) -> Hold | None:
    """This operator cannot read the spec whole. Stalled, until one is back that can; training needs none and continues."""
    problems = state.observed.spec_problems
    return Hold(_stall(state, terminal.spec_reason(problems), "; ".join(problems))) if problems else None


def another_version(state: JobState) -> TerminalPhase | Hold | None:
    """Begun by a version that this operator does not know: nothing that its processes say is read, so only deadlines may end it."""
    words = pods.unknown_version_message(state)
    if not words:
        return None
    ending = terminal.deadline_passed(state) or terminal.pending_too_long(state)
    return ending or Hold(_stall(state, "RunOfAnotherVersion", words))


def templates_changed(state: JobState) -> Hold | None:
    """Suspended, changed in what its pods are, and resumed: no process is made of another program in the middle of a run."""
    words = pods.templates_changed_message(state)
    return Hold(_stall(state, "TemplateChanged", words)) if words else None


def name_taken(state: JobState) -> Hold | None:
    """A stranger holds a name that the job needs: no number rises and nothing is created until it has gone."""
    words = objects.conflict(state.observed)
    return _wait(state, "NameConflict", words) if words else None


def resume_source(state: JobState) -> Hold | None:
    """The job to continue from is not there, has no checkpoint, or has it elsewhere: nothing begins until that changes."""
    waits = pods.waits_for_source(state)
    return _wait(state, *waits, again_at=state.now + pods.LOOK_SECONDS) if waits else None


def _wait(state: JobState, reason: str, words: str, again_at: float | None = None) -> Hold:
    decision = unchanged(state)
    waiting = pods.create_pods(state, decision, pods.pinned(state, decision.afresh))
    told = running_status(state, decision, troubles(state, decision, waiting.conflicts), (reason, words))
    status, due = settle(state, with_recovery(state, decision, told))
    wake = wake_at(state, status, due, waiting.wake, again_at)
    return Hold(Plan(status=status, intent=state.first_seen, wake_at=wake, want_progress=pull_due(state, status)))


def _suspend(state: JobState) -> Plan:
    """Tells every process to end, which makes the last checkpoint; Suspended once no process is left."""
    if not state.left and not state.observed.live and not state.first_seen and not state.suspended:
        return Plan(status=state.observed.status or JobStatus(), intent=False, needs_live=True)
    status, due = settle(state, _suspended_status(state))
    wake = min((at for at in (due, *(_late_at(pod) for pod in state.left)) if at is not None and at > state.now), default=None)
    deletes = tuple(
        # A kubelet out of reach never confirms; only then is a pod taken off by force.
        DeleteProcess(pod.name, pod.uid, FORCE if pod.node_lost else None, why="the job is suspended")
        for pod in state.pods
        if pod.deleting is None or pod.node_lost
    )
    events: tuple[Event, ...] = ()
    if _reason(state.stored) != _reason(status):
        words = "all processes end; shards make a last checkpoint" if state.left else "no process is left"
        leaving = objects.leaving(state.observed)
        events = (Event("Warning" if leaving else "Normal", _reason(status), short(f"{words}; {leaving[1]}" if leaving else words)),)
    return Plan(status=status, intent=bool(deletes) and status != state.observed.status, actions=deletes, events=events, wake_at=wake)


def _stall(state: JobState, reason: str, message: str) -> Plan:
    said = {kind: Say("False" if kind == "Ready" else "True", reason, message) for kind in ("Ready", "Stalled")}
    kept = {it.type: Say(it.status, it.reason, it.message) for it in state.stored.conditions if it.type not in WRITTEN_ANEW}
    kept |= resumed_conditions(state.stored.conditions, bool(state.observed.spec.suspend))
    generation = state.observed.generation
    update = {
        "checkpoint": current_checkpoint(state),
        "progress": current_progress(state),
        "observed_generation": generation,
        "conditions": with_times({**said, **kept}, state.stored.conditions, generation, state.now),
    }
    status, wake = settle(state, state.stored.model_copy(update=update))
    events = () if _reason(state.stored) == _reason(status) else (Event("Warning", reason, short(message)),)
    wake = wake_at(state, status, wake)
    return Plan(status=status, intent=False, events=events, wake_at=wake, want_progress=pull_due(state, status))


def _suspended_status(state: JobState) -> JobStatus:
    leaving = objects.leaving(state.observed)
    if state.left:
        ends = f"processes end, and {leaving[1]}" if leaving else "processes make a last checkpoint and end"
        ending = starting_conditions(SUSPENDING, f"spec.suspend is true; {ends}{_kept(state)}")
        status = describe(state, unchanged(state), ending)
        return status.model_copy(update={"internal": status.internal.model_copy(update={"pending_starts": ""})})
    status = describe(state, unchanged(state), suspended_conditions(f"spec.suspend is true; {_continues_from(state)}{_kept(state)}"))
    # A run that never began, or of which nothing is left that an older operator made, is pinned when it begins.
    shards = tuple(
        ShardStatus(index=shard.index, attempt=shard.attempt, state=shard.state if shard.state == "Finished" else "Pending")
        for shard in status.shards
    )
    nobody = {"pending_starts": "", "ready_time": None, "lost_time": None}
    internal = status.internal.model_copy(update={**nobody, "pinned": state.stored.internal.pinned})
    return status.model_copy(update={"shards": shards, "internal": internal, "start_time": None})


def _late_at(pod: Process) -> float | None:
    """When a pod that was told to end is late, so that people are told who keeps it; None of one that was not told."""
    return None if pod.deleting is None else pod.deleting + LATE_SECONDS


def _kept(state: JobState) -> str:
    """Which pods are told to go and still there, and who keeps them; empty where none is late."""
    late = [pod for pod in state.pods if pod.deleting is not None and (pod.ended or pod.deleting + LATE_SECONDS <= state.now)]
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


def _continues_from(state: JobState) -> str:
    """What a suspended job continues from; a claim that was never made has not gone."""
    observed = state.observed
    if leaving := objects.leaving(observed):
        return f"nothing is left to continue from: {leaving[1]}"
    if objects.makes_claim(observed.spec) and observed.objects.claim is None and state.stored.checkpoint is not None:
        name = objects.claim_name(observed.name)
        return f"claim {name} has gone with its checkpoints, or has lost its label; put it back before spec.suspend is false"
    return "it starts anew" if observed.spec.checkpoint.disabled else "it continues from its last checkpoint"


def _reason(status: JobStatus) -> str:
    ready = status.condition("Ready")
    return ready.reason if ready else ""


POLICIES: tuple[Policy, ...] = (
    # A job of another controller, one that is being deleted, and one that has ended: nothing below is any business of theirs.
    not_ours,
    finished,
    # What nothing holds up: a job that cannot begin, and success, though the job be suspended or its spec unreadable by now.
    terminal.invalid,
    terminal.complete,
    # Before any failure: processes that end for a suspension are no losses, and a suspended job's deadline does not run.
    suspension,
    # Before what processes say is read: theirs is another version's.
    another_version,
    # Why a job that has begun is over. Processes come first, since they say why; the clocks come last.
    terminal.fatal,
    terminal.lost_for_good,
    terminal.too_often,
    terminal.never_attached,
    terminal.deadline_passed,
    terminal.pending_too_long,
    # After all ends: an operator that cannot read the spec makes nothing, and still ends the job in its time.
    unreadable,
    templates_changed,
    name_taken,
    resume_source,
    # Nothing ends the job or holds it. At first sight and after a suspension everything starts; later what was lost does.
    restarts.afresh,
    restarts.lost,
)
"""In the order in which they are asked. The first that answers decides, and the last one always does."""
