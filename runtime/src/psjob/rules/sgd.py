"""SGD with momentum, dampening, Nesterov and weight decay, as torch.optim.SGD; and names for its special cases."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from psjob.rules import arrays
from psjob.rules.arrays import Array
from psjob.rules.base import BaseRule, BlockState, Hyperparameters, UpdateFacts, decayed, range_views


class SGD(BaseRule):
    """Weights follow the gradient, or its running sum where momentum is not 0."""

    name = "sgd"
    slots: tuple[str, ...] = ("momentum_buffer",)
    hyperparameters: Mapping[str, float | bool] = {
        "lr": 1e-3,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "maximize": False,
    }
    fixed: Mapping[str, float | bool] = {}

    def apply(self, state: BlockState, grad: Array, hyperparameters: Hyperparameters, facts: UpdateFacts = UpdateFacts()) -> None:
        """One step. Counts are of updates *with momentum*: at the first of them the buffer becomes the gradient, undampened."""
        if self.fixed:
            hyperparameters = {**self.fixed, **hyperparameters}
        if not hyperparameters["momentum"]:
            state.steps += 1
            for weights, part in range_views(facts.ranges, state.weights, grad):
                _step(weights, part, [], hyperparameters, False)
            return
        buffer = state.slot("momentum_buffer")
        for at, count in state.advance(facts.ranges):
            _step(state.weights[at], grad[at], [buffer[at]], hyperparameters, count == 1)


class Plain(SGD):
    """weights -= lr g."""

    name = "plain"
    slots = ()
    hyperparameters: Mapping[str, float | bool] = {"lr": 1e-3, "weight_decay": 0.0}
    fixed = SGD.hyperparameters


class HeavyBall(SGD):
    """v = momentum v + g; weights -= lr v (Polyak 1964)."""

    name = "heavy-ball"
    hyperparameters: Mapping[str, float | bool] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0}
    fixed = SGD.hyperparameters


class Nag(HeavyBall):
    """v = momentum v + g; weights -= lr (g + momentum v): Nesterov's gradient, at weights that have already looked ahead."""

    name = "nag"
    fixed: Mapping[str, float | bool] = {**SGD.hyperparameters, "nesterov": True}


def _step(weights: Array, grad: Array, buffers: list[Array], hyperparameters: Hyperparameters, first: bool) -> None:
    if not isinstance(weights, torch.Tensor):
        _step_unfused(weights, grad, buffers, hyperparameters, first)
        return
    torch._fused_sgd_(
        [weights],
        [grad],
        buffers,
        weight_decay=float(hyperparameters["weight_decay"]),
        momentum=float(hyperparameters["momentum"]),
        lr=float(hyperparameters["lr"]),
        dampening=float(hyperparameters["dampening"]),
        nesterov=bool(hyperparameters["nesterov"]),
        maximize=bool(hyperparameters["maximize"]),
        is_first_step=first,
    )


def _step_unfused(weights: Array, grad: Array, buffers: list[Array], hyperparameters: Hyperparameters, first: bool) -> None:
    """The same where torch's kernel cannot be had."""
    momentum = float(hyperparameters["momentum"])
    step = decayed(-grad if hyperparameters["maximize"] else grad, weights, hyperparameters)
    for buffer in buffers:
        if first:
            arrays.put(buffer, step)
        else:
            buffer *= momentum
            arrays.add_scaled(buffer, step, 1 - float(hyperparameters["dampening"]))
        step = arrays.added(step, buffer, momentum) if hyperparameters["nesterov"] else buffer
    arrays.add_scaled(weights, step, -float(hyperparameters["lr"]))
