"""DANA-Slim: the worker keeps its momentum and looks ahead, the shard takes plain steps (Hakimi et al. 2019, arXiv 1907.11612)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from psjob.rules import arrays
from psjob.rules.arrays import Array
from psjob.rules.base import BlockState, Hyperparameters, Range, decayed, pieces
from psjob.rules.sgd import Plain


class DanaSlim(Plain):
    """The worker: v = momentum v + g, and it pushes u = momentum v + g. The shard: weights -= lr u.

    The weights are those that DANA-Zero would reply, as long as lr stands still.
    """

    name = "dana-slim"
    worker_slots = ("v",)
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
        """One plain step: momentum and decay are in what the worker pushed."""
        super().apply(state, grad, {"lr": hyperparameters["lr"]}, ranges, lag, worker)

    def outgoing(self, state: BlockState, grad: Array, hyperparameters: Hyperparameters, ranges: Sequence[Range] | None = None) -> Array:
        """u: where the worker's momentum will be after one more gradient like this one."""
        momentum = float(hyperparameters["momentum"])
        out = arrays.full_like(grad, 0.0)
        for weights, part, v, u in pieces(ranges, state.weights, grad, state.slot("v"), out):
            step = decayed(part, weights, hyperparameters)
            v *= momentum
            v += step
            arrays.put(u, step)
            arrays.add_scaled(u, v, momentum)
        return out
