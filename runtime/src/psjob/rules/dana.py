"""Rules with one momentum per worker over shared weights.

- `MultiMomentum`: Multi-ASGD (Hakimi et al. 2019, arXiv 1907.11612).
- `DanaZero`: workers are sent where all momenta will have taken the weights (the same paper).
- `DanaSlim`: the worker keeps its momentum and looks ahead, the shard takes plain steps (the same paper).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from psjob.rules import arrays
from psjob.rules.arrays import Array
from psjob.rules.base import BaseRule, BlockState, Hyperparameters, Range, UpdateFacts, decayed, of_worker, one_worker, range_views
from psjob.rules.sgd import Plain


class MultiMomentum(BaseRule):
    """v_i = momentum v_i + g; weights -= lr v_i; the reply is weights - lr momentum v_i: Nesterov's, blind to the other workers."""

    name = "multi-momentum"
    per_worker = ("v",)
    hyperparameters: Mapping[str, float | bool] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0}

    def apply(self, state: BlockState, grad: Array, hyperparameters: Hyperparameters, facts: UpdateFacts = UpdateFacts()) -> None:
        """One step of the momentum of `worker`."""
        own = state.slot(of_worker("v", one_worker(self, facts.worker)))
        state.steps += 1
        for weights, part, v in range_views(facts.ranges, state.weights, grad, own):
            step = decayed(part, weights, hyperparameters)
            v *= float(hyperparameters["momentum"])
            v += step
            arrays.add_scaled(weights, v, -float(hyperparameters["lr"]))

    def reply(self, state: BlockState, hyperparameters: Hyperparameters, worker: int) -> Array:
        """Where this worker's own momentum will take the weights."""
        own = state.slot(of_worker("v", worker))
        return arrays.added(state.weights, own, -float(hyperparameters["lr"]) * float(hyperparameters["momentum"]))


class DanaZero(BaseRule):
    """v_i = momentum v_i + g; weights -= lr v_i; the reply is weights - lr momentum S, where S is the sum of all v_j.

    S is kept up to date (O(k) a push, whatever the number of workers).
    """

    name = "dana-zero"
    slots = ("sum",)
    per_worker = ("v",)
    hyperparameters: Mapping[str, float | bool] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0}

    def apply(self, state: BlockState, grad: Array, hyperparameters: Hyperparameters, facts: UpdateFacts = UpdateFacts()) -> None:
        """One step of the momentum of `worker`."""
        own = state.slot(of_worker("v", one_worker(self, facts.worker)))
        momentum = float(hyperparameters["momentum"])
        state.steps += 1
        for weights, part, v, total in range_views(facts.ranges, state.weights, grad, own, state.slot("sum")):
            step = decayed(part, weights, hyperparameters)
            arrays.add_scaled(total, v, momentum - 1)
            total += step
            v *= momentum
            v += step
            arrays.add_scaled(weights, v, -float(hyperparameters["lr"]))

    def reply(self, state: BlockState, hyperparameters: Hyperparameters, worker: int) -> Array:
        """Where the weights will be when every worker's momentum has been applied once more."""
        return arrays.added(state.weights, state.slot("sum"), -float(hyperparameters["lr"]) * float(hyperparameters["momentum"]))

    def forget(self, state: BlockState, worker: int) -> None:
        """The sum is without this worker's momentum."""
        own = state.slots.pop(of_worker("v", worker), None)
        if own is not None:
            total = state.slot("sum")
            total -= own


class DanaSlim(Plain):
    """The worker: v = momentum v + g, and it pushes u = momentum v + g. The shard: weights -= lr u.

    The weights are those that DANA-Zero would reply, as long as lr stands still.
    """

    name = "dana-slim"
    worker_slots = ("v",)
    hyperparameters: Mapping[str, float | bool] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0}

    def apply(self, state: BlockState, grad: Array, hyperparameters: Hyperparameters, facts: UpdateFacts = UpdateFacts()) -> None:
        """One plain step: momentum and decay are in what the worker pushed."""
        super().apply(state, grad, {"lr": hyperparameters["lr"]}, facts)

    def outgoing(self, state: BlockState, grad: Array, hyperparameters: Hyperparameters, ranges: Sequence[Range] | None = None) -> Array:
        """u: where the worker's momentum will be after one more gradient like this one."""
        momentum = float(hyperparameters["momentum"])
        out = arrays.full_like(grad, 0.0)
        for weights, part, v, u in range_views(ranges, state.weights, grad, state.slot("v"), out):
            step = decayed(part, weights, hyperparameters)
            v *= momentum
            v += step
            arrays.put(u, step)
            arrays.add_scaled(u, v, momentum)
        return out
