"""A model as planners see it: modules in order of execution, with seconds and bytes of one micro-batch.

`Work` says what any run of neighbouring modules takes, from sums that are made once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Output:
    """One tensor that later modules read: at the positions `to`."""

    bytes: int
    to: tuple[int, ...]


@dataclass(frozen=True)
class Node:
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

    nodes: tuple[Node, ...]
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
        Node(**{**node, "outputs": tuple(Output(one["bytes"], tuple(one["to"])) for one in node["outputs"])}) for node in made["nodes"]
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
            Node(
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


class Work:
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
