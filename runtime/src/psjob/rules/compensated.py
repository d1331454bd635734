"""Delay compensation: a gradient corrected, to first order, for how far the weights have moved (Zheng et al. 2017, arXiv 1609.08326)."""

from __future__ import annotations

from collections.abc import Sequence

from psjob.rules import arrays
from psjob.rules.arrays import Array
from psjob.rules.base import BlockState, Hyperparameters, Range, Rule, known_lag, of_worker, one_worker, pieces
from psjob.rules.noted import Noted


class DelayCompensated(Noted):
    """g += strength g² (weights - sent), element by element, then the inner rule; g² stands for the curvature.

    `adaptive` (DC-ASGD-a): strength = lam / sqrt(mean square of this worker's gradients + 1e-7), a running mean with `decay`;
    else (DC-ASGD-c) strength = lam. Weight decay is the inner rule's and is not compensated.
    """

    def __init__(self, name: str, inner: Rule, adaptive: bool) -> None:
        super().__init__(name, inner, {"lam": 2.0, "decay": 0.95, "adaptive": adaptive}, (), ("mean_square",))

    def apply(
        self,
        state: BlockState,
        grad: Array,
        hyperparameters: Hyperparameters,
        ranges: Sequence[Range] | None = None,
        lag: int | None = None,
        worker: int | None = None,
    ) -> None:
        """One step of the inner rule by the corrected gradient."""
        known_lag(self, lag)
        rank = one_worker(self, worker)
        sent, corrected = self.sent(state, rank), arrays.copy(grad)
        lam, decay = float(hyperparameters["lam"]), float(hyperparameters["decay"])
        mean_square = state.slot(of_worker("mean_square", rank)) if hyperparameters["adaptive"] else sent
        for weights, at, mean, part in pieces(ranges, state.weights, sent, mean_square, corrected):
            compensate(part, weights - at, lam, (mean, decay) if hyperparameters["adaptive"] else None)
        self.inner.apply(state, corrected, hyperparameters, ranges, lag, worker)


def compensate(grad: Array, drift: Array, lam: float, adaptive: tuple[Array, float] | None) -> None:
    """grad += strength grad² drift, in place.

    Args:
        grad: computed on older weights.
        drift: by how much the weights have moved since, of the same shape; it is overwritten.
        lam: of DelayCompensated, as what follows.
        adaptive: the running mean of squares, which becomes that with this gradient, and its decay; None: strength is lam.
    """
    drift *= grad
    if adaptive is not None:
        mean, decay = adaptive
        mean *= decay
        arrays.add_product(mean, grad, grad, 1 - decay)
        drift /= arrays.sqrt(mean + 1e-7)
    arrays.add_product(grad, grad, drift, lam)
