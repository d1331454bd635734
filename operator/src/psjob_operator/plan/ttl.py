"""ttlSecondsAfterFinished: the job object is deleted so long after it ended."""

from __future__ import annotations

from psjob_operator.plan.facts import Facts
from psjob_operator.plan.times import unix


def due(facts: Facts) -> float | None:
    """Unix time at which the job is deleted; None where it is kept."""
    seconds = facts.snapshot.spec.run_policy.ttl_seconds_after_finished
    ended = unix(facts.stored.completion_time)
    return ended + seconds if seconds is not None and ended is not None else None
