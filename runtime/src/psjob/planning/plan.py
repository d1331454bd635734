"""A plan: which modules are a stage, and which devices run it. `Grid` is the machine, `Way` how its stages train."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from psjob.planning.profile import Profile


@dataclass(frozen=True)
class Wire:
    """Bytes a second each way, and seconds of a message."""

    bandwidth: float
    latency: float = 0.0

    def seconds(self, size: float) -> float:
        """Of one message."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Grid:
    """`hosts` × `each` devices; device d is on host d // each."""

    hosts: int
    each: int
    inside: Wire
    across: Wire
    shared_uplink: bool
    """The devices of a host share what leaves it."""
    push_byte: float
    """Seconds that one byte of weights takes to be pushed and pulled, while all workers do."""
    push_latency: float = 0.0
    names: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Devices in all."""
        return self.hosts * self.each

    def update(self, weights: float) -> float:
        """Seconds of one push and pull of so many bytes."""
        return self.push_latency + weights * self.push_byte if weights else 0.0


WAYS: Mapping[str, str] = {
    "flush": "1F1B with a flush: every M micro-batches the pipeline runs empty and weights change once; exact gradients",
    "pipedream": "1F1B without a flush; each micro-batch keeps the weights of its forward pass for its backward pass",
    "2bw": "1F1B without a flush; gradients of at least K micro-batches are summed, so two versions of weights do",
}


@dataclass(frozen=True)
class Way:
    """One of WAYS with its numbers."""

    name: str
    microbatches: int = 8
    """M of a flush."""
    accumulate: int = 1
    """Flushes (micro-batches of a replica, without a flush) whose gradients are one push."""
    recompute: bool = False
    """Keep the inputs of a stage alone, and run its forward pass again before the backward pass; never in the last stage."""

    @property
    def flushes(self) -> bool:
        """Whether the pipeline runs empty at every step."""
        return self.name == "flush"

    def in_flight(self, behind: int, replicas: int) -> int:
        """Micro-batches that one replica of a stage holds at most: ⌈Σ_{j≥k} r_j / r_k⌉; with a flush no more than it gets.

        That is the warm-up of PipeDream's runtime plus one, and K-k where nothing is replicated. `behind`: Σ_{j≥k} r_j.
        """
        most = -(-behind // replicas)
        return min(most, -(-self.microbatches // replicas)) if self.flushes else most

    def versions(self, in_flight: int) -> int:
        """Versions of the weights that one replica holds."""
        return {"flush": 1, "pipedream": in_flight, "2bw": 2}[self.name]

    def paced(self, seconds: float, parallel: float) -> float:
        """What work of `seconds` a micro-batch, shared by so many, adds.

        With a flush: to the time of the first micro-batch, for the other M-1. Without: the time between two micro-batches.
        """
        return (math.ceil(self.microbatches / parallel) - 1) * seconds if self.flushes else seconds / parallel


@dataclass(frozen=True)
class Stage:
    """The modules [first, end), on one device a replica; micro-batch m goes to replica m mod r."""

    first: int
    end: int
    devices: tuple[int, ...]

    @property
    def replicas(self) -> int:
        """r of the stage."""
        return len(self.devices)


Plan = tuple[Stage, ...]
"""Stages in order; together they are the whole model."""


def devices_of(plan: Plan) -> list[int]:
    """Each device that has a stage, once."""
    return sorted({device for stage in plan for device in stage.devices})


def cuts_of(profile: Profile, plan: Plan) -> list[str]:
    """The first module of each stage but the first."""
    return [profile.nodes[stage.first].name for stage in plan[1:]]


def plan_by_hand(profile: Profile, cuts: Sequence[str], replicas: Sequence[int], count: int) -> Plan:
    """Stages that begin at the modules `cuts`, on the first of `count` devices, in order.

    Raises ValueError: a module that is not there, an order that is not the model's, more replicas than devices.
    """
    names = [node.name for node in profile.nodes]
    bounds = [0]
    for cut in cuts:
        if cut not in names:
            near = difflib.get_close_matches(cut, names, n=1)
            raise ValueError(
                f"--cuts {cut}: no module of the profile; {f'did you mean {near[0]}?' if near else f'known are {_some(names)}'}"
            )
        if names.index(cut) <= bounds[-1]:
            before = f"comes before {names[bounds[-1]]}" if len(bounds) > 1 else "is the first module, where the first stage begins anyway"
            raise ValueError(f"--cuts {cut}: {before}; name modules in the order of the profile")
        bounds.append(names.index(cut))
    given = list(replicas) or [1] * len(bounds)
    if len(given) != len(bounds):
        raise ValueError(f"--replicas {_list(given)}: {len(given)} numbers for {len(bounds)} stages; give one for each stage")
    if min(given) < 1:
        raise ValueError(f"--replicas {_list(given)}: each must be at least 1; drop a cut to have fewer stages")
    if sum(given) > count:
        raise ValueError(f"--replicas {_list(given)}: {sum(given)} devices in all, the machine has {count}; give fewer, or another machine")
    stages, device = [], 0
    for first, end, many in zip(bounds, [*bounds[1:], len(names)], given, strict=True):
        stages.append(Stage(first, end, tuple(range(device, device + many))))
        device += many
    return tuple(stages)


def _list(numbers: Sequence[int]) -> str:
    return ",".join(str(number) for number in numbers)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
