"""The oracle: one process that does what a sync job promises, bit for bit.

It sums the micro-batches' gradients in rank order, multiplies once by 1/n (n present) and applies the same rule on the same
block layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from psjob import rules
from psjob.layout import Layout, TensorSpec, live_ranges
from psjob.packing import Pack
from psjob.rules.base import BlockState, check_numbers
from psjob.rules.reduction import mean_in_rank_order

Batch = Any
Numbers = Sequence[Mapping[str, float | bool]]


def reference(
    model: torch.nn.Module,
    rule: str,
    numbers: Numbers | Callable[[int], Numbers],
    micro_batches: Callable[[int], Sequence[Batch | None]],
    loss: Callable[[torch.nn.Module, Batch], torch.Tensor],
    steps: int,
    layout: Layout | None = None,
) -> dict[int, BlockState]:
    """Train `model` in place for `steps`; returns every block's state.

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
        now = [check_numbers(made, group) for group in (numbers(step) if callable(numbers) else numbers)]
        pushes = [_gradients(model, parameters, batch, loss) for batch in micro_batches(step) if batch is not None]
        if not pushes:
            continue
        nowhere = frozenset(row for row in range(len(parameters)) if all(grads[row] is None for grads in pushes))
        for block in layout.blocks:
            flats = [torch.empty_like(states[block.index].weights) for _ in pushes]
            for flat, grads in zip(flats, pushes, strict=True):
                Pack(block, flat, layout.table).gather(grads)
            mean = torch.empty_like(flats[0])
            mean_in_rank_order(flats, mean)
            ranges = live_ranges(block, nowhere)
            whole = ranges == [(0, block.length)]
            if ranges:
                made.apply(states[block.index], mean, now[block.group], None if whole else ranges, lag=0)
            Pack(block, states[block.index].weights, layout.table).scatter(parameters)
    return states


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
