"""The largest stable learning rate for stale gradients, and a warning where the one in use is larger. Pure."""

from __future__ import annotations

import cmath
import math
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

RULES: Final[Mapping[str, Mapping[str, bool]]] = {"sgd": {}, "plain": {}, "heavy-ball": {}, "nag": {"nesterov": True}}
"""Rules that `largest_stable_rate` is about, with the hyperparameters that stand in their names: one sum over all pushes, the same for
every element. Others scale elements, or keep a momentum for each worker."""
KEPT = 512
"""Pushes whose staleness is looked back on."""
MEMORY = 0.99
"""What is left of an older pair of gradients at the next one."""
LEAST_PAIRS = 16
SURE = 2.5
"""Standard errors by which the curvature is taken lower than its estimate."""
ASKED_EVERY = 8
"""Pairs between two judgements."""


class Guard:
    """Judges the learning rate of a job by the staleness and the curvature that its own pushes show.

    The curvature is an exponential mean of ⟨Δg, Δw⟩ / ⟨Δw, Δw⟩ over pairs of gradients, less `SURE` standard errors. These are Rayleigh
    quotients of the Hessian along the path of training, so never above its largest eigenvalue but for noise. Both gradients of a pair were
    computed before either was applied: the noise of their batches has no part in Δw, and the mean of what it adds is 0.
    """

    def __init__(self, rule: str) -> None:
        self._fixed = RULES[rule]
        self.warning: str | None = None
        """The last one given."""
        self._staleness: deque[int] = deque(maxlen=KEPT)
        self._mean = self._scatter = self._said = 0.0
        self._weight = self._squares = 0.0
        """Sums of what is left of each pair, and of its square."""
        self._pairs = 0

    def see(self, staleness: int, agreed: float, moved: float, hyperparameters: Mapping[str, float | bool]) -> str | None:
        """Take note of a push: ⟨Δg, Δw⟩ and ⟨Δw, Δw⟩ to an earlier one (both 0 where there is none), and its rule's hyperparameters.

        Returns a sentence when lr × curvature is above the bound for the first time, and whenever it has doubled since.
        """
        self._staleness.append(staleness)
        if not (moved > 0 and math.isfinite(agreed + moved)):
            return None
        self._take(agreed / moved)
        if self._pairs < LEAST_PAIRS or self._pairs % ASKED_EVERY:
            return None
        late, curvature, lr = self._lag95(), self._curvature(), float(hyperparameters["lr"])
        if not 0 < curvature < math.inf:  # nor where it is no number any more
            return None
        largest = largest_stable_rate(late, {**hyperparameters, **self._fixed}) / curvature
        if lr <= max(1.0, 2 * self._said) * largest:
            return None
        self._said = lr / largest
        self.warning = (
            f"lr {lr:.3g} is {self._said:.1f} times the {largest:.3g} that gradients {late} updates old tolerate at the curvature seen"
            f" ({curvature:.2g}): training may diverge. Lower lr, take fewer workers, mode sync, or updateRule dana-slim"
        )
        return self.warning

    def _take(self, quotient: float) -> None:
        self._pairs += 1
        self._weight, self._squares = MEMORY * self._weight + 1, MEMORY**2 * self._squares + 1
        away = quotient - self._mean
        self._mean += away / self._weight
        self._scatter = MEMORY * self._scatter + away * (quotient - self._mean)

    def _curvature(self) -> float:
        return self._mean - SURE * math.sqrt(self._scatter * self._squares / self._weight**3)

    def _lag95(self) -> int:
        return sorted(self._staleness)[math.ceil(0.95 * len(self._staleness)) - 1]


def largest_stable_rate(staleness: int, hyperparameters: Mapping[str, float | bool]) -> float:
    """Largest lr × curvature at which w -= lr · (its momentum of gradients `staleness` updates old) does not grow on a quadratic.

    Without momentum 2 sin(π / (2 (2 s + 1))), where s is `staleness`. With it, the point where a root of (z - 1) (1 - μ/z) z^s = -lr a
    leaves the unit circle; with Nesterov's, the right side is times 1 + μ - μ/z. `hyperparameters` are those of torch.optim.SGD; what is
    not there is 0.
    """
    momentum = float(hyperparameters.get("momentum", 0.0))
    left = 1 - float(hyperparameters.get("dampening", 0.0)) if momentum else 1.0
    return _undampened(staleness, momentum, momentum if hyperparameters.get("nesterov") else 0.0) / left if left > 0 else math.inf


@lru_cache(4096)
def _undampened(staleness: int, momentum: float, ahead: float) -> float:
    def momenta(angle: float) -> tuple[complex, complex]:
        delay = cmath.exp(-1j * angle)
        return 1 - momentum * delay, 1 + ahead - ahead * delay

    low, high = 0.0, math.pi
    for _ in range(50):
        angle = (low + high) / 2
        below, above = momenta(angle)
        turned = angle * (staleness + 0.5) + cmath.phase(below) - cmath.phase(above)
        low, high = (angle, high) if turned < math.pi / 2 else (low, angle)
    below, above = momenta(high)
    return 2 * math.sin(high / 2) * abs(below) / abs(above)
