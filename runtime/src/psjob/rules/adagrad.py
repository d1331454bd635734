"""Adagrad, as torch.optim's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from psjob.rules.arrays import Array
from psjob.rules.base import BaseRule, BlockState, Hyperparameters, Range


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

    def apply(
        self,
        state: BlockState,
        grad: Array,
        hyperparameters: Hyperparameters,
        ranges: Sequence[Range] | None = None,
        lag: int | None = None,
        worker: int | None = None,
    ) -> None:
        """One step; the learning rate falls with the count where lr_decay is not 0."""
        total = state.slot("sum", float(hyperparameters["initial_accumulator_value"]))
        for part, count in state.advance(ranges):
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
