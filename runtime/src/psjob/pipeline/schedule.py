"""Ways of training a pipeline: which weights a forward takes, in which order work is done, and how late gradients are. Pure.

Each way is an object without state. Before them stand the formulas of how late the gradient of each stage is. `StageSchedule` says what
one worker does next.

K stages 0..K-1, M micro-batches an update, r_k replicas of stage k. A delay is a number of updates: a gradient of delay d was computed
on the weights that were current d updates before the one it makes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from psjob import contract


def stashed(stage: int, replicas: Sequence[int], microbatches: int = 1) -> int:
    """Updates by which weights are old at stage `stage` of 1F1B without flush, where the weights of a forward serve its backward too.

    ceil(w / M), where w is `warm_up` and M the micro-batches of an update that one replica makes. A replica that made w forwards ahead
    of its backwards has finished w micro-batches less than it has begun. K-1-k for one replica a stage and M = 1, and
    floor((r_k + … + r_{K-1} - 1) / r_k) with replicas (PipeDream; Narayanan et al., SOSP 2019). Gradients of a stage's replicas are
    summed before they are an update.

    Raises:
        ValueError: a stage that is not there, or a number below 1.
    """
    _at_least_one("microbatches", microbatches)
    return -(-warm_up(stage, replicas) // microbatches)


def warm_up(stage: int, replicas: Sequence[int]) -> int:
    """Forwards that a replica of `stage` makes before its first pair of a forward and a backward, in 1F1B without flush.

    floor((r_k + … + r_{K-1} - 1) / r_k), as in PipeDream's runtime.py (`num_warmup_minibatches`).

    Raises:
        ValueError: a stage that is not there, or a number below 1.
    """
    if not 0 <= stage < len(replicas):
        raise ValueError(f"stage {stage} of {len(replicas)} stages: must be 0 to {len(replicas) - 1}")
    for number, count in enumerate(replicas):
        _at_least_one(f"replicas of stage {number}", count)
    return (sum(replicas[stage:]) - 1) // replicas[stage]


def double_buffered(stages: int, microbatches: int) -> int:
    """The delay of every stage of PipeDream-2BW (Narayanan et al. 2020, arXiv 2006.09503): 1 at any depth.

    Raises:
        ValueError: fewer micro-batches than stages. Stage 0 would not have the weights of one update ago in time.
    """
    _at_least_one("stages", stages)
    if microbatches < stages:
        raise ValueError(
            f"microbatches is {microbatches} with {stages} stages: 2BW needs at least one for each stage; raise it to {stages}"
        )
    return 1


def check_shared(owners: Mapping[str, Sequence[int]], delays: Sequence[int], one_delay: str) -> None:
    """Raise ValueError if stages that share a parameter have different delays: two updates would mix.

    `owners` are the stages of each parameter by name; `one_delay` says what to take where that is so.
    """
    for name, stages in owners.items():
        if len({delays[stage] for stage in stages}) > 1:
            late = ", ".join(str(delays[stage]) for stage in stages)
            raise ValueError(
                f"{name} is shared by stages {', '.join(map(str, stages))}, whose delays are {late} updates; take {one_delay}, or give "
                "each stage a weight of its own"
            )


def of_each(replicas: int, microbatches: int) -> int:
    """The micro-batches of an update that each replica of a stage makes, without flush. Raises ValueError if it is no whole number."""
    if microbatches % replicas:
        raise ValueError(
            f"microbatches is {microbatches}, which {replicas} workers of a stage cannot share evenly; without flush it must be a multiple "
            f"of {replicas}"
        )
    return microbatches // replicas


def _at_least_one(what: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{what} is {value}, must be 1 or more")


@dataclass(frozen=True)
class TrainingWay:
    """M micro-batches make a minibatch, and a minibatch makes one update of each stage. Version n has had n updates.

    If a way says nothing else it is 1F1B without flush, in which each stage takes its newest weights.
    """

    recompute: bool = False
    """Does a backward run its forward again, on the weights that are current then?"""
    predicts: bool = False
    """Does a forward take weights that are expected `delay` updates later?"""
    vertical_sync: bool = False
    """Do all stages take the version that stage 0 took?"""
    in_place: ClassVar[bool] = False
    """Does a stage have one memory of weights, which changes under open graphs?"""
    flushes: ClassVar[bool] = False
    """Are all micro-batches of a minibatch through before the next one begins?"""

    def delay(self, stage: int, replicas: Sequence[int], microbatches: int) -> int:
        """Updates by which the weights of a forward are old, where enough updates were made. Raises ValueError for what cannot be."""
        counted = 0 if self.vertical_sync else stage
        return stashed(counted, replicas, of_each(replicas[counted], microbatches))

    def version(self, minibatch: int, updates: int, first: int) -> int:
        """The version that a stage takes for a minibatch when its first forward begins.

        `updates` is the number of updates that the stage has made by then, `first` the version that stage 0 took.
        """
        return first if self.vertical_sync else updates

    def awaits(self, minibatch: int) -> int:
        """Updates that a stage must have made before the first forward of a minibatch."""
        return 0


class Flush(TrainingWay):
    """All micro-batches of an update are finished before the next begins: the gradient of one process, no delay.

    `recompute` keeps only inputs and runs the forward again in the backward.
    """

    flushes = True

    def delay(self, stage: int, replicas: Sequence[int], microbatches: int) -> int:
        return 0

    def version(self, minibatch: int, updates: int, first: int) -> int:
        return minibatch

    def awaits(self, minibatch: int) -> int:
        return minibatch


class PipeDream(TrainingWay):
    """Each stage takes its newest weights, and keeps them for the backward (Narayanan et al., SOSP 2019).

    With `vertical_sync` all stages take the version that stage 0 took.
    """


class TwoBW(TrainingWay):
    """Gradients of M >= K micro-batches are one update; two versions; delay 1 at any depth (arXiv 2006.09503)."""

    def delay(self, stage: int, replicas: Sequence[int], microbatches: int) -> int:
        return double_buffered(len(replicas), microbatches)

    def version(self, minibatch: int, updates: int, first: int) -> int:
        return max(minibatch - 1, 0)

    def awaits(self, minibatch: int) -> int:
        return max(minibatch - 1, 0)


@dataclass(frozen=True)
class FTPipe(TrainingWay):
    """PipeDream's order without its stash (Eliad et al., ATC 2021): the backward runs the forward again, on current weights.

    With `predicts` a forward takes the weights that the optimizer's momentum leads to in as many updates as the stage is late, and
    without `recompute` the backward takes these too. `psjob.pipeline.predict` has the formulas.
    """

    recompute: bool = True
    predicts: bool = True


class Latest(TrainingWay):
    """PipeDream's order with one memory of weights (the asynchronous way of PipeMare, arXiv 1910.05124).

    Each forward and each backward takes what is in it then: activations of older weights meet the newest ones, and what comes of it is the
    gradient of neither. The delay is that of the first micro-batch of a minibatch.
    """

    in_place = True


def way_of(schedule: str, weights: str = "stash", predict: str = "none") -> TrainingWay:
    """The way that a manifest names. Raises ValueError for words that do not go together."""
    recompute, predicts = weights == "recompute", predict == "nesterov"
    if schedule not in contract.SCHEDULES or weights not in contract.STAGE_WEIGHTS or predict not in contract.PREDICTIONS:
        raise ValueError(f"training.pipeline: schedule {schedule}, weights {weights}, predict {predict}; one of them is not known")
    if schedule == "flush" and weights in ("stash", "recompute") and not predicts:
        return Flush(recompute=recompute)
    if schedule == "2bw" and weights == "stash" and not predicts:
        return TwoBW()
    if weights in ("vertical", "latest") and predicts:
        raise ValueError(f"training.pipeline.predict nesterov does not go with weights: {weights}; take weights: stash or recompute")
    if schedule == "pipedream" and weights == "latest":
        return Latest()
    if schedule == "pipedream" and weights == "vertical":
        return PipeDream(vertical_sync=True)
    if schedule == "pipedream":
        return FTPipe(recompute, predicts) if recompute or predicts else PipeDream()
    raise ValueError(
        f"training.pipeline.schedule {schedule} does not go with weights: {weights} and predict: {predict}; take schedule: pipedream"
    )


@dataclass(frozen=True)
class Forward:
    """Of one micro-batch of a batch."""

    batch: int
    micro: int


@dataclass(frozen=True)
class Backward:
    """Of a micro-batch whose forward was made."""

    batch: int
    micro: int


@dataclass(frozen=True)
class Update:
    """All backwards of a batch are made, and the script has stepped: its gradient is pushed."""

    batch: int


Work = Forward | Backward | Update


class StageSchedule:
    """Of replica `replica` of stage `stage`. Batches are counted from `first`; before it, each has made its update.

    A worker makes `warm_up` forwards ahead of its backwards, over the edges of batches where its way does not flush. An update is made
    when its batch's backwards are done and `step` was called for it.

    Attributes:
        updates: the version of the stage's weights: batches whose update was made.
        stepped: batches for which `step` was called: the next batch has this number.
    """

    def __init__(self, way: TrainingWay, stage: int, replicas: Sequence[int], replica: int = 0, first: int = 0) -> None:
        self.way, self._replica, self._replicas = way, replica, replicas[stage]
        self._ahead = warm_up(stage, replicas)
        self.updates = self.stepped = first
        self._open: deque[Forward] = deque()
        """Forwards whose backward is to come."""
        self._left: dict[int, int] = {}
        """By batch: backwards that are to come."""

    def batch(self, microbatches: int) -> Iterator[Work]:
        """The next batch, cut in so many parts: what is done of it and of those before. Each piece is done before the next is asked for."""
        number = self.stepped
        own = range(self._replica, microbatches, self._replicas)
        self._left[number] = len(own)
        while self.updates < self.way.awaits(number) and self._open:
            yield from self._back()
        for micro in own:
            forward = Forward(number, micro)
            yield forward
            self._open.append(forward)
            if len(self._open) > self._ahead:
                yield from self._back()
        if self.way.flushes:
            yield from self.drain()

    def step(self) -> Iterator[Work]:
        """The script's step that follows a batch."""
        self.stepped += 1
        return self._updates()

    def drain(self) -> Iterator[Work]:
        """No batch follows, or none before this one is through: the backwards that are left."""
        while self._open:
            yield from self._back()

    def _back(self) -> Iterator[Work]:
        oldest = self._open.popleft()
        yield Backward(oldest.batch, oldest.micro)
        self._left[oldest.batch] -= 1
        yield from self._updates()

    def _updates(self) -> Iterator[Work]:
        while self.updates < self.stepped and not self._left[self.updates]:
            yield Update(self.updates)
            del self._left[self.updates]
            self.updates += 1
