"""activeDeadlineSeconds: the job fails when it has been active for so long."""

from __future__ import annotations

from psjob_operator.plan.ending import Ending
from psjob_operator.plan.facts import Facts
from psjob_operator.plan.times import unix


def passed(facts: Facts) -> Ending | None:
    """Failed, DeadlineExceeded, once the deadline is reached."""
    at = due(facts, facts.stored.start_time)
    if at is None or facts.now < at:
        return None
    seconds = facts.snapshot.spec.run_policy.active_deadline_seconds
    return Ending(
        "Failed", "DeadlineExceeded", f"active for longer than spec.runPolicy.activeDeadlineSeconds: {seconds}; its checkpoints are kept"
    )


def due(facts: Facts, start_time: str | None) -> float | None:
    """Unix time of the deadline of a job that is active since `start_time`; None without one, or while it is not active."""
    seconds = facts.snapshot.spec.run_policy.active_deadline_seconds
    begun = unix(start_time)
    return begun + seconds if seconds is not None and begun is not None else None
