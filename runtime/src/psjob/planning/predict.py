"""What a plan takes: seconds of a step, idle share and memory of each stage, by playing its schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from psjob.planning import bounds
from psjob.planning.bounds import Case
from psjob.planning.plan import Plan, Stage, devices_of
from psjob.planning.timeline import Timed, play

ROUNDS = 24
"""Micro-batches over which the pace of a pipeline that never runs empty is taken, at least, after as many that fill it."""
MOST_ROUNDS = 240


@dataclass(frozen=True)
class Figures:
    """Of one stage. Seconds are of one micro-batch, bytes of one device."""

    stage: Stage
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
        line = play(timed, count, port)
        step = max(line.last[k] + updates[stage.devices] / way.accumulate for k, stage in enumerate(plan) if k in line.last)
    else:
        count, step = 1, max(_pace(timed, port), max(seconds / way.accumulate / len(devices) for devices, seconds in updates.items()))
    held = bounds.memory(case, plan)
    flights = bounds.in_flight(case, plan)
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
    flights = bounds.in_flight(case, plan)
    for k, (stage, flight) in enumerate(zip(plan, flights, strict=True)):
        forward = case.work.forward(stage.first, stage.end)
        backward = case.seconds(stage.first, stage.end) - forward
        sends = late = 0.0
        far = False
        if k + 1 < len(plan):
            far = bounds.is_across(case.grid, stage, plan[k + 1])
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
    done = play(timed, 3 * window, port).done
    return (done[2 * window - 1] - done[window - 1]) / window
