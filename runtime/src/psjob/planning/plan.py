"""A plan: which modules are a stage, and which devices run it. `Grid` is the machine, `PipelineWay` how its stages train.

A `Profile` is a model as planners see it: modules in order of execution, with seconds and bytes of one micro-batch.
`ModelWork` says what any run of neighbouring modules takes, from sums that are made once.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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
class PipelineWay:
    """One of WAYS with its numbers."""

    name: str
    microbatches: int = 8
    """M of a flush."""
    accumulate: int = 1
    """Flushes (micro-batches of a replica, without a flush) whose gradients are one push."""
    recompute: bool = False
    """Keep the inputs of only a stage, and run its forward pass again before the backward pass; never in the last stage."""

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
class PlannedStage:
    """The modules [first, end), on one device a replica; micro-batch m goes to replica m mod r."""

    first: int
    end: int
    devices: tuple[int, ...]

    @property
    def replicas(self) -> int:
        """r of the stage."""
        return len(self.devices)


Plan = tuple[PlannedStage, ...]
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
        stages.append(PlannedStage(first, end, tuple(range(device, device + many))))
        device += many
    return tuple(stages)


def _list(numbers: Sequence[int]) -> str:
    return ",".join(str(number) for number in numbers)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")


@dataclass(frozen=True)
class Output:
    """One tensor that later modules read: at the positions `to`."""

    bytes: int
    to: tuple[int, ...]


@dataclass(frozen=True)
class ModelNode:
    """One module. `parameters`: bytes that it trains and no other module does; `fixed`: frozen ones and buffers."""

    name: str
    forward: float
    backward: float
    parameters: int = 0
    fixed: int = 0
    saved: int = 0
    outputs: tuple[Output, ...] = ()


@dataclass(frozen=True)
class Tied:
    """Parameters that the modules at positions `nodes` share."""

    bytes: int
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Profile:
    """A model, measured with one micro-batch. `estimated`: times come from FLOPs."""

    nodes: tuple[ModelNode, ...]
    tied: tuple[Tied, ...] = ()
    input: int = 0
    model: str = ""
    device: str = ""
    estimated: bool = False
    samples: int | None = None
    """Samples of the micro-batch."""


def profile_of(made: Mapping[str, Any]) -> Profile:
    """From what `psjob.profiling.profile.profiled` gives."""
    nodes = tuple(
        ModelNode(**{**node, "outputs": tuple(Output(one["bytes"], tuple(one["to"])) for one in node["outputs"])}) for node in made["nodes"]
    )
    tied = tuple(Tied(one["bytes"], tuple(one["nodes"])) for one in made["tied"])
    return Profile(nodes, tied, made["input"], made["model"], made["device"], made["estimated"], made.get("samples"))


def in_blocks(profile: Profile, cut_name: Callable[[int], str | None]) -> Profile:
    """Neighbouring modules as one where no stage may begin between them: each block is named by its cut, and trains a parameter.

    Args:
        profile: of the model.
        cut_name: of the module at a position, the name by which a stage can begin there; None where none can.
    """
    trains = [node.parameters > 0 or any(i in tied.nodes for tied in profile.tied) for i, node in enumerate(profile.nodes)]
    names: list[str] = []
    block_of: list[int] = []
    trained = False
    for i, node in enumerate(profile.nodes):
        cut = cut_name(i)
        # A block ends where the next one begins that trains something: without parameters a stage would have nothing to push.
        if not names or (cut is not None and trained and _trains_before_next(i, trains, cut_name)):
            names.append(node.name if cut is None else cut)
            trained = False
        trained = trained or trains[i]
        block_of.append(len(names) - 1)
    return _joined(profile, names, block_of)


def _trains_before_next(first: int, trains: Sequence[bool], cut_name: Callable[[int], str | None]) -> bool:
    """Is anything trained from here to the next place where a stage may begin?"""
    for i in range(first, len(trains)):
        if i > first and cut_name(i) is not None:
            return False
        if trains[i]:
            return True
    return False


def _joined(profile: Profile, names: Sequence[str], block_of: Sequence[int]) -> Profile:
    nodes = []
    for block, name in enumerate(names):
        inside = [node for i, node in enumerate(profile.nodes) if block_of[i] == block]
        outputs = []
        for node in inside:
            for output in node.outputs:
                if to := sorted({block_of[i] for i in output.to} - {block}):
                    outputs.append(Output(output.bytes, tuple(to)))
        mine = sum(one.bytes for one in profile.tied if {block_of[i] for i in one.nodes} == {block})
        nodes.append(
            ModelNode(
                name,
                sum(node.forward for node in inside),
                sum(node.backward for node in inside),
                sum(node.parameters for node in inside) + mine,
                sum(node.fixed for node in inside),
                sum(node.saved for node in inside),
                tuple(outputs),
            )
        )
    tied = tuple(Tied(one.bytes, tuple(sorted(blocks))) for one in profile.tied if len(blocks := {block_of[i] for i in one.nodes}) > 1)
    return Profile(tuple(nodes), tied, profile.input, profile.model, profile.device, profile.estimated, profile.samples)


class ModelWork:
    """Sums over the modules [first, end) of a profile."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.count = len(profile.nodes)
        self._forward = _sums(node.forward for node in profile.nodes)
        self._backward = _sums(node.backward for node in profile.nodes)
        self._own = _sums(float(node.parameters) for node in profile.nodes)
        self._fixed = _sums(float(node.fixed) for node in profile.nodes)
        self._saved = _sums(float(node.saved) for node in profile.nodes)
        self._tied = [(tied.bytes, sorted(tied.nodes)) for tied in profile.tied]
        self.crossing = _crossing(profile)
        """Bytes that a cut before module p sends forward, for p in 0..count; 0: the model's inputs; count: nothing."""

    def forward(self, first: int, end: int) -> float:
        """Seconds of the forward pass."""
        return self._forward[end] - self._forward[first]

    def backward(self, first: int, end: int) -> float:
        """Seconds of the backward pass."""
        return self._backward[end] - self._backward[first]

    def weights(self, first: int, end: int) -> float:
        """Bytes of trained parameters; tied ones once."""
        tied = sum(size for size, nodes in self._tied if any(first <= node < end for node in nodes)) if self._tied else 0
        return self._own[end] - self._own[first] + tied

    def fixed(self, first: int, end: int) -> float:
        """Bytes of frozen parameters and buffers."""
        return self._fixed[end] - self._fixed[first]

    def kept(self, first: int, end: int) -> float:
        """Bytes that a micro-batch keeps until its backward pass, what came in included."""
        return self._saved[end] - self._saved[first] + self.crossing[first]


def _sums(values: Iterable[float]) -> list[float]:
    return list(itertools.accumulate(values, initial=0.0))


def _crossing(profile: Profile) -> list[float]:
    sent = [0.0] * (len(profile.nodes) + 2)
    for i, node in enumerate(profile.nodes):
        for output in node.outputs:
            sent[i + 1] += output.bytes
            sent[max(output.to) + 1] -= output.bytes
    found = list(itertools.accumulate(sent))[: len(profile.nodes) + 1]
    return [float(profile.input), *found[1:]]
