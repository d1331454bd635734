"""SGD with momentum, dampening, Nesterov and weight decay, as torch.optim.SGD; and by name what its numbers can make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from psjob.rules import arrays
from psjob.rules.arrays import Array
from psjob.rules.base import BaseRule, BlockState, Numbers, Range, decayed, pieces


class SGD(BaseRule):
    """Weights follow the gradient, or its running sum where momentum is not 0."""

    name = "sgd"
    slots: tuple[str, ...] = ("momentum_buffer",)
    numbers: Mapping[str, float | bool] = {
        "lr": 1e-3,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "maximize": False,
    }
    fixed: Mapping[str, float | bool] = {}

    def apply(
        self,
        state: BlockState,
        grad: Array,
        numbers: Numbers,
        ranges: Sequence[Range] | None = None,
        lag: int | None = None,
        worker: int | None = None,
    ) -> None:
        """One step. Counts are of updates *with momentum*: at the first of them the buffer becomes the gradient, undampened."""
        if self.fixed:
            numbers = {**self.fixed, **numbers}
        if not numbers["momentum"]:
            state.steps += 1
            for weights, part in pieces(ranges, state.weights, grad):
                _step(weights, part, [], numbers, False)
            return
        buffer = state.slot("momentum_buffer")
        for at, count in state.advance(ranges):
            _step(state.weights[at], grad[at], [buffer[at]], numbers, count == 1)


class Plain(SGD):
    """weights -= lr g."""

    name = "plain"
    slots = ()
    numbers: Mapping[str, float | bool] = {"lr": 1e-3, "weight_decay": 0.0}
    fixed = SGD.numbers


class HeavyBall(SGD):
    """v = momentum v + g; weights -= lr v (Polyak 1964)."""

    name = "heavy-ball"
    numbers: Mapping[str, float | bool] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0}
    fixed = SGD.numbers


class Nag(HeavyBall):
    """v = momentum v + g; weights -= lr (g + momentum v): Nesterov's gradient, at weights that have already looked ahead."""

    name = "nag"
    fixed: Mapping[str, float | bool] = {**SGD.numbers, "nesterov": True}


def _step(weights: Array, grad: Array, buffers: list[Array], numbers: Numbers, first: bool) -> None:
    if not isinstance(weights, torch.Tensor):
        _step_unfused(weights, grad, buffers, numbers, first)
        return
    torch._fused_sgd_(
        [weights],
        [grad],
        buffers,
        weight_decay=float(numbers["weight_decay"]),
        momentum=float(numbers["momentum"]),
        lr=float(numbers["lr"]),
        dampening=float(numbers["dampening"]),
        nesterov=bool(numbers["nesterov"]),
        maximize=bool(numbers["maximize"]),
        is_first_step=first,
    )


def _step_unfused(weights: Array, grad: Array, buffers: list[Array], numbers: Numbers, first: bool) -> None:
    """The same where torch's kernel cannot be had."""
    momentum = float(numbers["momentum"])
    step = decayed(-grad if numbers["maximize"] else grad, weights, numbers)
    for buffer in buffers:
        if first:
            arrays.put(buffer, step)
        else:
            buffer *= momentum
            arrays.add_scaled(buffer, step, 1 - float(numbers["dampening"]))
        step = arrays.added(step, buffer, momentum) if numbers["nesterov"] else buffer
    arrays.add_scaled(weights, step, -float(numbers["lr"]))
