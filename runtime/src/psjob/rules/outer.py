"""Outer optimizers of local SGD: what is pushed is not a gradient but d = weights before - weights after a worker's own steps."""

from __future__ import annotations

from collections.abc import Mapping

from psjob.rules import arrays
from psjob.rules.arrays import Array
from psjob.rules.base import BaseRule, BlockState, Hyperparameters, UpdateFacts, decayed
from psjob.rules.sgd import Nag


class OuterNesterov(Nag):
    """v = momentum v + d; weights -= lr (d + momentum v), d the mean over workers (DiLoCo: Douillard et al. 2023, arXiv 2311.08105)."""

    name = "outer-nesterov"
    hyperparameters: Mapping[str, float | bool] = {"lr": 0.7, "momentum": 0.9}


class DelayedNesterov(BaseRule):
    """For pushes d that come one by one (Liu et al. 2024, arXiv 2401.09135, algorithm 3). With N = `every`, and d += weight_decay weights:

    each push: p += d; weights -= lr d / N; every N-th also: v = momentum v + p / N, p = 0, weights -= lr momentum v.
    So N pushes move the weights as one push of their mean would with Nesterov's momentum. `activation` (c, from 0 to 1/N) gives a share of
    the momentum to each push: weights -= lr c momentum v, and 1 - c (N - 1) of it to the N-th.
    """

    name = "delayed-nesterov"
    slots = ("momentum_buffer", "pending")
    hyperparameters: Mapping[str, float | bool] = {"lr": 0.7, "momentum": 0.9, "weight_decay": 0.0, "every": 4.0, "activation": 0.0}

    def apply(self, state: BlockState, grad: Array, hyperparameters: Hyperparameters, facts: UpdateFacts = UpdateFacts()) -> None:
        """One push. Each tensor counts to N by its own updates."""
        every, momentum, lr = int(hyperparameters["every"]), float(hyperparameters["momentum"]), float(hyperparameters["lr"])
        early = float(hyperparameters["activation"])
        whole = (state.weights, grad, state.slot("momentum_buffer"), state.slot("pending"))
        for at, count in state.advance(facts.ranges):
            weights, g, v, pending = (one[at] for one in whole)
            full = count % every == 0
            part = 1 - early * (every - 1) if full else early
            d = decayed(g, weights, hyperparameters)
            pending += d
            if full:
                v *= momentum
                arrays.add_scaled(v, pending, 1 / every)
                pending *= 0
            arrays.add_scaled(weights, d, -lr / every)
            if part:
                arrays.add_scaled(weights, v, -lr * part * momentum)
