"""Creating the processes whose number this process of the operator raised."""

from __future__ import annotations

from dataclasses import dataclass

from psjob_operator.plan.actions import CreateProcess
from psjob_operator.plan.facts import Facts, Seat
from psjob_operator.plan.progress import checkpoint_known
from psjob_operator.plan.raising import Raising
from psjob_operator.plan.snapshot import Refusal

CONFLICT = 409
AGAIN_SECONDS = 10.0
LONGEST_SECONDS = 300.0


@dataclass(frozen=True)
class Creating:
    """What to create now, what waits, and until when."""

    actions: tuple[CreateProcess, ...]
    conflicts: tuple[str, ...]
    """Names held by something that is not this job's."""
    wake: float | None


def create(facts: Facts, raising: Raising) -> Creating:
    """Every seat that was just raised, or was granted before and is not there yet; shards first, in index order."""
    taken = {process.name for process in facts.snapshot.processes}
    actions, conflicts, wakes = [], [], []
    known = checkpoint_known(facts)
    for seat in facts.seats:
        if not raising.is_raised(seat) and not seat.may_create:
            continue
        number = raising.number(seat)
        name = raising.name(facts.snapshot.name, seat)
        if name in taken:
            conflicts.append(name)
            continue
        again = facts.now if raising.is_raised(seat) or seat.refusal is None else retry_at(seat.refusal)
        if again > facts.now:
            wakes.append(again)
            continue
        actions.append(CreateProcess(seat.role, seat.index, number, raising.view, name, seat.role == "shard" and known))
    return Creating(tuple(actions), tuple(conflicts), min(wakes, default=None))


def retry_at(refusal: Refusal) -> float:
    """When to ask again: after 10 s, doubling up to 5 minutes."""
    return refusal.at + min(AGAIN_SECONDS * 2.0 ** min(max(refusal.tries, 1) - 1, 10), LONGEST_SECONDS)


def refused(seat: Seat) -> Refusal | None:
    """The API server's refusal that keeps the seat empty."""
    return seat.refusal if seat.may_create else None
