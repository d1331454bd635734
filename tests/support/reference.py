"""The oracle: one process that does what a sync job promises, bit for bit.

It sums the micro-batches' gradients in rank order, multiplies once by 1/n (n present) and applies the same rule on the same
block layout. With a `Wire` each gradient is first what a codec makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psjob import codecs, rules
from psjob.layout.blocks import Block, Layout, TensorSpec, live_ranges
from psjob.layout.packing import Pack
from psjob.process.config import LocalConfig
from psjob.rules.base import BlockState, UpdateFacts, check_hyperparameters
from psjob.rules.reduction import mean_in_rank_order

Batch = Any
Hyperparameters = Sequence[Mapping[str, float | bool]]


def reference(
    model: torch.nn.Module,
    rule: str,
    hyperparameters: Hyperparameters | Callable[[int], Hyperparameters],
    micro_batches: Callable[[int], Sequence[Batch | None]],
    loss: Callable[[torch.nn.Module, Batch], torch.Tensor],
    steps: int,
    layout: Layout | None = None,
    wire: Wire | None = None,
    processes: int = 1,
) -> dict[int, BlockState]:
    """Train `model` in place for `steps`; returns every block's state. `processes`: so many ranks are one worker, and push once.

    `numbers`: a group each, or a function of the step. `micro_batches(step)`: a batch a rank, None where a rank has none.
    The layout, when not given, is that of `model.named_parameters()` in one group.
    """
    parameters = [p for _, p in model.named_parameters()]
    layout = layout or layout_of(model)
    made = rules.named(rule)
    states: dict[int, BlockState] = {}
    for block in layout.blocks:
        weights = torch.empty(block.length, dtype=getattr(torch, block.dtype))
        Pack(block, weights, layout.table).gather(parameters)
        states[block.index] = made.init(weights)
    for step in range(steps):
        now = [check_hyperparameters(made, group) for group in (hyperparameters(step) if callable(hyperparameters) else hyperparameters)]
        ranks = [rank for rank, batch in enumerate(micro_batches(step)) if batch is not None]
        pushes = [_gradients(model, parameters, batch, loss) for batch in micro_batches(step) if batch is not None]
        if not pushes:
            continue
        nowhere = frozenset(row for row in range(len(parameters)) if all(grads[row] is None for grads in pushes))
        for block in layout.blocks:
            flats = [torch.empty_like(states[block.index].weights) for _ in pushes]
            for rank, flat, grads in zip(ranks, flats, pushes, strict=True):
                Pack(block, flat, layout.table).gather(grads)
                if wire is not None:
                    wire.carry(rank, step, block, flat)
            mean = torch.empty_like(flats[0])
            if processes == 1:
                mean_in_rank_order(flats, mean)
            else:
                _mean_of_means([[f for r, f in zip(ranks, flats, strict=True) if r // processes == w] for w in range(max(ranks) + 1)], mean)
            ranges = live_ranges(block, nowhere)
            whole = ranges == [(0, block.length)]
            if ranges:
                made.apply(states[block.index], mean, now[block.group], UpdateFacts(None if whole else ranges, 0))
            Pack(block, states[block.index].weights, layout.table).scatter(parameters)
    return states


def _mean_of_means(workers: Sequence[Sequence[torch.Tensor]], out: torch.Tensor) -> None:
    """Each worker's mean in local order; then theirs in order, by shares where they are of different numbers of gradients."""
    there = [flats for flats in workers if flats]
    means = []
    for flats in there:
        total = flats[0].clone()
        for flat in flats[1:]:
            total = total + flat
        means.append(total * (1.0 / len(flats)))
    counts = [len(flats) for flats in there]
    if len(set(counts)) == 1:
        mean_in_rank_order(means, out)
        return
    out.copy_(means[0] * (counts[0] / sum(counts)))
    for mean, count in zip(means[1:], counts[1:], strict=True):
        out.add_(mean, alpha=count / sum(counts))


