"""How long training was interrupted by a loss, and what that undid: from the loss to the first step that all pass after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from psjob_operator.api.status import LARGEST, Interruption, JobStatus, Recovery
from psjob_operator.plan.actions import Event
from psjob_operator.plan.facts import Facts
from psjob_operator.plan.progress import amount, text, whole
from psjob_operator.plan.restarts import Raising, cause
from psjob_operator.plan.text import count, stamp, stamp_exact, unix

EACH_ITS_OWN = ("async", "bounded")
"""Modes in which workers do not go back together: what a lost shard had applied since the checkpoint is gone, and no step is done again."""
RECOVERED = "Recovered"
TOLD_SECONDS = 1.0
"""After the first step, until which all shards have told the coordinator what they lost."""
SLACK_SECONDS = 0.5
"""The first step is dated by the age that shard 0 tells, and the answer took a while."""


def with_recovery(facts: Facts, raising: Raising, status: JobStatus) -> JobStatus:
    """The status of a job that runs, with the interruption that begins, lasts or is over."""
    began = raising.raised and not raising.afresh and facts.stored.phase in ("Running", "Recovering")
    interruption = _begun(facts, raising) if began else None if raising.afresh else facts.stored.interruption
    if interruption is None or status.phase != "Running":
        return status.model_copy(update={"interruption": interruption})
    resumed = _Resumed.read(facts)
    if resumed is None or not resumed.is_after(interruption, raising):
        untold = bool(facts.coordinator) and "resumed" not in facts.coordinator
        return status.model_copy(update={"interruption": None if untold else interruption})
    return _over(facts, raising, status, interruption, resumed)


def recovered(before: JobStatus, status: JobStatus) -> tuple[Event, ...]:
    """The Event of a recovery that is over now."""
    last = status.last_recovery
    if last is None or last == before.last_recovery:
        return ()
    cost = (
        f"{count(last.steps_lost, 'step')} done again" if last.steps_lost is not None else f"{count(last.updates_lost or 0, 'update')} lost"
    )
    return (Event("Normal", RECOVERED, f"training goes on {last.seconds:g} s after the loss was seen ({last.cause}), {cost}"),)


def _begun(facts: Facts, raising: Raising) -> Interruption:
    """A second loss before the first step is of the same interruption, as far as shard 0 could be asked for that step."""
    known, asked = facts.stored.interruption, facts.snapshot.progress_at
    if known is not None:
        since = unix(known.since) or facts.now
        if facts.stored.phase == "Recovering" or (asked is not None and asked > since):
            return known
    ready = facts.stored.condition("Ready")
    waited = unix(ready.last_transition_time) if ready is not None and ready.status == "False" else None
    step = whole(facts.coordinator, "step")
    before = facts.stored.progress.step if facts.stored.progress is not None else None
    return Interruption(
        since=stamp_exact(facts.now if waited is None else min(waited, facts.now)),
        cause=cause(raising.raised[0]),
        step=before if step is None else step,
        attempt=facts.attempts[0],
        steps_lost=whole(facts.coordinator, "stepsLost") or 0,
        updates_lost=whole(facts.coordinator, "updatesLost") or 0,
    )


@dataclass(frozen=True)
class _Resumed:
    """The first step after the last interruption that shard 0 has seen."""

    view: int
    start: int
    from_step: int
    at: float
    """Unix time, by our clock."""

    @classmethod
    def read(cls, facts: Facts) -> _Resumed | None:
        """What a pod says; None where it is not told, or not in shape."""
        told, asked = facts.coordinator.get("resumed"), facts.snapshot.progress_at
        ended = facts.shards[0].process is None or facts.shards[0].process.exit is not None
        if not isinstance(told, Mapping) or asked is None or ended:
            return None
        view, start, from_step, age = whole(told, "view"), whole(told, "start"), whole(told, "from"), amount(told, "age")
        if view is None or start is None or from_step is None or age is None or age < 0:
            return None
        return cls(view, start, from_step, asked - age) if age >= TOLD_SECONDS else None

    def is_after(self, interruption: Interruption, raising: Raising) -> bool:
        """Were all processes there that were started again?"""
        since = unix(interruption.since)
        return self.view >= raising.view and self.start >= raising.start and since is not None and self.at >= since - SLACK_SECONDS


def _over(facts: Facts, raising: Raising, status: JobStatus, interruption: Interruption, resumed: _Resumed) -> JobStatus:
    same = interruption.attempt == raising.attempts[0]  # another process of shard 0 counts from 0
    steps = (whole(facts.coordinator, "stepsLost") or 0) - (interruption.steps_lost if same else 0)
    updates = (whole(facts.coordinator, "updatesLost") or 0) - (interruption.updates_lost if same else 0)
    together = text(facts, "mode").partition(":")[0] not in EACH_ITS_OWN
    # Where all processes went at once nobody is left who knows how far they were, but for whoever asked before.
    steps = max(steps, 0 if interruption.step is None else interruption.step - resumed.from_step, 0) if together else 0
    updates = 0 if together else max(updates, 0)
    last = Recovery(
        cause=interruption.cause,
        seconds=round(max(0.0, resumed.at - (unix(interruption.since) or resumed.at)), 1),
        steps_lost=steps if together else None,
        updates_lost=None if together else updates,
        time=stamp(resumed.at),
    )
    restarts = status.restarts
    # Shard 0 says how many; the sum stays one that the status can hold.
    total = {"steps_lost": min(restarts.steps_lost + steps, LARGEST), "updates_lost": min(restarts.updates_lost + updates, LARGEST)}
    return status.model_copy(update={"interruption": None, "last_recovery": last, "restarts": restarts.model_copy(update=total)})
