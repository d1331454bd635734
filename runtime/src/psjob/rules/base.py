"""What a rule is, and the state of one block that it works on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

from psjob.layout.blocks import FLOATS
from psjob.rules import arrays
from psjob.rules.arrays import Array

Hyperparameters = Mapping[str, float | bool]
BEFORE: Final = "before"
"""State tensor of a block in a mode with a delay, whatever its rule: its weights one update ago."""
Range = tuple[int, int]
Segment: TypeAlias = tuple[int, int, *tuple[float, ...]]
"""Length and count of a stretch of elements, and the numbers that a rule keeps once for all of them."""


@dataclass
class BlockState:
    """A block's weights (1-D), its state tensors of the same length and dtype, and how often it was updated.

    `segments` are (length, count) from the first element to the last: a tensor without a gradient is skipped, so its
    count may stay behind; neighbours with equal counts are one segment. `count` is what a rule's own step number is.
    Behind it are numbers of the rule's own, of which most rules have none.
    A state tensor that belongs to worker 3 has the name `v@3` (`of_worker`).
    """

    weights: Array
    slots: dict[str, Array] = field(default_factory=dict)
    steps: int = 0
    segments: list[Segment] = field(default_factory=list)
    room: Callable[[str], Array] | None = field(default=None, repr=False, compare=False)
    """Where a state tensor of that name lies that is made; None: in memory of its own."""

    def __post_init__(self) -> None:
        if not self.segments:
            self.segments = [(len(self.weights), 0)]

    def copy(self) -> BlockState:
        """The same with tensors of its own."""
        slots = {name: arrays.copy(slot) for name, slot in self.slots.items()}
        return BlockState(arrays.copy(self.weights), slots, self.steps, list(self.segments))

    def optimizers(self) -> BlockState:
        """The same tensors without those that belong to one worker, and without older weights."""
        slots = {name: slot for name, slot in self.slots.items() if "@" not in name and name != BEFORE}
        return BlockState(self.weights, slots, self.steps, self.segments)

    def counts(self) -> dict[str, Any]:
        """What is not a tensor, as JSON: {"steps": int, "segments": [[length, count, numbers...], ...]}."""
        return {"steps": self.steps, "segments": [list(segment) for segment in self.segments]}

    @classmethod
    def of(cls, weights: Array, slots: Mapping[str, Array], counts: Mapping[str, Any]) -> BlockState:
        """Put a state together from its tensors and what `counts` gave. Raises ValueError if they do not fit."""
        for name, slot in slots.items():
            if slot.shape != weights.shape or slot.dtype != weights.dtype:
                raise ValueError(
                    f"state {name!r} has shape {tuple(slot.shape)} of {slot.dtype}, the weights {tuple(weights.shape)} of {weights.dtype}"
                )
        steps, rows = counts.get("steps"), counts.get("segments")
        if type(steps) is not int or steps < 0 or not isinstance(rows, list) or not all(_is_segment(row) for row in rows):
            raise ValueError("counts of a block are {steps, segments: [[length, count, ...], ...]}, lengths and counts whole numbers")
        if sum(row[0] for row in rows) != len(weights):
            raise ValueError(f"segments of a block have {sum(row[0] for row in rows)} elements, its weights {len(weights)}")
        return cls(weights, dict(slots), steps, [(row[0], row[1], *map(float, row[2:])) for row in rows])

    def slot(self, name: str, fill: float = 0.0) -> Array:
        """State tensor `name`, made full of `fill` at its first use."""
        if name not in self.slots:
            if self.room is None:
                self.slots[name] = arrays.full_like(self.weights, fill)
            else:
                self.slots[name] = arrays.filled(self.room(name), fill)
        return self.slots[name]

    def advance(self, ranges: Sequence[Range] | None) -> Iterator[tuple[slice, int]]:
        """Count one update of `ranges` (None: all); give each stretch of equal count as (elements, its new count)."""
        for at, (_, count, *_) in self.advance_with(ranges, lambda _, numbers: numbers):
            yield at, count

    def advance_with(
        self, ranges: Sequence[Range] | None, follow: Callable[[int, tuple[float, ...]], tuple[float, ...]]
    ) -> Iterator[tuple[slice, Segment]]:
        """As `advance`, with the rule's own numbers: give each stretch that is alike as (elements, what it is after the update).

        `follow`: from a stretch's new count and its numbers before the update, none before the first, those after it.
        """
        self.steps += 1
        if ranges is None and len(self.segments) == 1:
            length, count, *numbers = self.segments[0]
            self.segments[0] = (length, count + 1, *follow(count + 1, tuple(numbers)))
            yield slice(0, length), self.segments[0]
            return
        stretches = [
            (offset, (length, count, *(follow(count, tuple(numbers)) if live else numbers)), live)
            for offset, (length, count, *numbers), live in _split(self.segments, [(0, len(self.weights))] if ranges is None else ranges)
        ]
        self.segments = _merge(segment for _, segment, _ in stretches)
        for offset, segment, live in stretches:
            if live:
                yield slice(offset, offset + segment[0]), segment

    def segment_at(self, offset: int) -> Segment:
        """The segment in which the element at `offset` is: its count is how many updates the element has had."""
        at = 0
        for segment in self.segments:
            at += segment[0]
            if offset < at:
                return segment
        raise ValueError(f"element {offset} is outside a block of {at}")


class UpdateFacts(NamedTuple):
    """What is known of the push, or pushes, that make an update."""

    ranges: Sequence[Range] | None = None
    """What of the block has a gradient; None: all of it."""
    staleness: int | None = None
    """Updates between what the gradient was computed on and now; None: not known."""
    worker: int | None = None
    """The rank that pushed; None: the gradient is the mean of several."""


class HasHyperparameters(Protocol):
    """Something with a name and hyperparameters: `hyperparameters` are their defaults."""

    @property
    def name(self) -> str: ...
    @property
    def hyperparameters(self) -> Hyperparameters: ...


class Rule(HasHyperparameters, Protocol):
    """What a push does to the parameters. One object serves every block; all state is in BlockState.

    `slots` names the state tensors that a block of this rule may have, `per_worker` those that it may have once a worker.
    A rule with `needs_staleness` refuses a staleness of None with ValueError.
    """

    @property
    def slots(self) -> tuple[str, ...]: ...
    @property
    def per_worker(self) -> tuple[str, ...]: ...
    @property
    def needs_staleness(self) -> bool: ...

    def init(self, weights: Array) -> BlockState:
        """State before the first update; keeps `weights` itself, no copy. Raises ValueError for a dtype it cannot update."""

    def apply(self, state: BlockState, grad: Array, hyperparameters: Hyperparameters, facts: UpdateFacts = UpdateFacts()) -> None:
        """Update `state` in place by the gradient `grad` (same length and dtype, left as it is), in the ranges of `facts` only if given.

        Raises ValueError if the rule cannot do without what is None in `facts`.
        """

    def reply(self, state: BlockState, hyperparameters: Hyperparameters, worker: int) -> Array:
        """What that worker computes its next gradient on, at its start and after each of its pushes.

        Either `state.weights` itself, which later pushes change, or an array that nobody changes. It may add state tensors and put
        others in their place, but changes none.
        """

    def forget(self, state: BlockState, worker: int) -> None:
        """That worker is gone: its state tensors are removed and sums over workers are without it. One that returns begins with none."""


@runtime_checkable
class WorkerHalf(HasHyperparameters, Protocol):
    """What a rule does in the worker before a push; `worker_slots` names its state tensors, which the worker's checkpoint must hold."""

    @property
    def worker_slots(self) -> tuple[str, ...]: ...

    def outgoing(self, state: BlockState, grad: Array, hyperparameters: Hyperparameters, ranges: Sequence[Range] | None = None) -> Array:
        """What is pushed in place of `grad`: a new array, 0 outside `ranges`. `state` is the worker's: its weights and its slots."""


