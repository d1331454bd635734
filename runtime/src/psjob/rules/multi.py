"""Multi-momentum: one momentum a worker over shared weights (Multi-ASGD of Hakimi et al. 2019, arXiv 1907.11612)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from psjob.rules import arrays
from psjob.rules.arrays import Array
from psjob.rules.base import BaseRule, BlockState, Hyperparameters, Range, decayed, of_worker, one_worker, pieces


class MultiMomentum(BaseRule):
    """v_i = momentum v_i + g; weights -= lr v_i; the reply is weights - lr momentum v_i: Nesterov's, blind to the other workers."""

    name = "multi-momentum"
    per_worker = ("v",)
    hyperparameters: Mapping[str, float | bool] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0}

    def apply(
        self,
        state: BlockState,
        grad: Array,
        hyperparameters: Hyperparameters,
        ranges: Sequence[Range] | None = None,
        lag: int | None = None,
        worker: int | None = None,
    ) -> None:
        """One step of the momentum of `worker`."""
        own = state.slot(of_worker("v", one_worker(self, worker)))
        state.steps += 1
        for weights, part, v in pieces(ranges, state.weights, grad, own):
            step = decayed(part, weights, hyperparameters)
            v *= float(hyperparameters["momentum"])
            v += step
            arrays.add_scaled(weights, v, -float(hyperparameters["lr"]))

    def reply(self, state: BlockState, hyperparameters: Hyperparameters, worker: int) -> Array:
        """Where this worker's own momentum will take the weights."""
        own = state.slot(of_worker("v", worker))
        return arrays.added(state.weights, own, -float(hyperparameters["lr"]) * float(hyperparameters["momentum"]))
