"""Ways of training a pipeline: which weights a forward takes, in which order work is done, and how late gradients are.

Each way is an object without state that a stage, the runs in one process and the reference share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from psjob import contract
from psjob.pipeline import delays, order
from psjob.pipeline.order import StageWork


class TrainingWay(Protocol):
    """M micro-batches make a minibatch, and a minibatch makes one update of each stage. Version n has had n updates."""

    name: ClassVar[str]

    @property
    def recompute(self) -> bool:
        """Does a backward run its forward again, on the weights that are current then?"""
        ...

    @property
    def predicts(self) -> bool:
        """Does a forward take weights that are expected `delay` updates later?"""
        ...

    @property
    def vertical_sync(self) -> bool:
        """Do all stages take the version that stage 0 took?"""
        ...

    @property
    def in_place(self) -> bool:
        """Does a stage have one memory of weights, which changes under open graphs?"""
        ...

    @property
    def flushes(self) -> bool:
        """Are all micro-batches of a minibatch through before the next one begins?"""
        ...

    def delay(self, stage: int, replicas: Sequence[int], microbatches: int) -> int:
        """Updates by which the weights of a forward are old, where enough updates were made. Raises ValueError for what cannot be."""
        ...

    def work(self, stage: int, stages: int, microbatches: int, minibatches: int) -> list[StageWork]:
        """What a stage does, in its order, over the whole run."""
        ...

    def version(self, minibatch: int, updates: int, first: int) -> int:
        """The version that a stage takes for a minibatch when its first forward begins.

        `updates` is the number of updates that the stage has made by then, `first` the version that stage 0 took.
        """
        ...

    def awaits(self, minibatch: int) -> int:
        """Updates that a stage must have made before the first forward of a minibatch."""
        ...


@dataclass(frozen=True)
class Flush:
    """All micro-batches of an update are finished before the next begins: the gradient of one process, no delay.

    `schedule` is "1f1b" or "gpipe". `recompute` keeps inputs alone and runs the forward again in the backward.
    """

    schedule: str = "1f1b"
    recompute: bool = False

    name: ClassVar[str] = "flush"
    predicts: ClassVar[bool] = False
    vertical_sync: ClassVar[bool] = False
    in_place: ClassVar[bool] = False
    flushes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.schedule not in ("1f1b", "gpipe"):
            raise ValueError(f"schedule is {self.schedule!r}, must be '1f1b' or 'gpipe'")

    def delay(self, stage: int, replicas: Sequence[int], microbatches: int) -> int:
        return 0

    def work(self, stage: int, stages: int, microbatches: int, minibatches: int) -> list[StageWork]:
        all_work = []
        for first in range(0, minibatches * microbatches, microbatches):
            if self.schedule == "gpipe":
                all_work += order.gpipe(microbatches, first)
            else:
                all_work += order.one_forward_one_backward(stage, stages, microbatches, first)
        return all_work

    def version(self, minibatch: int, updates: int, first: int) -> int:
        return minibatch

    def awaits(self, minibatch: int) -> int:
        return minibatch


class _NoFlush:
    """1F1B without flush."""

    flushes: ClassVar[bool] = False
    in_place: ClassVar[bool] = False

    def awaits(self, minibatch: int) -> int:
        return 0

    def work(self, stage: int, stages: int, microbatches: int, minibatches: int) -> list[StageWork]:
        return order.without_flush(stage, [1] * stages, microbatches * minibatches)


@dataclass(frozen=True)
class PipeDream(_NoFlush):
    """Each stage takes its newest weights, and keeps them for the backward (Narayanan et al., SOSP 2019).

    With `vertical_sync` all stages take the version that stage 0 took.
    """

    vertical_sync: bool = False

    name: ClassVar[str] = "pipedream"
    recompute: ClassVar[bool] = False
    predicts: ClassVar[bool] = False

    def delay(self, stage: int, replicas: Sequence[int], microbatches: int) -> int:
        counted = 0 if self.vertical_sync else stage
        return delays.stashed(counted, replicas, delays.of_each(replicas[counted], microbatches))

    def version(self, minibatch: int, updates: int, first: int) -> int:
        return first if self.vertical_sync else updates


@dataclass(frozen=True)
class TwoBW(_NoFlush):
    """Gradients of M >= K micro-batches are one update; two versions; delay 1 at any depth (arXiv 2006.09503)."""

    name: ClassVar[str] = "2bw"
    vertical_sync: ClassVar[bool] = False
    recompute: ClassVar[bool] = False
    predicts: ClassVar[bool] = False

    def delay(self, stage: int, replicas: Sequence[int], microbatches: int) -> int:
        return delays.double_buffered(len(replicas), microbatches)

    def version(self, minibatch: int, updates: int, first: int) -> int:
        return max(minibatch - 1, 0)

    def awaits(self, minibatch: int) -> int:
        return max(minibatch - 1, 0)


@dataclass(frozen=True)
class FTPipe(_NoFlush):
    """PipeDream's order without its stash (Eliad et al., ATC 2021): the backward runs the forward again, on current weights.

    With `predicts` a forward takes the weights that the optimizer's momentum leads to in as many updates as the stage is late, and
    without `recompute` the backward takes these too. `psjob.pipeline.predict` has the formulas.
    """

    predicts: bool = True
    recompute: bool = True

    name: ClassVar[str] = "ftpipe"
    vertical_sync: ClassVar[bool] = False

    def delay(self, stage: int, replicas: Sequence[int], microbatches: int) -> int:
        return delays.stashed(stage, replicas, delays.of_each(replicas[stage], microbatches))

    def version(self, minibatch: int, updates: int, first: int) -> int:
        return updates


@dataclass(frozen=True)
class Latest(_NoFlush):
    """PipeDream's order with one memory of weights (the asynchronous way of PipeMare, arXiv 1910.05124).

    Each forward and each backward takes what is in it then: activations of older weights meet the newest ones, and what comes of it is the
    gradient of neither.
    """

    name: ClassVar[str] = "latest"
    recompute: ClassVar[bool] = False
    predicts: ClassVar[bool] = False
    vertical_sync: ClassVar[bool] = False
    in_place: ClassVar[bool] = True

    def delay(self, stage: int, replicas: Sequence[int], microbatches: int) -> int:
        """Of the first micro-batch of a minibatch; `delays.updates_before` has it of each."""
        return delays.stashed(stage, replicas, delays.of_each(replicas[stage], microbatches))

    def version(self, minibatch: int, updates: int, first: int) -> int:
        return updates


DEFAULT: TrainingWay = TwoBW()


def of(schedule: str, weights: str = "stash", predict: str = "none") -> TrainingWay:
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
        return FTPipe(predicts, recompute) if recompute or predicts else PipeDream()
    raise ValueError(
        f"training.pipeline.schedule {schedule} does not go with weights: {weights} and predict: {predict}; take schedule: pipedream"
    )
