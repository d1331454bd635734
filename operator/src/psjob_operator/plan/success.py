"""When a job is complete."""

from __future__ import annotations

from psjob_operator.plan.conditions import find
from psjob_operator.plan.ending import Ending
from psjob_operator.plan.facts import Facts, Seat
from psjob_operator.plan.progress import text


def complete(facts: Facts) -> Ending | None:
    """Complete when the success policy is met and every shard ended with exit code 0, which it does only after the last manifest."""
    if not facts.first_seen and met(facts) and shards_done(facts):
        why = _diverged(facts)
        if why:
            return Ending("Complete", "Diverged", f"training has ended and its last checkpoint is committed, but it diverged: {why}")
        return Ending("Complete", "Completed", "training is done and its last checkpoint is committed")
    return None


def _diverged(facts: Facts) -> str:
    """Why the weights are of no use; what was said before holds where shard 0 says nothing any more."""
    kept = find(facts.stored.conditions, "Ready")
    before = kept.message if kept is not None and kept.reason == "Diverged" and not facts.coordinator else ""
    return text(facts, "diverged") or before


def met(facts: Facts) -> bool:
    """The success policy is met: no worker is started again."""
    if facts.first_seen:
        return False
    workers = facts.workers[:1] if facts.snapshot.spec.run_policy.success_policy == "FirstWorker" else facts.workers
    return all(seat.fate.kind == "done" for seat in workers)


def shards_done(facts: Facts) -> bool:
    """Every shard has ended with exit code 0."""
    return all(seat.fate.kind == "done" for seat in facts.shards)


def too_late(facts: Facts) -> tuple[Seat, ...]:
    """Workers that look for shards that have ended well before they came: nobody is left to tell them that training is done."""
    met = facts.met_starts
    if met is None or not shards_done(facts):
        return ()
    return tuple(seat for seat in facts.workers if seat.fate.kind == "running" and seat.number > met.get(seat.index, 0))
