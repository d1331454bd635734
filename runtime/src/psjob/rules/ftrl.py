"""FTRL-proximal by coordinate: sparse weights from the first regulariser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from psjob.rules import arrays
from psjob.rules.arrays import Array
from psjob.rules.base import BaseRule, BlockState, Numbers, Range, pieces


class Ftrl(BaseRule):
    """Algorithm 1 of McMahan et al., Ad Click Prediction: a View from the Trenches, KDD 2013; alpha is `lr`.

    s = (sqrt(n + g²) - sqrt(n)) / lr; z += g - s w; n += g²; w = 0 where |z| <= l1, else -(z - sign(z) l1) / ((beta + sqrt(n)) / lr + l2).
    Weights that are not zero begin with the z at which the formula gives them.
    """

    name = "ftrl"
    slots = ("z", "n")
    numbers: Mapping[str, float | bool] = {"lr": 1e-2, "beta": 1.0, "l1": 0.0, "l2": 0.0}

    def apply(
        self,
        state: BlockState,
        grad: Array,
        numbers: Numbers,
        ranges: Sequence[Range] | None = None,
        lag: int | None = None,
        worker: int | None = None,
    ) -> None:
        """One step."""
        if not state.slots:
            state.slots["z"] = first(state.weights, numbers)
        state.steps += 1
        for weights, g, z, n in pieces(ranges, state.weights, grad, state.slots["z"], state.slot("n")):
            step(weights, g, z, n, numbers)


def first(weights: Array, numbers: Numbers) -> Array:
    """z of weights that no update has changed."""
    strength = float(numbers["beta"]) / float(numbers["lr"]) + float(numbers["l2"])
    z = weights * -strength
    arrays.add_scaled(z, arrays.sign(weights), -float(numbers["l1"]))
    return z


def step(weights: Array, grad: Array, z: Array, n: Array, numbers: Numbers) -> None:
    """One update, in place."""
    lr, beta, l1, l2 = (float(numbers[name]) for name in ("lr", "beta", "l1", "l2"))
    before = arrays.sqrt(n)
    arrays.add_product(n, grad, grad)
    root = arrays.sqrt(n)
    before -= root
    before /= -lr
    before *= weights
    z += grad
    z -= before
    root += beta
    root /= -lr
    root -= l2
    arrays.put(weights, arrays.shrunk(z, l1))
    weights /= root
