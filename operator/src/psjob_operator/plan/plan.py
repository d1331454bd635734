"""The decision: a job, what exists and the time go in; a status and acts come out. The same for a cluster and a laptop."""

from __future__ import annotations

from psjob_operator.api.status import JobStatus
from psjob_operator.plan import endings, finish, holds, objects, placement, processes
from psjob_operator.plan.actions import Event, Plan
from psjob_operator.plan.facts import Facts
from psjob_operator.plan.progress import pull_at, pull_due
from psjob_operator.plan.recovery import recovered, with_recovery
from psjob_operator.plan.restarts import Raising, decide, unchanged
from psjob_operator.plan.settle import settle
from psjob_operator.plan.snapshot import Snapshot
from psjob_operator.plan.status import recovering, report
from psjob_operator.plan.text import short
from psjob_operator.plan.troubles import slow_at, troubles

OURS = "psjob.dev/operator"


def plan(snapshot: Snapshot, now: float) -> Plan:
    """What to store and do about `snapshot` at unix time `now`. Never raises for what a snapshot can hold."""
    if snapshot.deleting or snapshot.spec.managed_by not in (None, OURS):
        return Plan(status=snapshot.status or JobStatus(), intent=False)
    facts = Facts.of(snapshot, now)
    if facts.finished:
        return finish.after(facts)
    ending = endings.decided(facts)
    if ending is None and holds.suspension_wanted(facts):
        return holds.suspend(facts)
    afresh = facts.first_seen or facts.resuming
    if ending is None and not afresh:
        ending = endings.failed(facts)
    if ending is None and facts.snapshot.spec_problems:
        return holds.stall(facts)
    return finish.end(facts, ending) if ending else _run(facts, afresh)


def _run(facts: Facts, afresh: bool) -> Plan:
    """Raises numbers where something is lost, creates what is missing, deletes what was replaced."""
    snapshot = facts.snapshot
    blocked = objects.conflict(snapshot)
    raising = unchanged(facts) if blocked else decide(facts, afresh)
    if raising.rests_on_absence and not snapshot.live:
        return Plan(status=snapshot.status or JobStatus(), intent=False, needs_live=True)
    creating = processes.create(facts, raising)
    found = troubles(facts, raising, creating.conflicts)
    status, due = settle(facts, with_recovery(facts, raising, report(facts, raising, found, blocked)))
    wakes = (
        due,
        creating.wake,
        min((at for at, _ in raising.held), default=None),
        endings.deadline(facts, status.start_time),
        endings.pending_until(facts, status),
        slow_at(facts),
        pull_at(facts, status),
        placement.moves_at(facts),
    )
    return Plan(
        status=status,
        intent=bool(raising.raised) or facts.first_seen,
        grants=frozenset(raising.name(snapshot.name, seat) for seat in raising.raised),
        actions=() if blocked else (*objects.ensure(snapshot), *processes.replaced(facts, raising), *creating.actions),
        events=_events(facts, raising, status),
        wake_at=min((at for at in wakes if at is not None and at > facts.now), default=None),
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
    if status.phase == "Running" and facts.stored.phase != "Running":
        events.append(Event("Normal", "Running", "all shards and workers are running"))
    return (*events, *recovered(facts.stored, status))
