"""SGD on the rows that are touched, as torch.optim.SGD without momentum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch import Tensor

from psjob.rules.base import Hyperparameters
from psjob.tables.rules.base import BaseRowRule, Planes, add_rows, decay, parts


class RowSGD(BaseRowRule):
    """w -= lr (g + weight_decay w)."""

    name = "sgd"
    planes: Final[Mapping[str, bool]] = {}
    hyperparameters: Final[Mapping[str, float | bool]] = {"lr": 1e-3, "weight_decay": 0.0}

    def apply(self, weights: Tensor, state: Planes, slots: Tensor, grads: Tensor, hyperparameters: Hyperparameters) -> None:
        """One step of the rows."""
        for at, grad in parts(slots, grads):
            decay(weights, at, grad, hyperparameters)
            add_rows(weights, at, grad.mul_(-float(hyperparameters["lr"])))
