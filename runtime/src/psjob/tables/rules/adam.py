"""Lazy Adam: moments of a row move only when it is touched, and each row counts its own steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch import Tensor

from psjob.rules.base import Hyperparameters
from psjob.tables.rules.base import BaseRowRule, Planes, add_rows, decay, parts, put_rows


class RowAdam(BaseRowRule):
    """As torch.optim.SparseAdam, with the row's own count t in its bias corrections (Kingma, Ba, arXiv 1412.6980).

    m += (1 - beta1)(g - m); v += (1 - beta2)(g² - v); w -= lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + eps).
    """

    name = "adam"
    planes: Final[Mapping[str, bool]] = {"exp_avg": True, "exp_avg_sq": True, "step": False}
    hyperparameters: Final[Mapping[str, float | bool]] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}

    def apply(self, weights: Tensor, state: Planes, slots: Tensor, grads: Tensor, hyperparameters: Hyperparameters) -> None:
        """One step of the rows."""
        lr, beta1, beta2, eps = (float(hyperparameters[name]) for name in ("lr", "beta1", "beta2", "eps"))
        for at, grad in parts(slots, grads):
            decay(weights, at, grad, hyperparameters)
            count = state["step"].index_select(0, at).add_(1.0)
            state["step"].index_copy_(0, at, count)
            first = state["exp_avg"].index_select(0, at).lerp_(grad, 1 - beta1)
            put_rows(state["exp_avg"], at, first)
            second = state["exp_avg_sq"].index_select(0, at).lerp_(grad.square_(), 1 - beta2)
            put_rows(state["exp_avg_sq"], at, second)
            steps = count.double()
            scale = (1 - beta2**steps).sqrt_().div_(1 - beta1**steps).mul_(-lr).float()
            add_rows(weights, at, first.div_(second.sqrt_().add_(eps)).mul_(scale[:, None]))
