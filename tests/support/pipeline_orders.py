"""Orders of work of whole runs of a pipeline, made beforehand: what `StageSchedule` decides piece by piece is compared with them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from psjob.pipeline.schedule import Flush, TrainingWay, of_each, warm_up


class Direction(Enum):
    """Of a micro-batch through a stage."""

    FORWARD = "F"
    BACKWARD = "B"


class StageWork(NamedTuple):
    """One forward or backward of one micro-batch, counted from 0 over the whole run."""

    direction: Direction
    micro: int


class GPipe(Flush):
    """A flush whose stages make all forwards of a minibatch before its backwards."""


def work_of(way: TrainingWay, stage: int, stages: int, microbatches: int, minibatches: int) -> list[StageWork]:
    """What a stage of one replica does, in its order, over the whole run."""
    if not way.flushes:
        return without_flush(stage, [1] * stages, microbatches * minibatches)
    all_work = []
    for first in range(0, minibatches * microbatches, microbatches):
        if isinstance(way, GPipe):
            all_work += gpipe(microbatches, first)
        else:
            all_work += one_forward_one_backward(stage, stages, microbatches, first)
    return all_work


def gpipe(microbatches: int, first: int = 0) -> list[StageWork]:
    """All forwards, then all backwards, both in order (GPipe, arXiv 1811.06965). The same on every stage."""
    _check(microbatches)
    numbers = range(first, first + microbatches)
    return [*(StageWork(Direction.FORWARD, n) for n in numbers), *(StageWork(Direction.BACKWARD, n) for n in numbers)]


def one_forward_one_backward(stage: int, stages: int, microbatches: int, first: int = 0) -> list[StageWork]:
    """1F1B with flush (DAPPLE, PipeDream-Flush): K-1-k forwards, then a forward and a backward in turn, then the backwards left.

    Args:
        stage: k, from 0.
        stages: K.
        microbatches: M, all before the flush.
        first: number of the first of them.

    Raises:
        ValueError: a stage that is not there, or fewer than one micro-batch.
    """
    return _in_turn(range(first, first + microbatches), warm_up(stage, [1] * stages))


def without_flush(stage: int, replicas: Sequence[int], total: int, replica: int = 0) -> list[StageWork]:
    """1F1B without flush: as if all micro-batches of the run came before one flush (PipeDream, SOSP 2019).

    Args:
        stage: k, from 0.
        replicas: how many replicas each stage has.
        total: micro-batches of the whole run.
        replica: of this stage. Micro-batch n is work of replica n mod r_k, as in PipeDream's runtime.py.

    Raises:
        ValueError: a stage or replica that is not there, or fewer than one micro-batch.
    """
    ahead = warm_up(stage, replicas)
    if not 0 <= replica < replicas[stage]:
        raise ValueError(f"replica {replica} of stage {stage}: must be 0 to {replicas[stage] - 1}")
    _check(total)
    return _in_turn(range(replica, total, replicas[stage]), ahead)


def _in_turn(numbers: range, ahead: int) -> list[StageWork]:
    if not numbers:
        return []
    ahead = min(ahead, len(numbers))
    work = [StageWork(Direction.FORWARD, n) for n in numbers[:ahead]]
    for done, n in enumerate(numbers[ahead:]):
        work += [StageWork(Direction.FORWARD, n), StageWork(Direction.BACKWARD, numbers[done])]
    return work + [StageWork(Direction.BACKWARD, n) for n in numbers[len(numbers) - ahead :]]


def _check(microbatches: int) -> None:
    if microbatches < 1:
        raise ValueError(f"microbatches is {microbatches}, must be 1 or more")


def updates_before(stage: int, replicas: Sequence[int], microbatches: int, minibatch: int, micro: int) -> int:
    """Updates that stage `stage` has made before the forward of micro-batch `micro` of minibatch `minibatch`, in 1F1B without flush.

    floor(max(i - w, 0) / m): a replica makes m = M / r_k micro-batches of each minibatch, and this one is its i-th of all. Before that
    forward it has made all except w = `warm_up` of the backwards.

    Raises:
        ValueError: as `warm_up` and `of_each`.
    """
    own = of_each(replicas[stage], microbatches)
    done = minibatch * own + micro // replicas[stage] - warm_up(stage, replicas)
    return max(done, 0) // own