@dataclass(frozen=True)
class Rounds:
    """What `local_reference` has come to: the job's weights, and each worker's own optimizer."""

    model: torch.nn.Module
    optimizers: Sequence[torch.optim.Optimizer]


def local_reference(
    build: Callable[[], torch.nn.Module],
    make: Callable[[torch.nn.Module], torch.optim.Optimizer],
    batch: Callable[[int, int], Batch | None],
    loss: Callable[[torch.nn.Module, Batch], torch.Tensor],
    workers: int,
    steps: int,
    outer: LocalConfig,
) -> Rounds:
    """Local SGD in one process: `steps` of each worker in rounds, then the mean of how far they went in rank order and Nesterov's rule.

    `batch(step, rank)`: None where that rank makes no step. The last round may be shorter. The layout is that of the optimizer's groups.
    """
    models = [build() for _ in range(workers)]
    optimizers = [make(model) for model in models]
    held = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in optimizers]
    groups = [number for number, group in enumerate(optimizers[0].param_groups) for _ in group["params"]]
    table = [
        TensorSpec(str(row), tuple(p.shape), str(p.dtype)[6:], group) for row, (p, group) in enumerate(zip(held[0], groups, strict=True))
    ]
    layout, rule = Layout.of(table), rules.named("outer-nesterov")
    taken = [p.detach().clone() for p in held[0]]
    states = {b.index: rule.init(Pack(b, torch.empty(b.length), layout.table).gather(taken)) for b in layout.blocks}
    for begin in range(0, steps, outer.inner_steps):
        far: list[list[torch.Tensor]] = []
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            given = [batch(step, rank) for step in range(begin, min(begin + outer.inner_steps, steps))]
            for one in [one for one in given if one is not None]:
                optimizer.zero_grad()
                loss(model, one).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            if any(one is not None for one in given):
                far.append([before - p.detach() for before, p in zip(taken, held[rank], strict=True)])
        for block in layout.blocks:
            pushes = [Pack(block, torch.empty(block.length), layout.table).gather(deltas) for deltas in far]
            mean_in_rank_order(pushes, pushes[0])
            rule.apply(states[block.index], pushes[0], {"lr": outer.lr, "momentum": outer.momentum})
            for tensors in (taken, *held):
                Pack(block, states[block.index].weights, layout.table).scatter(tensors)
    return Rounds(models[0], optimizers)


class Wire:
    """What a gradient becomes on its way to a shard: encoded and decoded, and what was left out added to the next one."""

    def __init__(self, codec: str, ratio: float = 0.01, seed: int = 0) -> None:
        self._codec, self._ratio, self._seed = codecs.named(codec), ratio, seed
        self.left: dict[tuple[int, int], torch.Tensor] = {}
        """By rank and block."""

    def carry(self, rank: int, clock: int, block: Block, flat: torch.Tensor) -> None:
        """Replace `flat` by what arrives."""
        codec = codecs.for_block(self._codec, block, self._ratio)
        if codec is None:
            return
        source = flat
        if codec.feeds_back:
            source = self.left.setdefault((rank, block.index), torch.zeros(block.length)).add_(flat)
        body = torch.empty(codec.bound(block.length, self._ratio), dtype=torch.uint8)
        key = codecs.CodecKey(self._seed, clock, block.index, rank)
        size = codec.encode(source, body, key, self._ratio)
        assert size, "the oracle's gradients are finite"
        codec.decode(body[:size], flat, key, self._ratio)


def layout_of(model: torch.nn.Module) -> Layout:
    """The layout of all parameters of a model in one group."""
    return Layout.of([TensorSpec(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), 0) for name, p in model.named_parameters()])


def _gradients(
    model: torch.nn.Module, parameters: Sequence[torch.Tensor], batch: Batch, loss: Callable[[torch.nn.Module, Batch], torch.Tensor]
) -> list[torch.Tensor | None]:
    for p in parameters:
        p.grad = None
    loss(model, batch).backward()  # type: ignore[no-untyped-call]
    return [p.grad for p in parameters]
