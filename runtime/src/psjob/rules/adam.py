"""Adam and AdamW, as torch.optim's: they differ in where weight decay acts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from psjob.rules.arrays import Array
from psjob.rules.base import BaseRule, BlockState, Hyperparameters, Range


class Adam(BaseRule):
    """Steps scaled by running moments of the gradient; weight decay is added to the gradient."""

    name = "adam"
    on_torch = True
    slots = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    hyperparameters: Mapping[str, float | bool] = {
        "lr": 1e-3,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "amsgrad": False,
        "maximize": False,
    }
    _kernel = "_fused_adam_"

    def apply(
        self,
        state: BlockState,
        grad: Array,
        hyperparameters: Hyperparameters,
        ranges: Sequence[Range] | None = None,
        lag: int | None = None,
        worker: int | None = None,
    ) -> None:
        """One step; each stretch of equal count has its own bias correction."""
        kernel = getattr(torch, self._kernel)
        first, second = state.slot("exp_avg"), state.slot("exp_avg_sq")
        largest = state.slot("max_exp_avg_sq") if hyperparameters["amsgrad"] else None
        for part, count in state.advance(ranges):
            kernel(
                [state.weights[part]],
                [grad[part]],
                [first[part]],
                [second[part]],
                [] if largest is None else [largest[part]],
                [torch.tensor(float(count), dtype=torch.float32, device="cpu")],
                lr=float(hyperparameters["lr"]),
                beta1=float(hyperparameters["beta1"]),
                beta2=float(hyperparameters["beta2"]),
                weight_decay=float(hyperparameters["weight_decay"]),
                eps=float(hyperparameters["eps"]),
                amsgrad=bool(hyperparameters["amsgrad"]),
                maximize=bool(hyperparameters["maximize"]),
            )


class AdamW(Adam):
    """Adam whose weight decay shrinks the weights themselves."""

    name = "adamw"
    hyperparameters: Mapping[str, float | bool] = {**Adam.hyperparameters, "weight_decay": 1e-2}
    _kernel = "_fused_adamw_"
