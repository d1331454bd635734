"""How late the gradient of each stage is, how long stages idle, and what a stage holds: formulas of pipelines.

K stages 0..K-1, M micro-batches an update, r_k replicas of stage k. A delay is a number of updates: a gradient of delay d was computed
on the weights that were current d updates before the one it makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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


def updates_before(stage: int, replicas: Sequence[int], microbatches: int, minibatch: int, micro: int) -> int:
    """Updates that stage `stage` has made before the forward of micro-batch `micro` of minibatch `minibatch`, in 1F1B without flush.

    floor(max(i - w, 0) / m): a replica makes m = M / r_k micro-batches of each minibatch, and this one is its i-th of all. Before that
    forward it has made all but w = `warm_up` of the backwards.

    Raises:
        ValueError: as `warm_up` and `of_each`.
    """
    own = of_each(replicas[stage], microbatches)
    done = minibatch * own + micro // replicas[stage] - warm_up(stage, replicas)
    return max(done, 0) // own


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
    """Raise ValueError where stages that share a parameter have different delays: two updates would mix.

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
    """The micro-batches of an update that each replica of a stage makes, without flush. Raises ValueError where it is no whole number."""
    if microbatches % replicas:
        raise ValueError(
            f"microbatches is {microbatches}, which {replicas} workers of a stage cannot share evenly; without flush it must be a multiple "
            f"of {replicas}"
        )
    return microbatches // replicas


def idle_share(stages: int, microbatches: int) -> float:
    """The share of time, 0 to 1, that stages of equal speed wait in each flush: (K-1)/(M+K-1) (GPipe, arXiv 1811.06965)."""
    _at_least_one("stages", stages)
    _at_least_one("microbatches", microbatches)
    return (stages - 1) / (microbatches + stages - 1)


@dataclass(frozen=True)
class StageSize:
    """Bytes of one stage: its weights, and of one micro-batch all activations that its graph keeps, and its input."""

    weights: int
    activations: int
    input: int


def in_flight(stage: int, stages: int, microbatches: int | None = None) -> int:
    """Micro-batches whose graph a stage of 1F1B holds at once: K-k, and no more than there are before a flush."""
    return stages - stage if microbatches is None else min(microbatches, stages - stage)


def bytes_of_gpipe(size: StageSize, microbatches: int) -> int:
    """GPipe with recompute: weights, the inputs of all micro-batches, the activations of one."""
    return size.weights + microbatches * size.input + size.activations


def bytes_of_flush(size: StageSize, stage: int, stages: int, microbatches: int) -> int:
    """1F1B with flush: weights, and the activations of what is in flight."""
    return size.weights + in_flight(stage, stages, microbatches) * size.activations


def bytes_of_stash(size: StageSize, stage: int, stages: int) -> int:
    """1F1B without flush: weights and activations for each micro-batch in flight."""
    return in_flight(stage, stages) * (size.weights + size.activations)


def bytes_of_double_buffer(size: StageSize, stage: int, stages: int) -> int:
    """2BW: weights twice, activations of what is in flight."""
    return 2 * size.weights + in_flight(stage, stages) * size.activations


def bytes_of_recompute(size: StageSize, stage: int, stages: int) -> int:
    """Predicted weights beside the current ones, inputs of what is in flight, activations of the micro-batch that is run again."""
    return 2 * size.weights + in_flight(stage, stages) * size.input + size.activations


def _at_least_one(what: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{what} is {value}, must be 1 or more")
