"""Which processes need one node, and move together where one of them cannot stay.

Shards that share a volume which one node can mount are one volume group, numbered by the term in which they began
(`status.internal.placedTerm`). Their pods' affinity names that number, so no new pod is drawn to the node of pods that end. The scheduler
counts a terminating pod, and does not look again when it has gone (kubernetes#141354).

With `spec.shards.placement: Colocated` shard i and worker i are a pair. Of two that start together the worker goes where it can, and the
shard's pod requires the node of that worker's start. One that starts by itself requires the node of the other as it is there. Affinity
names role, index and number, so a pod that goes draws nothing to its node. Neither pod may wait for the other: where that could come
about, both get new numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from psjob_operator.api.claim_template import MANY, many_nodes
from psjob_operator.plan.actions import Beside
from psjob_operator.plan.job_state import JobState, Seat
from psjob_operator.plan.objects import makes_claim, named_claim, pair_claim_name
from psjob_operator.plan.observed_state import ObservedState, Process, Role
from psjob_operator.plan.process_outcome import ProcessOutcome

LEAVES = ("Drained", "NodeLost", "NodeShutdown")
"""Causes after which a node takes no pod back."""
AFFINITY = "pod affinity"
"""Words of the scheduler where other nodes are refused for the sake of the shards that stand elsewhere."""
BOUND = (AFFINITY, "PersistentVolume's node affinity", "volume node affinity conflict", "[VolumeBinding")
"""The same of a pod beside another, whose volume may be what binds it to that node: the scheduler names only what it looked at first."""
STUCK_SECONDS, STUCK_MOST = 10.0, 120.0
"""A shard for which its node has no place moves with all others after so long; twice as long each time, up to the second."""


Loss = tuple[float, Seat]
"""When a seat gets a new number, and the seat as it is now."""
Pair = tuple[Seat, Seat]
"""A shard and its worker."""


def shares_volume(observed: ObservedState) -> bool:
    """The shards write to one volume that one node at a time can mount. A user's claim is taken for one until its modes are known:
    shards on one node work with every claim."""
    if observed.spec.shards.placement == "Colocated":  # they follow their workers; where there are several, no such volume is taken
        return False
    if makes_claim(observed.spec):
        return not many_nodes(observed.spec.checkpoint.volume_claim_template)
    return bool(named_claim(observed.spec)) and MANY not in (observed.objects.modes or ())


def moved_shards(state: JobState) -> tuple[Seat, ...]:
    """All shards, as lost, where they must go elsewhere together; none where they stay."""
    if not shares_volume(state.observed):
        return ()
    shards = tuple(seat for seat in state.shards if seat.outcome.kind not in ("done", "fatal"))
    left = any(seat.outcome.kind == "lost" and seat.outcome.cause in LEAVES for seat in shards)
    stuck = any(state.now >= at for at in _stuck(state))
    return tuple(seat if seat.outcome.kind == "lost" else replace(seat, outcome=_leaving(seat)) for seat in shards) if left or stuck else ()


def group_moves_at(state: JobState) -> float | None:
    """Unix time at which shards move because one of them found no place; None where each has one."""
    return min((at for at in _stuck(state) if at > state.now), default=None)


def group_waited(state: JobState) -> int:
    """Seconds that the shards of this volume group were given to find a place: the next one has twice as many."""
    return round(patience(state.shards))


def patience(seats: Iterable[Seat]) -> float:
    """Seconds that pods that move together are given to find a place: twice as many as the last time."""
    before = max((seat.process.waited for seat in seats if seat.process is not None), default=0)
    return min(2.0 * before, STUCK_MOST) or STUCK_SECONDS


def _stuck(state: JobState) -> tuple[float, ...]:
    """When each shard that has no place beside the others will have had none for long enough."""
    if not shares_volume(state.observed) or not any(pod.role == "shard" and pod.node and pod.exit is None for pod in state.pods):
        return ()
    waiting = (seat.process for seat in state.shards if seat.outcome.kind == "waiting")
    return tuple(pod.created + group_waited(state) for pod in waiting if pod is not None and AFFINITY in pod.unschedulable)


def _leaving(seat: Seat) -> ProcessOutcome:
    return ProcessOutcome(
        "lost", "Moved", message=f"{seat} moves to the node of the other shards: one node at a time can mount their volume"
    )


def colocated(observed: ObservedState) -> bool:
    """Each shard stands beside the worker of its index."""
    return observed.spec.shards.placement == "Colocated"


def placement_problem(observed: ObservedState) -> str:
    """Why the shards cannot be on several nodes, of what only the operator sees: the modes of the user's claim. Empty where they can."""
    spec, modes = observed.spec, observed.objects.modes
    if spec.shards.placement not in ("Spread", "Colocated") or spec.shards.replicas < 2 or modes is None or "ReadWriteMany" in modes:
        return ""
    return (
        f"spec.shards.placement: {spec.shards.placement} puts shards on several nodes, and claim {named_claim(spec)} has the modes"
        f" {', '.join(modes)}; name a claim with ReadWriteMany, or leave spec.shards.placement out"
    )


