"""What is minimised: something that gives a gradient for any weights, from a stream of batches that all workers share."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]
"""A 1-D array of float32 or float64."""


class TrainingProblem(Protocol):
    """Weights to begin with, gradients, and a score. All randomness comes from the seed it was made with."""

    def begin(self) -> Floats:
        """The first weights, a new array."""

    def gradient(self, weights: Floats) -> tuple[Floats, float]:
        """Gradient (a new array, or one that nobody changes) and loss at `weights` on the next batch of the stream."""

    def score(self, weights: Floats) -> float:
        """How good weights are, in the problem's own measure."""


class Fixed:
    """`size` parameters whose gradient is always the same. What a simulation of it costs is the rule's and the engine's."""

    def __init__(self, size: int, seed: int = 0) -> None:
        if size < 1:
            raise ValueError(f"problem fixed: has {size} parameters, must be 1 or more")
        self._gradient = np.random.default_rng(seed).standard_normal(size).astype(np.float32)

    def begin(self) -> Floats:
        return np.zeros_like(self._gradient)

    def gradient(self, weights: Floats) -> tuple[Floats, float]:
        return self._gradient, 0.0

    def score(self, weights: Floats) -> float:
        """The norm of the weights."""
        return float(np.linalg.norm(weights))


class Quadratic:
    """curvature / 2 · |weights|², from weights 1, in float64.

    Stable for ASGD of constant staleness (lag) L iff lr · curvature < 2 sin(π / (2 (2 L + 1))).
    """

    def __init__(self, size: int, curvature: float = 1.0) -> None:
        if size < 1:
            raise ValueError(f"problem quadratic: has {size} parameters, must be 1 or more")
        self._size, self._curvature = size, curvature

    def begin(self) -> Floats:
        return np.ones(self._size)

    def gradient(self, weights: Floats) -> tuple[Floats, float]:
        gradient = self._curvature * weights
        return gradient, float(weights @ gradient) / 2

    def score(self, weights: Floats) -> float:
        """The norm of the weights: 0 is the best."""
        return float(np.linalg.norm(weights))