class BaseRule:
    """What most rules are: floating point weights, no state a worker, and the weights themselves as reply."""

    name: str
    slots: tuple[str, ...] = ()
    per_worker: tuple[str, ...] = ()
    needs_staleness = False
    on_torch = False
    """Its kernel is torch's: no numpy arrays."""

    def init(self, weights: Array) -> BlockState:
        """State before the first update."""
        if self.on_torch and not arrays.is_torchs(weights):
            raise ValueError(f"rule {self.name} is a kernel of torch's and takes its tensors, got {type(weights).__name__}")
        if arrays.dtype_of(weights) not in FLOATS:
            raise ValueError(f"rule {self.name} updates floating point weights, got {weights.dtype}")
        return BlockState(weights)

    def reply(self, state: BlockState, hyperparameters: Hyperparameters, worker: int) -> Array:
        """The weights themselves."""
        return state.weights

    def forget(self, state: BlockState, worker: int) -> None:
        """Remove what this worker has here."""
        for name in self.per_worker:
            state.slots.pop(of_worker(name, worker), None)


def of_worker(name: str, worker: int) -> str:
    """The name of worker `worker`'s state tensor `name`."""
    return f"{name}@{worker}"


def one_worker(rule: HasHyperparameters, worker: int | None) -> int:
    """The rank whose push it is. Raises ValueError if it is a mean of several."""
    if worker is None:
        raise ValueError(
            f"rule {rule.name} keeps state for each worker and takes the push of one, not a mean of several; sgd, adam take both"
        )
    return worker


