"""FTRL-proximal by coordinate, for rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch import Tensor

from psjob.rules.adagrad import Ftrl, ftrl_first, ftrl_step
from psjob.rules.base import Hyperparameters
from psjob.tables.rules.base import Planes, parts, put_rows


class RowFtrl:
    """The formula of `psjob.rules.adagrad`, a row's state beside it."""

    name = "ftrl"
    planes: Final[Mapping[str, bool]] = {"z": True, "n": True}
    hyperparameters: Final[Mapping[str, float | bool]] = Ftrl.hyperparameters

    def begin(self, weights: Tensor, hyperparameters: Hyperparameters) -> dict[str, Tensor | float]:
        """z of the initial weights."""
        return {"z": ftrl_first(weights, hyperparameters)}

    def apply(self, weights: Tensor, state: Planes, slots: Tensor, grads: Tensor, hyperparameters: Hyperparameters) -> None:
        """One step of the rows."""
        planes = (weights, state["z"], state["n"])
        for at, grad in parts(slots, grads):
            rows = [plane.index_select(0, at) for plane in planes]
            ftrl_step(rows[0], grad, rows[1], rows[2], hyperparameters)
            for plane, changed in zip(planes, rows, strict=True):
                put_rows(plane, at, changed)
