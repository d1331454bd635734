"""Ending a job, and what is done after its end."""

from __future__ import annotations

from psjob_operator.api.status import JobStatus
from psjob_operator.plan import cleanup, indexes, report, ttl
from psjob_operator.plan.actions import Action, DeleteJob, Event, Plan
from psjob_operator.plan.conditions import complete, conditions, failed
from psjob_operator.plan.ending import Ending
from psjob_operator.plan.facts import Facts
from psjob_operator.plan.progress import checkpoint, progress
from psjob_operator.plan.raising import restarts, unchanged
from psjob_operator.plan.times import stamp
from psjob_operator.plan.words import short


def end(facts: Facts, ending: Ending) -> Plan:
    """The terminal phase is stored first, then processes are cleaned up: after a crash in between, the phase stands."""
    status = _status(facts, ending)
    event = Event("Normal" if ending.phase == "Complete" else "Warning", ending.reason, short(ending.message))
    return Plan(status=status, intent=True, actions=cleanup.after_finish(facts), events=(event,), wake_at=_due(facts, status))


def after(facts: Facts) -> Plan:
    """A finished job: its status stands but for the generation it answers; clean-up, and the deletion of the job in its time."""
    status = facts.snapshot.status or JobStatus()
    if status.observed_generation != facts.snapshot.generation:
        generation = facts.snapshot.generation
        kept = tuple(condition.model_copy(update={"observed_generation": generation}) for condition in status.conditions)
        status = status.model_copy(update={"observed_generation": generation, "conditions": kept})
    due = ttl.due(facts)
    actions: tuple[Action, ...] = cleanup.after_finish(facts)
    if due is not None and due <= facts.now:
        return Plan(status=status, intent=False, actions=(DeleteJob(),))
    return Plan(status=status, intent=False, actions=actions, wake_at=due)


def _due(facts: Facts, status: JobStatus) -> float | None:
    seconds = facts.snapshot.spec.run_policy.ttl_seconds_after_finished
    return None if seconds is None or status.completion_time is None else int(facts.now) + float(seconds)


def _status(facts: Facts, ending: Ending) -> JobStatus:
    stored, spec = facts.stored, facts.snapshot.spec
    as_they_are = unchanged(facts)
    done = ending.phase == "Complete"
    said = complete(ending.reason, ending.message) if done else failed(ending.reason, ending.message)
    said |= report.checkpoint_said(facts)
    lost = [] if done else [seat.index for seat in facts.workers if seat.fate.kind in ("lost", "fatal")]
    workers = report.workers(facts, as_they_are, ()).model_copy(update={"failed_indexes": indexes.to_text(lost), "pending_starts": ""})
    return JobStatus(
        observed_generation=facts.snapshot.generation,
        phase=ending.phase,
        conditions=conditions(said, stored.conditions, facts.snapshot.generation, facts.now),
        run=facts.snapshot.uid,
        view=as_they_are.view or None,
        shards=report.shards(facts, as_they_are),
        shards_ready=f"{sum(seat.up for seat in facts.shards)}/{spec.ps.shards}",
        workers=workers,
        workers_ready=f"{sum(seat.up for seat in facts.workers)}/{spec.workers.replicas}",
        checkpoint=checkpoint(facts),
        progress=progress(facts),
        restarts=restarts(facts, as_they_are),
        start_time=stored.start_time,
        completion_time=stamp(facts.now),
    )
