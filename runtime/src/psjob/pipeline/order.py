"""The order in which one stage makes the forwards and backwards of its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from psjob.pipeline.delays import warm_up


class Direction(Enum):
    """Of a micro-batch through a stage."""

    FORWARD = "F"
    BACKWARD = "B"


class StageWork(NamedTuple):
    """One forward or backward of one micro-batch, counted from 0 over the whole run."""

    direction: Direction
    micro: int


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
