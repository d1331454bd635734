"""A job that can never begin though no process of it failed: a worker ended well and never joined."""

from __future__ import annotations

from collections.abc import Mapping

from psjob_operator.plan.ending import Ending
from psjob_operator.plan.facts import Facts
from psjob_operator.plan.progress import whole

PATIENCE_SECONDS = 3.0
"""The coordinator must have been asked so long after the worker's success was stored, so that a late word of it counts."""


def never_attached(facts: Facts) -> Ending | None:
    """Failed, NeverAttached: the shards and the others would wait for that worker for ever.

    Said only of a first coordinator before the first step; a later one may not know of workers that left before.
    """
    asked, written = facts.snapshot.progress_at, facts.snapshot.written_at
    if asked is None or written is None or asked < written + PATIENCE_SECONDS:
        return None
    if whole(facts.coordinator, "step") != 0 or any(attempt > 1 for attempt in facts.attempts):
        return None
    told = facts.coordinator.get("workers")
    absent = [_rank(worker) for worker in told if _rank(worker) in facts.succeeded_before] if isinstance(told, list | tuple) else []
    if not absent:
        return None
    return Ending(
        "Failed",
        "NeverAttached",
        f"worker {absent[0]} ended with exit code 0 and never joined the job; "
        "its script must call psjob.attach(model, optimizer) and train with what that gives back",
    )


def _rank(worker: object) -> int | None:
    """Rank of a worker that the coordinator has never seen; None for any other."""
    return whole(worker, "rank") if isinstance(worker, Mapping) and worker.get("state") == "absent" else None
