"""What a plan takes: seconds of a step, idle share and memory of each stage, by formulas and by playing its schedule.

Without a flush the pace is PipeDream's (D. Narayanan et al., *PipeDream: Generalized Pipeline Parallelism for DNN Training*, SOSP 2019;
arXiv 1806.03377 §3.3): the slowest stage or link, each divided by its replicas. Two things differ. Weights go through the parameter
server, so that every stage pays for them, replicated or not; and each direction of a port carries what leaves it. One thing is added: a
stage that holds n micro-batches can start no more than n in the time that one needs from there to the end and back.

`play_schedule` runs 1F1B on a virtual clock: each device does what is ready, backward passes first, and holds at most its micro-batches.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from psjob.planning.plan import Grid, ModelWork, PipelineWay, Plan, PlannedStage, Wire, devices_of


@dataclass(frozen=True)
class Case:
    """What every plan of one question shares. `memory`: bytes of a device, None for no limit."""

    work: ModelWork
    grid: Grid
    way: PipelineWay
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
class PlanBound:
    """Of one plan. Lower values are better, each by itself."""

    latency: float
    """Seconds that one micro-batch takes through all stages and back."""
    pace: float
    """Way.paced of the busiest stage, port or loop."""
    update: float
    """Seconds of the longest push and pull after a flush; without a flush they continue meanwhile, and are in `pace`."""

    def seconds(self, way: PipelineWay) -> float:
        """Of a step with a flush; without one, between two micro-batches."""
        return self.latency + self.pace + self.update if way.flushes else self.pace


def bound_of_plan(case: Case, plan: Plan) -> PlanBound:
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
        return PlanBound(latency, pace, max(updates.values()) / way.accumulate)
    late = max(way.paced(seconds / way.accumulate, len(devices)) for devices, seconds in updates.items())
    return PlanBound(latency, max(pace, late), 0.0)


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


def way_fits(way: PipelineWay, stages: int) -> bool:
    """2BW sums at least K micro-batches, so that a version is complete when it is needed (arXiv 2006.09503 §3.1)."""
    return way.name != "2bw" or way.accumulate >= stages


def in_flight(case: Case, plan: Plan) -> list[int]:
    """Micro-batches that a replica of each stage holds at most; a stage that shares its device counts as any other."""
    behind, found = 0, []
    for stage in reversed(plan):
        behind += stage.replicas
        found.append(case.way.in_flight(behind, stage.replicas))
    return found[::-1]


def is_across(grid: Grid, one: PlannedStage, other: PlannedStage) -> bool:
    """Whether any micro-batch leaves its host between two stages, each of which takes it by m mod r."""
    pairs = _pairs(one.devices, other.devices)
    return any(a // grid.each != b // grid.each for a, b in pairs)


def _pairs(one: Sequence[int], other: Sequence[int]) -> set[tuple[int, int]]:
    return {(one[m % len(one)], other[m % len(other)]) for m in range(len(one) * len(other))}


@dataclass(frozen=True)
class Timed:
    """A stage as the clock sees it; seconds of one micro-batch."""

    forward: float
    backward: float
    devices: tuple[int, ...]
    in_flight: int
    """Of one replica."""
    sends: float = 0.0
    """Seconds that a port is busy with what goes to the next stage, and again with the gradient that comes back."""
    late: float = 0.0
    """Latency of that message."""
    far: bool = False
    """Over the ports that lead out of the host."""


@dataclass
class Timeline:
    """What happened."""

    done: list[float] = field(default_factory=list)
    """When each micro-batch had been through all backward passes, in that order."""
    last: dict[int, float] = field(default_factory=dict)
    """When each stage ended its last backward pass."""
    busy: dict[int, float] = field(default_factory=dict)
    """Seconds that each device computed."""


FORWARD, BACKWARD, FREE = 0, 1, 2


class _Run:
    def __init__(self, stages: Sequence[Timed], count: int, port: Sequence[object]) -> None:
        self.stages, self.count, self.port = stages, count, port
        self.out = Timeline()
        self.clock: list[tuple[float, int, int, int, int]] = []
        self.number = 0
        self.ready: dict[int, dict[int, list[tuple[int, int]]]] = {}
        """Of each device: heaps of (micro-batch, -stage) by direction."""
        self.free: dict[int, bool] = {}
        for stage in stages:
            for device in stage.devices:
                self.ready[device] = {FORWARD: [], BACKWARD: []}
                self.free[device] = True
                self.out.busy[device] = 0.0
        self.held = [[0] * len(stage.devices) for stage in stages]
        self.ports: dict[tuple[object, bool, int], float] = {}

    def play(self) -> Timeline:
        for m in range(self.count):
            self._offer(0.0, FORWARD, 0, m)
        for device in self.ready:
            self._dispatch(0.0, device)
        while self.clock:
            now, _, what, k, m = heapq.heappop(self.clock)
            if what == FREE:
                self.free[k] = True
                self._dispatch(now, k)
            else:
                self._offer(now, what, k, m)
                self._dispatch(now, self._device(k, m))
        return self.out

    def _device(self, k: int, m: int) -> int:
        devices = self.stages[k].devices
        return devices[m % len(devices)]

    def _offer(self, now: float, what: int, k: int, m: int) -> None:
        heapq.heappush(self.ready[self._device(k, m)][what], (m, -k))

    def _dispatch(self, now: float, device: int) -> None:
        if not self.free[device]:
            return
        taken = self._next(device)
        if taken is None:
            return
        what, m, k = taken
        stage = self.stages[k]
        replica = m % len(stage.devices)
        seconds = stage.forward if what == FORWARD else stage.backward
        end = now + seconds
        self.free[device] = False
        self.out.busy[device] += seconds
        if what == FORWARD:
            self.held[k][replica] += 1
            if k + 1 < len(self.stages):
                self._at(self._sent(end, k, k + 1, m), FORWARD, k + 1, m)
            else:
                self._at(end, BACKWARD, k, m)
        else:
            self.held[k][replica] -= 1
            self.out.last[k] = max(self.out.last.get(k, 0.0), end)
            if k:
                self._at(self._sent(end, k, k - 1, m), BACKWARD, k - 1, m)
            else:
                self.out.done.append(end)
        self._at(end, FREE, device, m)

    def _next(self, device: int) -> tuple[int, int, int] | None:
        back, forth = self.ready[device][BACKWARD], self.ready[device][FORWARD]
        if back:
            m, k = heapq.heappop(back)
            return BACKWARD, m, -k
        waiting = []
        found = None
        while forth and found is None:
            m, k = heapq.heappop(forth)
            stage = self.stages[-k]
            if self.held[-k][m % len(stage.devices)] < stage.in_flight:
                found = FORWARD, m, -k
            else:
                waiting.append((m, k))
        for pair in waiting:
            heapq.heappush(forth, pair)
        return found

    def _sent(self, now: float, k: int, to: int, m: int) -> float:
        """When a message is there; the sender's port out and the receiver's port in are busy with it."""
        link = self.stages[min(k, to)]
        if self._device(k, m) == self._device(to, m):
            return now
        ends = ((self.port[self._device(k, m)], link.far, 0), (self.port[self._device(to, m)], link.far, 1))
        start = max([now, *(self.ports.get(end, 0.0) for end in ends)])
        for end in ends:
            self.ports[end] = start + link.sends
        return start + link.sends + link.late

    def _at(self, when: float, what: int, k: int, m: int) -> None:
        self.number += 1
        heapq.heappush(self.clock, (when, self.number, what, k, m))


def play_schedule(stages: Sequence[Timed], count: int, port: Sequence[object] | None = None) -> Timeline:
    """`count` micro-batches, all there at the start. `port`: what the messages of each device go through; itself by default."""
    most = max(device for stage in stages for device in stage.devices) + 1
    return _Run(stages, count, port if port is not None else range(most)).play()


ROUNDS = 24
"""Micro-batches over which the pace of a pipeline that never runs empty is taken, at least, after as many that fill it."""
MOST_ROUNDS = 240


@dataclass(frozen=True)
class Figures:
    """Of one stage. Seconds are of one micro-batch, bytes of one device."""

    stage: PlannedStage
    forward: float
    backward: float
    """With the forward pass that is run again, where it is."""
    sent: float
    """Bytes that go to the next stage, and as many that come back."""
    sending: float
    """Seconds of one such message."""
    update: float
    """Seconds of a push and pull of its weights."""
    weights: float
    in_flight: int
    memory: float
    """Of the device, with what other stages have there."""
    idle: float
    """Share of the time in which its devices compute nothing."""


@dataclass(frozen=True)
class Prediction:
    """Of one plan."""

    plan: Plan
    step: float
    """Seconds of a step of `microbatches`: with a flush its M, without one 1."""
    microbatches: int
    idle: float
    """Share of all devices' time in which they compute nothing: the bubble, messages and updates."""
    memory: float
    """Of the device that needs most."""
    stages: tuple[Figures, ...]

    @property
    def microbatch(self) -> float:
        """Seconds of one micro-batch."""
        return self.step / self.microbatches


