"""Shard i beside worker i (`spec.ps.placement: colocated`): whose pod names whom, and when both start again together.

Of two that start together the worker goes where it can, and the shard's pod requires the node of that worker's start. One that starts
alone requires the node of the other as it is there. Affinity names role, index and number, so a pod that goes draws nothing to its node.
Neither pod may wait for the other: where that could come about, both get new numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from psjob_operator.plan.actions import Beside
from psjob_operator.plan.facts import Facts, Seat
from psjob_operator.plan.fate import Fate
from psjob_operator.plan.objects import named_claim
from psjob_operator.plan.snapshot import Process, Role, Snapshot
from psjob_operator.plan.volumegroup import AFFINITY, LEAVES, patience

Loss = tuple[float, Seat]
"""When a seat gets a new number, and the seat as it is now."""
Pair = tuple[Seat, Seat]
"""A shard and its worker."""


def colocated(snapshot: Snapshot) -> bool:
    """Each shard stands beside the worker of its index."""
    return snapshot.spec.ps.placement == "colocated"


def problem(snapshot: Snapshot) -> str:
    """Why the shards cannot be on several nodes, of what only the operator sees: the modes of the user's claim. Empty where they can."""
    spec, modes = snapshot.spec, snapshot.objects.modes
    if spec.ps.placement not in ("spread", "colocated") or spec.ps.shards < 2 or modes is None or "ReadWriteMany" in modes:
        return ""
    return (
        f"spec.ps.placement: {spec.ps.placement} puts shards on several nodes, and claim {named_claim(spec)} has the modes"
        f" {', '.join(modes)}; name a claim with ReadWriteMany, or leave spec.ps.placement out"
    )


def together(facts: Facts, losses: Sequence[Loss]) -> list[Loss]:
    """The losses, with those of partners that start again too; two that start again do so at one time."""
    if not colocated(facts.snapshot):
        return list(losses)
    times = {(seat.role, seat.index): at for at, seat in losses}
    moved = [*losses, *(loss for pair in _pairs(facts) for loss in _partners(facts, pair, times))]
    latest: dict[int, float] = {}
    for at, seat in moved:
        latest[seat.index] = max(at, latest.get(seat.index, at))
    return [(latest[seat.index], seat) for _, seat in moved]


def beside(facts: Facts, seat: Seat, numbers: Mapping[tuple[Role, int], int]) -> Beside | None:
    """Whose node the pod of `seat` requires; None: any node. `numbers`: those of the seats that get a new one now."""
    if not colocated(facts.snapshot) or seat.index >= len(facts.shards):
        return None
    if seat.role == "shard":
        worker = facts.workers[seat.index]
        there = worker.may_create or worker.fate.kind in ("waiting", "running")
        number = numbers.get(("worker", seat.index), worker.number if there else None)
        return None if number is None else Beside("worker", seat.index, number)  # a pod that has ended holds no place
    shard = facts.shards[seat.index]
    if ("shard", seat.index) in numbers or not _stands(shard):
        return None
    return Beside("shard", seat.index, shard.number)


def moves_at(facts: Facts) -> float | None:
    """Unix time at which a pair moves because one of the two found no place beside the other; None where each has one."""
    times = (at for pair in _pairs(facts) if (at := _stuck_until(pair)) is not None)
    return min((at for at in times if at > facts.now), default=None)


def waited(facts: Facts, index: int) -> int:
    """Seconds that this pair was given to find a place together: the next two pods have twice as many."""
    return round(patience((facts.shards[index], facts.workers[index])))


def _pairs(facts: Facts) -> Iterator[Pair]:
    """Each shard that is not through with its work, and its worker."""
    if colocated(facts.snapshot):
        for shard, worker in zip(facts.shards, facts.workers, strict=False):
            if shard.fate.kind not in ("done", "fatal") and worker.fate.kind != "fatal":
                yield shard, worker


def _partners(facts: Facts, pair: Pair, times: Mapping[tuple[Role, int], float]) -> Iterator[Loss]:
    """Who of a pair starts again for the other's sake."""
    known = [times.get((seat.role, seat.index)) for seat in pair]
    if known == [None, None]:
        until = _stuck_until(pair)
        leaving = pair if until is not None and facts.now >= until else ()
        yield from ((0.0, _moving(seat)) for seat in leaving if not _stays(facts, seat))
        return
    for at, lost, other in ((known[0], *pair), (known[1], *pair[::-1])):
        if at is None or None not in known or _stays(facts, other):
            continue
        went = lost.fate.cause in LEAVES and _of_one_node(lost.process, other.process)
        pod = other.process
        if went:
            yield at, replace(other, fate=Fate("lost", lost.fate.cause, message=f"{other} is on the node of {lost}: {lost.fate.message}"))
        elif pod is not None and other.fate.kind == "waiting" and not pod.node:
            yield at, _moving(other)  # it may require the node of the one that is lost


def _stays(facts: Facts, seat: Seat) -> bool:
    """Its work is done, or nobody needs it any more."""
    return seat.fate.kind == "done" or (seat.role == "worker" and facts.success_met)


def _of_one_node(one: Process | None, other: Process | None) -> bool:
    """Do the two stand on one node, so far as is known?"""
    return one is None or other is None or not one.node or not other.node or one.node == other.node


def _stuck_until(pair: Pair) -> float | None:
    """When a pod will have waited long enough for a place beside the other, which stands or is through; None where neither waits so."""
    for waiting, other in (pair, pair[::-1]):
        pod = waiting.process
        without = pod is not None and waiting.fate.kind == "waiting" and AFFINITY in pod.unschedulable
        if pod is not None and without and (_stands(other) or other.fate.kind == "done"):
            return pod.created + patience(pair)
    return None


def _stands(seat: Seat) -> bool:
    """Its pod has a node, and holds its place there."""
    return seat.process is not None and bool(seat.process.node) and seat.fate.kind in ("running", "waiting")


def _moving(seat: Seat) -> Seat:
    other = "worker" if seat.role == "shard" else "shard"
    return replace(seat, fate=Fate("lost", "Moved", message=f"{seat} moves to the node of {other} {seat.index}"))
