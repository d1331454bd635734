"""Adagrad on the rows that are touched, as torch.optim.Adagrad of sparse gradients.

Row-wise Adagrad keeps one sum per row. It is the default of recommenders, since its state is one number in place of a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from psjob.rules.base import Hyperparameters
from psjob.tables.rules.base import Planes, add_rows, decay, parts, put_rows


class RowAdagrad:
    """G += g²; w -= lr g / (sqrt(G) + eps), by element (Duchi, Hazan, Singer, JMLR 12, 2011)."""

    name = "adagrad"
    planes: Mapping[str, bool] = {"sum": True}
    hyperparameters: Mapping[str, float | bool] = {"lr": 1e-2, "weight_decay": 0.0, "eps": 1e-10, "initial_accumulator_value": 0.0}

    def begin(self, weights: Tensor, hyperparameters: Hyperparameters) -> dict[str, Tensor | float]:
        """The sum begins at `initial_accumulator_value`."""
        return {"sum": float(hyperparameters["initial_accumulator_value"])}

    def apply(self, weights: Tensor, state: Planes, slots: Tensor, grads: Tensor, hyperparameters: Hyperparameters) -> None:
        """One step of the rows."""
        for at, grad in parts(slots, grads):
            decay(weights, at, grad, hyperparameters)
            total = state["sum"].index_select(0, at).addcmul_(grad, grad)
            put_rows(state["sum"], at, total)
            add_rows(weights, at, grad.div_(total.sqrt_().add_(float(hyperparameters["eps"]))).mul_(-float(hyperparameters["lr"])))


class RowWiseAdagrad(RowAdagrad):
    """G += mean(g²) over the row; w -= lr g / (sqrt(G) + eps) (FBGEMM's EXACT_ROWWISE_ADAGRAD; Naumov et al., DLRM, arXiv 1906.00091)."""

    name = "rowwise_adagrad"
    planes = {"sum": False}
    hyperparameters = {**RowAdagrad.hyperparameters, "eps": 1e-8}

    def apply(self, weights: Tensor, state: Planes, slots: Tensor, grads: Tensor, hyperparameters: Hyperparameters) -> None:
        """One step of the rows."""
        for at, grad in parts(slots, grads):
            decay(weights, at, grad, hyperparameters)
            mean = torch.linalg.vector_norm(grad, dim=1).square_().div_(grad.shape[1])
            total = state["sum"].index_select(0, at).add_(mean)
            state["sum"].index_copy_(0, at, total)
            scale = total.sqrt_().add_(float(hyperparameters["eps"])).reciprocal_().mul_(-float(hyperparameters["lr"]))
            add_rows(weights, at, grad.mul_(scale[:, None]))
