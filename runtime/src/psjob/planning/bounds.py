"""The formulas: seconds of a step, or between two micro-batches, of a plan, and the memory of each stage.

Without a flush the pace is PipeDream's (D. Narayanan et al., *PipeDream: Generalized Pipeline Parallelism for DNN Training*, SOSP 2019;
arXiv 1806.03377 §3.3): the slowest stage or link, each divided by its replicas. Two things differ. Weights go through the parameter
server, so that every stage pays for them, replicated or not; and each direction of a port carries what leaves it. One thing is added: a
stage that holds n micro-batches can start no more than n in the time that one needs from there to the end and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psjob.planning.grid import Grid, Wire
from psjob.planning.plan import Plan, Stage
from psjob.planning.ways import Way
from psjob.planning.work import Work


@dataclass(frozen=True)
class Case:
    """What every plan of one question shares. `memory`: bytes of a device, None for no limit."""

    work: Work
    grid: Grid
    way: Way
    memory: float | None = None

    def seconds(self, first: int, end: int) -> float:
        """Of both passes of one micro-batch over the modules [first, end)."""
        forward, backward = self.work.forward(first, end), self.work.backward(first, end)
        again = forward if self.way.recompute and end < self.work.count else 0.0
        return forward + backward + again

    def held(self, first: int, end: int, in_flight: int) -> float:
        """Bytes that a replica holds: versions of the weights, their gradient, what is frozen, and micro-batches in flight.

        The optimizer's state lies on the shards. Workspace of kernels and of the allocator is not counted.
        """
        work = self.work
        weights = work.weights(first, end)
        kept = work.kept(first, end)
        if self.way.recompute and end < work.count:
            activations = in_flight * work.crossing[first] + kept - work.crossing[first]
        else:
            activations = in_flight * kept
        return (self.way.versions(in_flight) + 1) * weights + work.fixed(first, end) + activations

    def wire(self, across: bool) -> Wire:
        """Between neighbouring stages, on hosts of their own or on one."""
        return self.grid.across if across else self.grid.inside

    def ports(self, hosts: int, replicas: int, across: bool) -> int:
        """Ports that replicas on so many hosts have side by side."""
        return hosts if across and self.grid.shared_uplink else replicas


@dataclass(frozen=True)
class Bound:
    """Of one plan. Lower values are better, each by itself."""

    latency: float
    """Seconds that one micro-batch takes through all stages and back."""
    pace: float
    """Way.paced of the busiest stage, port or loop."""
    update: float
    """Seconds of the longest push and pull after a flush; without a flush they go on meanwhile, and are in `pace`."""

    def seconds(self, way: Way) -> float:
        """Of a step with a flush; without one, between two micro-batches."""
        return self.latency + self.pace + self.update if way.flushes else self.pace


def bound(case: Case, plan: Plan) -> Bound:
    """Of any plan, also one whose devices have several stages."""
    way, flights = case.way, in_flight(case, plan)
    latency = pace = 0.0
    loads: dict[object, float] = {}
    shared: dict[object, int] = {}
    updates: dict[tuple[int, ...], float] = {}

    def load(key: object, seconds: float, parallel: int) -> None:
        loads[key] = loads.get(key, 0.0) + seconds
        shared[key] = parallel

    for k in reversed(range(len(plan))):
        stage = plan[k]
        seconds = case.seconds(stage.first, stage.end)
        latency += seconds
        load(("busy", stage.devices), seconds, stage.replicas)
        updates[stage.devices] = updates.get(stage.devices, 0.0) + case.grid.update(case.work.weights(stage.first, stage.end))
        hosts = len({device // case.grid.each for device in stage.devices})
        for cut, other in ((stage.first, k - 1), (stage.end, k + 1)):
            if not 0 <= other < len(plan):
                continue
            far = is_across(case.grid, stage, plan[other])
            load(("port", far, stage.devices), case.work.crossing[cut] / case.wire(far).bandwidth, case.ports(hosts, stage.replicas, far))
            if other > k:
                latency += 2 * case.wire(far).seconds(case.work.crossing[cut])
        pace = max(pace, way.paced(latency, stage.replicas * flights[k]))
    pace = max([pace, *(way.paced(seconds, shared[key]) for key, seconds in loads.items())])
    if way.flushes:
        return Bound(latency, pace, max(updates.values()) / way.accumulate)
    late = max(way.paced(seconds / way.accumulate, len(devices)) for devices, seconds in updates.items())
    return Bound(latency, max(pace, late), 0.0)


def memory(case: Case, plan: Plan) -> dict[int, float]:
    """Bytes of each device."""
    held: dict[int, float] = {}
    for stage, flight in zip(plan, in_flight(case, plan), strict=True):
        size = case.held(stage.first, stage.end, flight)
        for device in stage.devices:
            held[device] = held.get(device, 0.0) + size
    return held


def fits(case: Case, plan: Plan) -> bool:
    """Whether every device has the memory, and the way allows as many stages."""
    limit = case.memory
    return way_fits(case.way, len(plan)) and (limit is None or max(memory(case, plan).values()) <= limit)


def way_fits(way: Way, stages: int) -> bool:
    """2BW sums at least K micro-batches, so that a version is complete when it is needed (arXiv 2006.09503 §3.1)."""
    return way.name != "2bw" or way.accumulate >= stages


def in_flight(case: Case, plan: Plan) -> list[int]:
    """Micro-batches that a replica of each stage holds at most; a stage that shares its device counts as any other."""
    behind, found = 0, []
    for stage in reversed(plan):
        behind += stage.replicas
        found.append(case.way.in_flight(behind, stage.replicas))
    return found[::-1]


def is_across(grid: Grid, one: Stage, other: Stage) -> bool:
    """Whether any micro-batch leaves its host between two stages, each of which takes it by m mod r."""
    pairs = _pairs(one.devices, other.devices)
    return any(a // grid.each != b // grid.each for a, b in pairs)


def _pairs(one: Sequence[int], other: Sequence[int]) -> set[tuple[int, int]]:
    return {(one[m % len(one)], other[m % len(other)]) for m in range(len(one) * len(other))}
