"""Shards that share a volume which one node can mount are one volume group: where one of them cannot stay, all of them move.

A volume group is numbered by the view in which its shards began (`status.placement`). Their pods' affinity names that number, so no new
pod is drawn to the node of pods that end. The scheduler counts a terminating pod, and does not look again when it has gone
(kubernetes#141354).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from psjob_operator.api.claim_template import MANY, many_nodes
from psjob_operator.plan.facts import Facts, Seat
from psjob_operator.plan.fate import Fate
from psjob_operator.plan.objects import makes_claim, named_claim
from psjob_operator.plan.snapshot import Snapshot

LEAVES = ("Drained", "NodeLost", "NodeShutdown")
"""Causes after which a node takes no pod back."""
AFFINITY = "pod affinity"
"""Words of the scheduler where other nodes are refused for the sake of the shards that stand elsewhere."""
STUCK_SECONDS, STUCK_MOST = 10.0, 120.0
"""A shard for which its node has no place moves with all others after so long; twice as long each time, up to the second."""


def shared(snapshot: Snapshot) -> bool:
    """The shards write to one volume that one node at a time can mount. A user's claim is taken for one until its modes are known:
    shards on one node work with every claim."""
    if snapshot.spec.ps.placement == "colocated":  # they follow their workers; where there are several, no such volume is taken
        return False
    if makes_claim(snapshot.spec):
        return not many_nodes(snapshot.spec.checkpoint.volume_claim_template)
    return bool(named_claim(snapshot.spec)) and MANY not in (snapshot.objects.modes or ())


def moved(facts: Facts) -> tuple[Seat, ...]:
    """All shards, as lost, where they must go elsewhere together; none where they stay."""
    if not shared(facts.snapshot):
        return ()
    shards = tuple(seat for seat in facts.shards if seat.fate.kind not in ("done", "fatal"))
    left = any(seat.fate.kind == "lost" and seat.fate.cause in LEAVES for seat in shards)
    stuck = any(facts.now >= at for at in _stuck(facts))
    return tuple(seat if seat.fate.kind == "lost" else replace(seat, fate=_leaving(seat)) for seat in shards) if left or stuck else ()


def moves_at(facts: Facts) -> float | None:
    """Unix time at which shards move because one of them found no place; None where each has one."""
    return min((at for at in _stuck(facts) if at > facts.now), default=None)


def waited(facts: Facts) -> int:
    """Seconds that the shards of this volume group were given to find a place: the next one has twice as many."""
    return round(patience(facts.shards))


def patience(seats: Iterable[Seat]) -> float:
    """Seconds that pods that move together are given to find a place: twice as many as the last time."""
    before = max((seat.process.waited for seat in seats if seat.process is not None), default=0)
    return min(2.0 * before, STUCK_MOST) or STUCK_SECONDS


def _stuck(facts: Facts) -> tuple[float, ...]:
    """When each shard that has no place beside the others will have had none for long enough."""
    if not shared(facts.snapshot) or not any(pod.role == "shard" and pod.node and pod.exit is None for pod in facts.pods):
        return ()
    waiting = (seat.process for seat in facts.shards if seat.fate.kind == "waiting")
    return tuple(pod.created + waited(facts) for pod in waiting if pod is not None and AFFINITY in pod.unschedulable)


def _leaving(seat: Seat) -> Fate:
    return Fate("lost", "Moved", message=f"{seat} moves to the node of the other shards: one node at a time can mount their volume")
