"""FTRL-proximal by coordinate: sparse weights from the first regulariser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from psjob.rules.base import Numbers
from psjob.tables.rules.base import Planes, parts, put_rows


class Ftrl:
    """Algorithm 1 of McMahan et al., Ad Click Prediction: a View from the Trenches, KDD 2013; alpha is `lr`.

    s = (sqrt(n + g²) - sqrt(n)) / lr; z += g - s w; n += g²; w = 0 where |z| <= l1, else -(z - sign(z) l1) / ((beta + sqrt(n)) / lr + l2).
    A row whose initial values are not zero begins with the z at which the formula gives them.
    """

    name = "ftrl"
    planes: Final[Mapping[str, bool]] = {"z": True, "n": True}
    numbers: Final[Mapping[str, float | bool]] = {"lr": 1e-2, "beta": 1.0, "l1": 0.0, "l2": 0.0}

    def begin(self, weights: torch.Tensor, numbers: Numbers) -> dict[str, torch.Tensor | float]:
        """z of the initial weights."""
        strength = float(numbers["beta"]) / float(numbers["lr"]) + float(numbers["l2"])
        return {"z": weights.mul(-strength).sub_(weights.sign().mul_(float(numbers["l1"])))}

    def apply(self, weights: torch.Tensor, state: Planes, slots: torch.Tensor, grads: torch.Tensor, numbers: Numbers) -> None:
        """One step of the rows."""
        lr, beta, l1, l2 = (float(numbers[name]) for name in ("lr", "beta", "l1", "l2"))
        for at, grad in parts(slots, grads):
            before = state["n"].index_select(0, at)
            total = before.addcmul(grad, grad)
            root = total.sqrt()
            z = state["z"].index_select(0, at).add_(grad)
            z.sub_(before.sqrt_().neg_().add_(root).div_(lr).mul_(weights.index_select(0, at)))
            put_rows(state["n"], at, total)
            put_rows(state["z"], at, z)
            put_rows(weights, at, torch.nn.functional.softshrink(z, l1).div_(root.add_(beta).div_(-lr).sub_(l2)))
