"""When shard 0 is asked how far training is."""

from __future__ import annotations

from psjob_operator.api.status import JobStatus
from psjob_operator.plan.conditions import find
from psjob_operator.plan.facts import Facts
from psjob_operator.plan.times import unix

PROGRESS_SECONDS = 60.0
RUNNING_SECONDS = 10.0
"""After all came up: asked at once, shard 0 would tell of workers that just attach, and that would stand for a minute."""
PENDING_SECONDS = 60.0
"""A job of which a part never comes up may train without it."""


def due(facts: Facts, status: JobStatus) -> bool:
    """Shard 0 is worth asking now; how often is the ground's choice."""
    since = _from(facts, status)
    return since is not None and since <= facts.now


def wake_at(facts: Facts, status: JobStatus) -> float | None:
    """Unix time of the next question; None while shard 0 does not serve."""
    since = _from(facts, status)
    if since is None or since > facts.now:
        return since
    pulled = (facts.snapshot.progress_at or 0.0) + PROGRESS_SECONDS
    return pulled if pulled > facts.now else facts.now + PROGRESS_SECONDS


def _from(facts: Facts, status: JobStatus) -> float | None:
    first = facts.shards[0] if facts.shards else None
    if first is None or first.fate.kind != "running" or not first.up:
        return None
    if status.phase == "Recovering" or facts.snapshot.spec.workers.step_timeout_seconds is not None:
        return 0.0  # with a limit for steps it is asked again soon anyway
    ready = find(status.conditions, "Ready")
    since = unix(ready.last_transition_time) if ready else None
    return (since or 0.0) + (RUNNING_SECONDS if status.phase == "Running" else PENDING_SECONDS)
