"""A collective as data: the steps in which chunks of every rank's vector move between ranks, and sums of such schedules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, zip_longest

Link = tuple[int, int]
"""Sender and receiver."""


@dataclass(frozen=True, slots=True)
class Move:
    """`receiver` gets the sender's chunk: added to its own, or in the place of it."""

    sender: int
    receiver: int
    chunk: int
    add: bool


Step = tuple[Move, ...]


@dataclass(frozen=True, eq=False)
class Schedule:
    """What `ranks` processes do with a vector each, cut into chunks of these relative sizes.

    All moves of a step begin with what the step before left. No rank sends and receives one chunk in one step. What is added to one
    chunk in one step is added in the order of the moves, so that the bits of a sum follow from the schedule alone.
    """

    ranks: int
    weights: tuple[int, ...]
    steps: tuple[Step, ...]

    def spans(self, numel: int) -> list[slice]:
        """Where each chunk lies in a vector of `numel` elements; a chunk of a short vector may be empty."""
        whole = sum(self.weights)
        edges = [numel * before // whole for before in accumulate(self.weights, initial=0)]
        return [slice(begin, end) for begin, end in pairwise(edges)]

    def link_elements(self, numel: int) -> Counter[Link]:
        """How many elements of a vector of `numel` pass each link."""
        sizes = [span.stop - span.start for span in self.spans(numel)]
        passed: Counter[Link] = Counter()
        for move in (move for step in self.steps for move in step if sizes[move.chunk]):
            passed[move.sender, move.receiver] += sizes[move.chunk]
        return passed


@lru_cache(maxsize=64)
def part(schedule: Schedule, rank: int) -> tuple[Step, ...]:
    """The moves of each step that `rank` takes part in; steps without any are left out."""
    mine = (tuple(move for move in step if rank in (move.sender, move.receiver)) for step in schedule.steps)
    return tuple(step for step in mine if step)


def relabelled(schedule: Schedule, names: Sequence[int], ranks: int) -> Schedule:
    """The same among `ranks`, where `names[r]` does what rank r did."""
    steps = (tuple(Move(names[m.sender], names[m.receiver], m.chunk, m.add) for m in step) for step in schedule.steps)
    return Schedule(ranks, schedule.weights, tuple(steps))


def at_once(parts: Sequence[Schedule]) -> Schedule:
    """Schedules of different ranks on the same chunks, side by side."""
    return Schedule(parts[0].ranks, parts[0].weights, _zipped([part.steps for part in parts]))


def in_turn(parts: Sequence[Schedule]) -> Schedule:
    """Schedules on the same chunks, one after the other."""
    return Schedule(parts[0].ranks, parts[0].weights, tuple(step for part in parts for step in part.steps))


def shared_out(parts: Sequence[Schedule], payload: Sequence[int]) -> Schedule:
    """Schedules of the same ranks side by side, each with its own share of the vector, in the proportion of `payload`."""
    whole = math.lcm(*(sum(part.weights) for part in parts))
    weights: list[int] = []
    moved: list[tuple[Step, ...]] = []
    for part, share in zip(parts, payload, strict=True):
        first = len(weights)
        moved.append(tuple(tuple(Move(m.sender, m.receiver, first + m.chunk, m.add) for m in step) for step in part.steps))
        weights += [share * weight * whole // sum(part.weights) for weight in part.weights]
    return Schedule(parts[0].ranks, tuple(weights), _zipped(moved))


def _zipped(steps: Iterable[tuple[Step, ...]]) -> tuple[Step, ...]:
    return tuple(tuple(move for step in row for move in step) for row in zip_longest(*steps, fillvalue=()))
