"""Ending a job, and what is done after its end: processes are cleaned up, and the job is deleted in its time."""

from __future__ import annotations

from psjob_operator.api.status import JobStatus
from psjob_operator.plan.actions import DeleteJob, Event, Plan
from psjob_operator.plan.conditions import complete, failed
from psjob_operator.plan.endings import Ending
from psjob_operator.plan.facts import Facts
from psjob_operator.plan.processes import left_over
from psjob_operator.plan.restarts import unchanged
from psjob_operator.plan.status import describe
from psjob_operator.plan.text import index_text, short, stamp, unix


def end(facts: Facts, ending: Ending) -> Plan:
    """The terminal phase is stored first, then processes are cleaned up: after a crash in between, the phase stands."""
    status = _status(facts, ending)
    event = Event("Normal" if ending.phase == "Complete" else "Warning", ending.reason, short(ending.message))
    return Plan(status=status, intent=True, actions=left_over(facts), events=(event,), wake_at=_deleted_at(facts, status))


def after(facts: Facts) -> Plan:
    """A finished job: its status stands but for the generation it answers; clean-up, and the deletion of the job in its time."""
    status = facts.snapshot.status or JobStatus()
    if status.observed_generation != facts.snapshot.generation:
        generation = facts.snapshot.generation
        kept = tuple(condition.model_copy(update={"observed_generation": generation}) for condition in status.conditions)
        status = status.model_copy(update={"observed_generation": generation, "conditions": kept})
    due = _deleted_at(facts, facts.stored)
    if due is not None and due <= facts.now:
        return Plan(status=status, intent=False, actions=(DeleteJob(),))
    return Plan(status=status, intent=False, actions=left_over(facts), wake_at=due)


def _deleted_at(facts: Facts, status: JobStatus) -> float | None:
    """Unix time at which ttlSecondsAfterFinished deletes the job; None where it is kept."""
    seconds = facts.snapshot.spec.run_policy.ttl_seconds_after_finished
    ended = unix(status.completion_time)
    return ended + seconds if seconds is not None and ended is not None else None


def _status(facts: Facts, ending: Ending) -> JobStatus:
    done = ending.phase == "Complete"
    said = complete(ending.reason, ending.message) if done else failed(ending.reason, ending.message)
    status = describe(facts, unchanged(facts), ending.phase, said)
    lost = [] if done else [seat.index for seat in facts.workers if seat.fate.kind in ("lost", "fatal")]
    workers = status.workers.model_copy(update={"failed_indexes": index_text(lost), "pending_starts": ""})
    return status.model_copy(update={"workers": workers, "completion_time": stamp(facts.now)})
