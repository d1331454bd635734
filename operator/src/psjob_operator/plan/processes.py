"""Which processes are created, and which are deleted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from psjob_operator.api.status import Pinned
from psjob_operator.plan import pairs, volumegroup
from psjob_operator.plan.actions import CreateProcess, DeleteProcess
from psjob_operator.plan.facts import Facts, Seat
from psjob_operator.plan.progress import checkpoint_known
from psjob_operator.plan.restarts import AT_ONCE, Raising, spacing
from psjob_operator.plan.snapshot import Process, Refusal, Role

CONFLICT = 409
FORCE = 0
"""For a pod whose kubelet is out of reach and cannot confirm: its number has been passed, and whatever lives on there is fenced by that."""
UNRESPONSIVE_GRACE = 1
"""As the liveness probe's: a process that does not answer does not save either."""
HUNG_GRACE = 1
"""From SIGTERM to SIGKILL: who has not ended by itself when it was told that it hangs will not do so now."""


@dataclass(frozen=True)
class Creating:
    """What to create now, what waits, and until when."""

    actions: tuple[CreateProcess, ...]
    conflicts: tuple[str, ...]
    """Names held by something that is not this job's."""
    wake: float | None


def create(facts: Facts, raising: Raising, pinned: Pinned) -> Creating:
    """Creates every seat that was just raised, or was granted before and is not there yet; shards first, in index order."""
    taken = {process.name for process in facts.snapshot.processes}
    actions, conflicts, wakes = [], [], []
    known = checkpoint_known(facts)
    numbers = {(seat.role, seat.index): raising.number(seat) for seat in raising.raised}
    moved = {(seat.role, seat.index) for seat in raising.raised if pairs.colocated(facts.snapshot) and seat.fate.cause == "Moved"}
    for seat in facts.seats:
        if not raising.is_raised(seat) and not seat.may_create:
            continue
        number = raising.number(seat)
        name = raising.name(facts.snapshot.name, seat)
        if name in taken:
            conflicts.append(name)
            continue
        again = facts.now if raising.is_raised(seat) or seat.refusal is None else seat.refusal.again_at
        if again > facts.now:
            wakes.append(again)
            continue
        spaced = raising.is_raised(seat) and seat.fate.kind == "lost" and not seat.fate.counted and seat.fate.cause not in AT_ONCE
        waited = round(spacing(facts, seat)) if spaced else 0
        shard = seat.role == "shard"
        if shard and raising.moving:
            waited = volumegroup.waited(facts)
        if (seat.role, seat.index) in moved:
            waited = pairs.waited(facts, seat.index)
        beside = pairs.beside(facts, seat, numbers)
        group = (raising.volume_group or 0) if shard and volumegroup.shared(facts.snapshot) else None
        actions.append(CreateProcess(seat.role, seat.index, number, raising.view, name, shard and known, waited, group, pinned, beside))
    return Creating(tuple(actions), tuple(conflicts), min(wakes, default=None))


def refused(seat: Seat) -> Refusal | None:
    """The API server's refusal that keeps the seat empty."""
    return seat.refusal if seat.may_create else None


def left_over(facts: Facts) -> tuple[DeleteProcess, ...]:
    """What cleanPodPolicy says: processes still running, all of them, or none."""
    policy = facts.snapshot.spec.run_policy.clean_pod_policy
    if policy == "None":
        return ()
    return tuple(
        DeleteProcess(pod.name, pod.uid, FORCE if pod.node_lost else None, why="the job has ended")
        for pod in facts.pods
        if (pod.deleting is None or pod.node_lost) and (policy == "All" or not pod.ended)
    )


def replaced(facts: Facts, raising: Raising) -> tuple[DeleteProcess, ...]:
    """Replaced processes that still run, and ended ones but for the newest of each seat (its log is what people ask for)."""
    numbers = {(seat.role, seat.index): raising.number(seat) for seat in facts.seats}
    newest: dict[tuple[str, int], int] = {}
    old = [pod for pod in facts.pods if (pod.deleting is None or pod.node_lost) and pod.number < numbers.get((pod.role, pod.index), 0)]
    for pod in old:
        if pod.ended:
            newest[pod.role, pod.index] = max(pod.number, newest.get((pod.role, pod.index), 0))
    return tuple(
        DeleteProcess(pod.name, pod.uid, _grace(facts, pod), why="it was replaced")
        for pod in sorted((*old, *_out_of_sight(facts, numbers)), key=lambda pod: (pod.role, pod.index, pod.number))
        if not pod.ended or pod.node_lost or pod.number < newest[pod.role, pod.index]
    )


def _out_of_sight(facts: Facts, numbers: Mapping[tuple[Role, int], int]) -> tuple[Process, ...]:
    """Replaced pods that vanished without having been asked to end: perhaps they only lost our labels, and run on."""
    names = {pod.name for pod in facts.pods}
    return tuple(
        pod
        for pod in facts.known
        if pod.gone
        and pod.deleting is None
        and not pod.ended
        and pod.name not in names
        and pod.number < numbers.get((pod.role, pod.index), 0)
    )


def _grace(facts: Facts, pod: Process) -> int | None:
    if pod.node_lost:
        return FORCE
    if pod.role == "worker" and facts.hung.get(pod.index, (0, 0.0))[0] == pod.number:
        return HUNG_GRACE
    return UNRESPONSIVE_GRACE if pod.unresponsive else None
