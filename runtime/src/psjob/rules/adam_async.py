"""Adam for pushes that come one by one: its averages reach back as many rounds as they would over means of all workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from psjob.rules.adam import Adam
from psjob.rules.arrays import Array
from psjob.rules.base import BlockState, Hyperparameters, Range


class AsyncAdam(Adam):
    """Adam with beta1^(1/m) and beta2^(1/m), where m is `workers`.

    A round of m pushes makes m updates. With betas to the power 1/m it fades the past by beta1 and beta2 as one update by their mean
    would. The bias correction 1 - beta^(updates/m) counts rounds. This is the rule rho^kappa for a batch kappa times as large, of
    Busbridge et al. 2023, arXiv 2307.13813. Weight decay is added to the gradient.
    """

    name = "adam-async"
    hyperparameters: Mapping[str, float | bool] = {**Adam.hyperparameters, "workers": 1.0}

    def apply(
        self,
        state: BlockState,
        grad: Array,
        hyperparameters: Hyperparameters,
        ranges: Sequence[Range] | None = None,
        lag: int | None = None,
        worker: int | None = None,
    ) -> None:
        """One step."""
        workers = float(hyperparameters["workers"])
        betas = {name: float(hyperparameters[name]) ** (1 / workers) for name in ("beta1", "beta2")}
        super().apply(state, grad, {**hyperparameters, **betas}, ranges, lag, worker)
