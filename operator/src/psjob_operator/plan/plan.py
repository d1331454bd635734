"""The decision: a job, what exists and the time go in; a status and acts come out. The same for a cluster and a laptop."""

from __future__ import annotations

from collections.abc import Callable

from psjob_operator.api.status import JobStatus, short
from psjob_operator.plan import holds, objects, pods, restarts, terminal
from psjob_operator.plan.actions import Event, Plan
from psjob_operator.plan.conditions import troubles
from psjob_operator.plan.holds import Hold
from psjob_operator.plan.job_state import JobState, pull_due
from psjob_operator.plan.observed_state import ObservedState
from psjob_operator.plan.restarts import RestartDecision
from psjob_operator.plan.status import recovered, recovering, report, settle, wake_at, with_recovery
from psjob_operator.plan.terminal import Ending

Policy = Callable[[JobState], Ending | Hold | RestartDecision | None]
"""What one rule makes of a job: an end, a hold, numbers to raise, or None where it has nothing to say."""

POLICIES: tuple[Policy, ...] = (
    # A job of another controller, one that is being deleted, and one that has ended: nothing below is any business of theirs.
    holds.not_ours,
    holds.finished,
    # What nothing holds up: a job that cannot begin, and success, though the job be suspended or its spec unreadable by now.
    terminal.invalid,
    terminal.complete,
    # Before any failure: processes that end for a suspension are no losses, and a suspended job's deadline does not run.
    holds.suspension,
    # Before what processes say is read: theirs is another version's.
    holds.another_version,
    # Why a job that has begun is over. Processes come first, since they say why; the clocks come last.
    terminal.fatal,
    terminal.lost_for_good,
    terminal.too_often,
    terminal.never_attached,
    terminal.deadline_passed,
    terminal.pending_too_long,
    # After all ends: an operator that cannot read the spec makes nothing, and still ends the job in its time.
    holds.unreadable,
    holds.templates_changed,
    holds.name_taken,
    holds.resume_source,
    # Nothing ends the job or holds it. At first sight and after a suspension everything starts; later what was lost does.
    restarts.afresh,
    restarts.lost,
)
"""In the order in which they are asked. The first that answers decides, and the last one always does."""


def plan(observed: ObservedState, now: float) -> Plan:
    """What to store and do about `observed` at unix time `now`. Never raises for what it can hold."""
    state = JobState.of(observed, now)
    for policy in POLICIES:
        match policy(state):
            case Ending() as ending:
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
    # The status tells who keeps each seat empty, and what a recovery has cost.
    told = with_recovery(state, decision, report(state, decision, troubles(state, decision, creating.conflicts)))
    # Counters, words and progress are written no oftener than they are worth.
    status, due = settle(state, told)
    return Plan(
        status=status,
        intent=bool(decision.raised) or state.first_seen or pinned != state.stored.internal.pinned,
        grants=frozenset(decision.name(observed.name, seat) for seat in decision.raised),
        # Deletes of what was replaced stand before creates: on a full node the new pod needs the place.
        actions=(*objects.ensure(observed, pinned), *keys, *pods.replaced(state, decision), *creating.actions),
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
