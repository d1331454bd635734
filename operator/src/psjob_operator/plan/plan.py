"""The decision: a job, what exists and the time go in; a status and acts come out. The same for a cluster and a laptop."""

from __future__ import annotations

from collections.abc import Callable

from psjob_operator.api.status import JobStatus
from psjob_operator.plan import endings, finish, holds, naming, objects, pins, processes, restarts
from psjob_operator.plan.actions import Event, Plan
from psjob_operator.plan.endings import Ending
from psjob_operator.plan.facts import Facts
from psjob_operator.plan.holds import Hold
from psjob_operator.plan.progress import pull_due
from psjob_operator.plan.recovery import recovered, with_recovery
from psjob_operator.plan.restarts import Raising
from psjob_operator.plan.settle import settle, wake_at
from psjob_operator.plan.snapshot import Snapshot
from psjob_operator.plan.status import recovering, report
from psjob_operator.plan.text import short
from psjob_operator.plan.troubles import troubles

Policy = Callable[[Facts], Ending | Hold | Raising | None]
"""What one rule makes of a job: an end, a hold, numbers to raise, or None where it has nothing to say."""

POLICIES: tuple[Policy, ...] = (
    # A job of another controller, one that is being deleted, and one that has ended: nothing below is any business of theirs.
    holds.not_ours,
    holds.finished,
    # What nothing holds up: a job that cannot begin, and success, though the job be suspended or its spec unreadable by now.
    endings.invalid,
    endings.complete,
    # Before any failure: processes that end for a suspension are no losses, and a suspended job's deadline does not run.
    holds.suspension,
    # Before what processes say is read: theirs is another version's.
    holds.another_version,
    # Why a job that has begun is over. Processes come first, since they say why; the clocks come last.
    endings.fatal,
    endings.lost_for_good,
    endings.too_often,
    endings.never_attached,
    endings.deadline_passed,
    endings.pending_too_long,
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


def plan(snapshot: Snapshot, now: float) -> Plan:
    """What to store and do about `snapshot` at unix time `now`. Never raises for what a snapshot can hold."""
    facts = Facts.of(snapshot, now)
    for policy in POLICIES:
        match policy(facts):
            case Ending() as ending:
                return finish.end(facts, ending)
            case Hold() as hold:
                return hold.plan
            case Raising() as raising:
                return _run(facts, raising)
    raise AssertionError("the last policy always answers")


def _run(facts: Facts, raising: Raising) -> Plan:
    """Stores the numbers that rise, creates what is missing, deletes what was replaced."""
    snapshot = facts.snapshot
    # An absence in what the watches brought may be a delay of theirs: the API server is asked before a number rises for it.
    if raising.rests_on_absence and not snapshot.live:
        return Plan(status=snapshot.status or JobStatus(), intent=False, needs_live=True)
    pinned = pins.pinned(facts, raising.afresh)
    # What was raised now, and what was granted before and is not there yet.
    creating = processes.create(facts, raising, pinned)
    keys = objects.ensure_key(snapshot, pinned) if creating.actions else ()
    # The status tells who keeps each seat empty, and what a recovery has cost.
    told = with_recovery(facts, raising, report(facts, raising, troubles(facts, raising, creating.conflicts)))
    # Counters, words and progress are written no oftener than they are worth.
    status, due = settle(facts, told)
    return Plan(
        status=status,
        intent=bool(raising.raised) or facts.first_seen or pinned != facts.stored.pinned,
        grants=frozenset(raising.name(snapshot.name, seat) for seat in raising.raised),
        # Deletes of what was replaced stand before creates: on a full node the new pod needs the place.
        actions=(*objects.ensure(snapshot, pinned), *keys, *processes.replaced(facts, raising), *creating.actions),
        events=_events(facts, raising, status),
        wake_at=wake_at(facts, status, due, creating.wake, *(at for at, _ in raising.held)),
        want_progress=pull_due(facts, status),
    )


def _events(facts: Facts, raising: Raising, status: JobStatus) -> tuple[Event, ...]:
    events = []
    if raising.afresh and not facts.first_seen:
        anew = facts.snapshot.spec.checkpoint.disabled
        words = "spec.checkpoint.disabled is true: training starts anew" if anew else "all processes start from the last checkpoint"
        events.append(Event("Warning" if anew else "Normal", "Resumed", words))
    elif raising.raised and not facts.first_seen:
        counted = any(seat.fate.counted for seat in raising.raised)
        events.append(Event("Warning" if counted else "Normal", "Restarted", short(recovering(facts, raising))))
    taken = facts.snapshot.key_taken
    if taken is not None and status.pinned is not None and status.pinned.key == taken + 1 and facts.stored.pinned != status.pinned:
        name = naming.key(facts.snapshot.name, facts.snapshot.uid, taken)
        events.append(Event("Warning", "KeysTaken", f"Secret {name} was there before any pod; others may know its keys, new ones are made"))
    if facts.snapshot.contended and facts.stored.condition("Contended") is None:
        events.append(Event("Warning", "Contended", facts.snapshot.contended))
    # After a loss Restarted says why it stood still, and Recovered that training goes on.
    if status.phase == "Running" and facts.stored.phase not in ("Running", "Recovering"):
        events.append(Event("Normal", "Running", "all shards and workers are running"))
    return (*events, *recovered(facts.stored, status))