def staleness_of(rule: HasHyperparameters, staleness: int | None) -> int:
    """The staleness. Raises ValueError if it is not known."""
    if staleness is None:
        raise ValueError(
            f"rule {rule.name} needs the staleness of a push; it is not known of one that is based on an earlier attempt of the shard"
        )
    return staleness


def range_views(ranges: Sequence[Range] | None, *wholes: Array) -> Iterator[tuple[Array, ...]]:
    """The arrays themselves, or their views of each range."""
    if ranges is None:
        yield wholes
        return
    for offset, length in ranges:
        yield tuple(whole[offset : offset + length] for whole in wholes)


def decayed(grad: Array, weights: Array, hyperparameters: Hyperparameters) -> Array:
    """grad + weight_decay * weights: a new array, or `grad` itself where there is no decay."""
    decay = float(hyperparameters["weight_decay"])
    return arrays.added(grad, weights, decay) if decay else grad


def check_hyperparameters(rule: HasHyperparameters, hyperparameters: Mapping[str, Any]) -> dict[str, float | bool]:
    """Hyperparameters from JSON, whole, of the right kind and in range. Raises ValueError naming the rule, the number and its value."""
    if not isinstance(hyperparameters, Mapping):
        raise ValueError(f"hyperparameters of rule {rule.name} are a map, got {str(hyperparameters)[:40]!r}")
    unknown = sorted(set(hyperparameters) - set(rule.hyperparameters))
    if unknown:
        raise ValueError(f"rule {rule.name} has no hyperparameter {unknown[0]!r}; it has {', '.join(rule.hyperparameters) or 'none'}")
    checked: dict[str, float | bool] = {}
    for name, default in rule.hyperparameters.items():
        value = hyperparameters.get(name, default)
        if isinstance(default, bool):
            if not isinstance(value, bool):
                raise ValueError(f"rule {rule.name}: {name} is true or false, got {value!r}")
            checked[name] = value
        elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"rule {rule.name}: {name} is a finite number, got {value!r}")
        else:
            checked[name] = float(value)
            within, words = _LIMITS.get(f"{rule.name} {name}") or _LIMITS.get(name, _ANY)
            if not within(checked[name]):
                raise ValueError(f"rule {rule.name}: {name} is {words}, got {value:g}")
    if checked.get("activation", 0) * checked.get("every", 1) > 1:
        every, activation = checked["every"], checked["activation"]
        raise ValueError(f"rule {rule.name}: activation is at most 1 / every, with every {every:g} not {activation:g}")
    return checked


_ANY: Final[tuple[Callable[[float], bool], str]] = (lambda _: True, "")
_LIMITS: Final[Mapping[str, tuple[Callable[[float], bool], str]]] = {
    **dict.fromkeys(("beta1", "beta2", "average", "decay"), (lambda x: 0 <= x < 1, "0 or more and below 1")),
    **dict.fromkeys(("lr", "l1", "l2", "max_lr", "momentum_decay"), (lambda x: x >= 0, "0 or more")),
    **dict.fromkeys(("beta", "ftrl lr"), (lambda x: x > 0, "above 0, since it divides")),
    "workers": (lambda x: x >= 1, "1 or more"),
    "every": (lambda x: x >= 1 and x == int(x), "a whole number of 1 or more"),
    "activation": (lambda x: 0 <= x <= 1, "0 to 1"),
}
"""By number, or by rule and number: outside of these a formula divides by zero or takes the root of what is negative."""


def _split(segments: Sequence[Segment], ranges: Sequence[Range]) -> Iterator[tuple[int, Segment, bool]]:
    """Cut segments at the edges of ranges: (offset, the piece with the count after the update, whether it takes part)."""
    edges = {0}
    at = 0
    for segment in segments:
        at += segment[0]
        edges.add(at)
    starts = {offset for offset, length in ranges if length}
    ends = {offset + length for offset, length in ranges if length}
    rest = iter(segments)
    left = count = 0
    numbers: list[float] = []
    live = False
    for offset, end in pairwise(sorted(edges | starts | ends)):
        if left == 0:
            left, count, *numbers = next(rest)
        live = offset in starts or (live and offset not in ends)
        yield offset, (end - offset, count + live, *numbers), live
        left -= end - offset


def _merge(segments: Iterator[Segment]) -> list[Segment]:
    merged: list[Segment] = []
    for length, count, *numbers in segments:
        if merged and merged[-1][1:] == (count, *numbers):
            length += merged.pop()[0]
        merged.append((length, count, *numbers))
    return merged


def _is_segment(row: object) -> bool:
    if not isinstance(row, list) or len(row) < 2:
        return False
    numbers = all(type(number) in (int, float) and math.isfinite(number) for number in row[2:])
    return numbers and all(type(value) is int and value >= 0 for value in row[:2])