def move_together(state: JobState, losses: Sequence[Loss]) -> list[Loss]:
    """The losses, with those of partners that start again too; two that start again do so at one time."""
    if not colocated(state.observed):
        return list(losses)
    times = {(seat.role, seat.index): at for at, seat in losses}
    moved = [*losses, *(loss for pair in _pairs(state) for loss in _partners(state, pair, times))]
    latest: dict[int, float] = {}
    for at, seat in moved:
        latest[seat.index] = max(at, latest.get(seat.index, at))
    return [(latest[seat.index], seat) for _, seat in moved]


def required_node(state: JobState, seat: Seat, numbers: Mapping[tuple[Role, int], int]) -> Beside | None:
    """Whose node the pod of `seat` requires; None: any node. `numbers`: those of the seats that get a new one now."""
    if not colocated(state.observed) or seat.index >= len(state.shards):
        return None
    if seat.role == "shard":
        worker = state.workers[seat.index]
        there = worker.may_create or worker.outcome.kind in ("waiting", "running")
        number = numbers.get(("worker", seat.index), worker.number if there else None)
        return None if number is None else Beside("worker", seat.index, number)  # a pod that has ended holds no place
    shard = state.shards[seat.index]
    if ("shard", seat.index) in numbers or not _stands(shard):
        return None
    return Beside("shard", seat.index, shard.number)


def pair_volume(state: JobState, seat: Seat, numbers: Mapping[tuple[Role, int], int]) -> int | None:
    """The number of the volume that the pod of `seat` mounts with the other of its pair; None: none. `numbers`: as of required_node.

    It is the worker's number of when the two began together, so that those who move to another node have another volume: one node at
    a time can mount it. Who starts by itself mounts what the other has.
    """
    if state.observed.spec.shards.pair_storage_class_name is None or not colocated(state.observed) or seat.index >= len(state.shards):
        return None
    shard, worker = state.shards[seat.index], state.workers[seat.index]
    other = worker if seat.role == "shard" else shard
    begins = numbers.get(("worker", seat.index), worker.number)
    if (other.role, other.index) in numbers or other.may_create:
        return begins
    pair = other.process.pair if other.process is not None and other.outcome.kind in ("running", "waiting") else None
    if pair is None or pair_claim_name(state.observed.name, state.observed.uid, seat.index, pair) not in state.observed.objects.pair_claims:
        return None  # who has nobody to meet needs no volume, and a pod that mounts a claim which goes would never start
    return pair


def pair_moves_at(state: JobState) -> float | None:
    """Unix time at which a pair moves because one of the two found no place beside the other; None where each has one."""
    times = (at for pair in _pairs(state) if (at := _stuck_until(pair)) is not None)
    return min((at for at in times if at > state.now), default=None)


def pair_waited(state: JobState, index: int) -> int:
    """Seconds that this pair was given to find a place together: the next two pods have twice as many."""
    return round(patience((state.shards[index], state.workers[index])))


def _pairs(state: JobState) -> Iterator[Pair]:
    """Each shard that is not through with its work, and its worker."""
    if colocated(state.observed):
        for shard, worker in zip(state.shards, state.workers, strict=False):
            if shard.outcome.kind not in ("done", "fatal") and worker.outcome.kind != "fatal":
                yield shard, worker


def _partners(state: JobState, pair: Pair, times: Mapping[tuple[Role, int], float]) -> Iterator[Loss]:
    """Who of a pair starts again for the other's sake."""
    known = [times.get((seat.role, seat.index)) for seat in pair]
    if known == [None, None]:
        until = _stuck_until(pair)
        leaving = pair if until is not None and state.now >= until else ()
        yield from ((0.0, _moving(seat)) for seat in leaving if not _stays(state, seat))
        return
    for at, lost, other in ((known[0], *pair), (known[1], *pair[::-1])):
        if at is None or None not in known or _stays(state, other):
            continue
        went = lost.outcome.cause in LEAVES and _of_one_node(lost.process, other.process)
        pod = other.process
        if went:
            yield (
                at,
                replace(
                    other,
                    outcome=ProcessOutcome("lost", lost.outcome.cause, message=f"{other} is on the node of {lost}: {lost.outcome.message}"),
                ),
            )
        elif pod is not None and other.outcome.kind == "waiting" and not pod.node:
            yield at, _moving(other)  # it may require the node of the one that is lost


def _stays(state: JobState, seat: Seat) -> bool:
    """Its work is done, or nobody needs it any more."""
    return seat.outcome.kind == "done" or (seat.role == "worker" and state.success_met)


def _of_one_node(one: Process | None, other: Process | None) -> bool:
    """Do the two stand on one node, so far as is known?"""
    return one is None or other is None or not one.node or not other.node or one.node == other.node


def _stuck_until(pair: Pair) -> float | None:
    """When a pod will have waited long enough for a place beside the other, which stands or is through; None where neither waits so."""
    for waiting, other in (pair, pair[::-1]):
        pod = waiting.process
        without = pod is not None and waiting.outcome.kind == "waiting" and any(words in pod.unschedulable for words in BOUND)
        if pod is not None and without and (_stands(other) or other.outcome.kind == "done"):
            return pod.created + patience(pair)
    return None


def _stands(seat: Seat) -> bool:
    """Its pod has a node, and holds its place there."""
    return seat.process is not None and bool(seat.process.node) and seat.outcome.kind in ("running", "waiting")


def _moving(seat: Seat) -> Seat:
    other = "worker" if seat.role == "shard" else "shard"
    return replace(seat, outcome=ProcessOutcome("lost", "Moved", message=f"{seat} moves to the node of {other} {seat.index}"))