def predict(case: Case, plan: Plan) -> Prediction:
    """Plays the schedule of `plan`."""
    timed = _timed(case, plan)
    way, grid = case.way, case.grid
    port: Sequence[object] = [d // grid.each if grid.shared_uplink else d for d in range(grid.count)]
    updates = _updates(case, plan)
    if way.flushes:
        count = way.microbatches
        line = play_schedule(timed, count, port)
        step = max(line.last[k] + updates[stage.devices] / way.accumulate for k, stage in enumerate(plan) if k in line.last)
    else:
        count, step = 1, max(_pace(timed, port), max(seconds / way.accumulate / len(devices) for devices, seconds in updates.items()))
    held = memory(case, plan)
    flights = in_flight(case, plan)
    busy: dict[int, float] = {}
    for stage, time in zip(plan, timed, strict=True):
        for device in stage.devices:
            busy[device] = busy.get(device, 0.0) + count * (time.forward + time.backward) / stage.replicas / step
    figures = tuple(
        Figures(
            stage, time.forward, time.backward, case.work.crossing[stage.end], time.sends + time.late,
            grid.update(case.work.weights(stage.first, stage.end)), case.work.weights(stage.first, stage.end),
            flight, max(held[device] for device in stage.devices), 1 - sum(busy[device] for device in stage.devices) / stage.replicas,
        )
        for stage, time, flight in zip(plan, timed, flights, strict=True)
    )  # fmt: skip
    return Prediction(plan, step, count, 1 - sum(busy.values()) / len(devices_of(plan)), max(held.values()), figures)


def alone(case: Case) -> float:
    """Seconds of one micro-batch on one device, its push and pull included; whether it has the memory is not asked."""
    seconds = case.seconds(0, case.work.count)
    update = case.grid.update(case.work.weights(0, case.work.count)) / case.way.accumulate
    return seconds + update / case.way.microbatches if case.way.flushes else max(seconds, update)


def _timed(case: Case, plan: Plan) -> list[Timed]:
    found = []
    flights = in_flight(case, plan)
    for k, (stage, flight) in enumerate(zip(plan, flights, strict=True)):
        forward = case.work.forward(stage.first, stage.end)
        backward = case.seconds(stage.first, stage.end) - forward
        sends = late = 0.0
        far = False
        if k + 1 < len(plan):
            far = is_across(case.grid, stage, plan[k + 1])
            sends, late = case.work.crossing[stage.end] / case.wire(far).bandwidth, case.wire(far).latency
        found.append(Timed(forward, backward, stage.devices, flight, sends, late, far))
    return found


def _updates(case: Case, plan: Plan) -> dict[tuple[int, ...], float]:
    """Seconds of a push and pull of all that each set of devices has."""
    found: dict[tuple[int, ...], float] = {}
    for stage in plan:
        found[stage.devices] = found.get(stage.devices, 0.0) + case.grid.update(case.work.weights(stage.first, stage.end))
    return found


def _pace(timed: list[Timed], port: Sequence[object]) -> float:
    """Seconds between micro-batches that are through, once the pipeline is full."""
    turn = math.lcm(*(len(stage.devices) for stage in timed))
    window = min(turn * math.ceil(max(ROUNDS, 2 * len(timed)) / turn), MOST_ROUNDS)
    done = play_schedule(timed, 3 * window, port).done
    return (done[2 * window - 1] - done[window - 1]) / window
