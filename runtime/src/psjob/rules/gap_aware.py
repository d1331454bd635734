"""Gap-Aware: a gradient counts the less, the further the weights have moved since (Barkai et al. 2020, arXiv 1909.10802)."""

from __future__ import annotations

from collections.abc import Sequence

from psjob.rules import arrays
from psjob.rules.arrays import Array
from psjob.rules.base import BlockState, Hyperparameters, Range, Rule, decayed, known_lag, of_worker, one_worker, pieces
from psjob.rules.noted import Noted


class GapAware(Noted):
    """g /= 1 + |weights - sent| / C, element by element, then the inner rule. C = max_lr (sqrt(m) + 1e-8) is the usual step of an element.

    m is the running mean, with `average`, of the squared momentum, free of its bias. Weight decay is part of the gradient, so it is
    divided too. `max_lr`: the highest learning rate of the schedule; 0: that of the push.
    """

    def __init__(self, name: str, inner: Rule, momentum: str) -> None:
        super().__init__(name, inner, {"average": 0.999, "max_lr": 0.0}, ("mean_square",), ())
        self.momentum = momentum

    def apply(
        self,
        state: BlockState,
        grad: Array,
        hyperparameters: Hyperparameters,
        ranges: Sequence[Range] | None = None,
        lag: int | None = None,
        worker: int | None = None,
    ) -> None:
        """One step of the inner rule by the divided gradient."""
        known_lag(self, lag)
        rank = one_worker(self, worker)
        sent, mean_square = self.sent(state, rank), state.slot("mean_square")
        average = float(hyperparameters["average"])
        lr = float(hyperparameters["max_lr"]) or float(hyperparameters["lr"])
        divided = decayed(grad, state.weights, hyperparameters)
        if lr and state.steps:
            divided = arrays.copy(grad) if divided is grad else divided
            for weights, at, mean, part in pieces(ranges, state.weights, sent, mean_square, divided):
                divide_by_gap(part, weights - at, mean, average, state.steps, lr)
        self.inner.apply(state, divided, {**hyperparameters, "weight_decay": 0.0}, ranges, lag, worker)
        name = self.momentum if self.momentum in self.inner.slots else of_worker(self.momentum, rank)
        step = state.slots[name] if hyperparameters["momentum"] else divided
        for v, mean in pieces(ranges, step, mean_square):
            follow(mean, v, average)


def divide_by_gap(grad: Array, drift: Array, mean_square: Array, average: float, steps: int, lr: float) -> None:
    """grad /= 1 + |drift| / C, in place.

    Args:
        grad: computed on older weights.
        drift: by how much the weights have moved since, of the same shape.
        mean_square: m of GapAware, of that many steps, and with `average`; 1 step or more.
        average: of it.
        steps: as above.
        lr: learning rate, above 0.
    """
    usual = arrays.sqrt(mean_square)
    usual *= lr / (1 - average**steps) ** 0.5
    usual += lr * 1e-8
    gap = arrays.absolute(drift)
    gap /= usual
    gap += 1
    grad /= gap


def follow(mean_square: Array, step: Array, average: float) -> None:
    """Let the running mean of squares have one step more, in place."""
    mean_square *= average
    arrays.add_product(mean_square, step, step, 1 - average)
