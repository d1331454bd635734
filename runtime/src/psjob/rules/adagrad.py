"""Adagrad, as torch.optim's, and FTRL-proximal by coordinate: sparse weights from the first regulariser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from psjob.rules import arrays
from psjob.rules.arrays import Array
from psjob.rules.base import BaseRule, BlockState, Hyperparameters, UpdateFacts, range_views


class Adagrad(BaseRule):
    """Steps scaled by the sum of squared gradients so far."""

    name = "adagrad"
    on_torch = True
    slots = ("sum",)
    hyperparameters: Final[Mapping[str, float | bool]] = {
        "lr": 1e-2,
        "lr_decay": 0.0,
        "weight_decay": 0.0,
        "eps": 1e-10,
        "initial_accumulator_value": 0.0,
        "maximize": False,
    }

    def apply(self, state: BlockState, grad: Array, hyperparameters: Hyperparameters, facts: UpdateFacts = UpdateFacts()) -> None:
        """One step; the learning rate falls with the count where lr_decay is not 0."""
        total = state.slot("sum", float(hyperparameters["initial_accumulator_value"]))
        for part, count in state.advance(facts.ranges):
            torch._fused_adagrad_(
                [state.weights[part]],
                [grad[part]],
                [total[part]],
                [torch.tensor(float(count), dtype=torch.float32, device="cpu")],
                lr=float(hyperparameters["lr"]),
                lr_decay=float(hyperparameters["lr_decay"]),
                weight_decay=float(hyperparameters["weight_decay"]),
                eps=float(hyperparameters["eps"]),
                maximize=bool(hyperparameters["maximize"]),
            )


class Ftrl(BaseRule):
    """Algorithm 1 of McMahan et al., Ad Click Prediction: a View from the Trenches, KDD 2013; alpha is `lr`.

    n += g²; d = (beta + sqrt(n)) / lr + l2; z = g - d w + (z, pulled to within ±l1); w = 0 where |z| <= l1, else -(z - sign(z) l1) / d.
    With one lr that is the paper's z += g - s w, s = (sqrt(n + g²) - sqrt(n)) / lr. Written so, z follows from the weights that there are.
    Those that training begins with stay, and so do all when lr, beta or l2 become others, by a scheduler or in a run that continues.
    """

    name = "ftrl"
    slots = ("z", "n")
    hyperparameters: Mapping[str, float | bool] = {"lr": 1e-2, "beta": 1.0, "l1": 0.0, "l2": 0.0}

    def apply(self, state: BlockState, grad: Array, hyperparameters: Hyperparameters, facts: UpdateFacts = UpdateFacts()) -> None:
        """One step."""
        if not state.slots:
            arrays.put(state.slot("z"), ftrl_first(state.weights, hyperparameters))
        state.steps += 1
        for weights, g, z, n in range_views(facts.ranges, state.weights, grad, state.slots["z"], state.slot("n")):
            ftrl_step(weights, g, z, n, hyperparameters)


def ftrl_first(weights: Array, hyperparameters: Hyperparameters) -> Array:
    """What z keeps of weights that no update has changed."""
    return arrays.sign(weights) * -float(hyperparameters["l1"])


def ftrl_step(weights: Array, grad: Array, z: Array, n: Array, hyperparameters: Hyperparameters) -> None:
    """One update, in place."""
    lr, beta, l1, l2 = (float(hyperparameters[name]) for name in ("lr", "beta", "l1", "l2"))
    arrays.add_product(n, grad, grad)
    down = arrays.sqrt(n)
    down += beta
    down /= -lr
    down -= l2
    arrays.clip(z, l1)
    arrays.add_product(z, weights, down)
    z += grad
    arrays.put(weights, arrays.shrunk(z, l1))
    weights /= down
