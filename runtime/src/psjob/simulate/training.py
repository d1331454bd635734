"""Training on a simulated schedule: what workers hold and push, and the rule that applies it. The same rule objects as on a shard.

A problem gives a gradient for any weights, from a stream of batches that all workers share. `Digits` are scikit-learn's handwritten digits
and a small network, forward and backward by hand: real gradients at 10,000 a second.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from psjob.modes import Batch, Push
from psjob.rules import arrays
from psjob.rules.arrays import Array
from psjob.rules.base import BlockState, Hyperparameters, Rule, UpdateFacts, WorkerHalf

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

    Stable for ASGD of constant staleness L iff lr · curvature < 2 sin(π / (2 (2 L + 1))).
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


Library = Literal["numpy", "torch"]


@dataclass(frozen=True)
class Inner:
    """The steps that a worker makes by itself in local mode. Its optimizer state is the worker's and lasts."""

    rule: Rule
    hyperparameters: Hyperparameters
    steps: int


@dataclass(frozen=True)
class _Sent:
    """A push on its way: what it brings, what it was computed on (as numpy), the loss there."""

    grad: Array
    used: Floats
    loss: float


class SimulatedTraining:
    """See `Work`. `hyperparameters` gives the rule's hyperparameters after so many batches of the stream.

    A worker's gradient is computed when its push arrives, on the weights that it took, with the next batch of the shared stream. `delay` is
    the mode's: the weights of as many answers and one more are held of each worker.
    Raises ValueError for a rule that cannot take what the mode gives (several pushes at once, say) or the arrays of this library.
    """

    def __init__(
        self,
        problem: TrainingProblem,
        rule: Rule,
        hyperparameters: Callable[[int], Hyperparameters],
        library: Library = "numpy",
        inner: Inner | None = None,
        delay: int = 0,
    ) -> None:
        self.problem, self.rule, self.hyperparameters, self.inner = problem, rule, hyperparameters, inner
        self.state = rule.init(_array(problem.begin(), library))
        self.weights = _floats(self.state.weights)
        self.batches = 0
        self._half = cast(WorkerHalf, rule) if hasattr(rule, "outgoing") else None
        self._library = library
        self._version, self._delay = 0, delay
        self._held: dict[int, deque[tuple[int, Array]]] = {}
        """By worker: the versions and the weights that it was given last."""
        self._own: dict[int, BlockState] = {}
        self._sent: dict[tuple[int, int], _Sent] = {}

    def begin(self, worker: int) -> None:
        taken = self.rule.reply(self.state, self.hyperparameters(self.batches), worker)
        given = self._held.setdefault(worker, deque(maxlen=self._delay + 1))
        given.append((self._version, arrays.copy(taken) if taken is self.state.weights else taken))

    def push(self, push: Push) -> None:
        held = self._weights_of(push)
        grad, loss = self._local(push.worker, held) if self.inner else self._gradient(held)
        if self._half:
            state = self._own.get(push.worker) or self._own.setdefault(push.worker, BlockState(held))
            state.weights = held
            grad = self._half.outgoing(state, grad, self.hyperparameters(self.batches))
        self._sent[push.worker, push.clock] = _Sent(grad, _floats(held), loss)

    def decide(self, batch: Batch, version: int) -> list[tuple[float, float]]:
        kept = [self._sent.pop((push.worker, push.clock)) for push in batch.kept]
        dropped = [self._sent.pop((push.worker, push.clock)) for push in batch.dropped]
        notes = [(self._gap(sent.used), sent.loss) for sent in (*kept, *dropped)]
        if kept:
            self._version = version + 1
            staleness = max(version - (push.base or 0) for push in batch.kept)
            worker = batch.kept[0].worker if len(kept) == 1 else None
            self.rule.apply(
                self.state, _combined(kept, batch), self.hyperparameters(self.batches), UpdateFacts(staleness=staleness, worker=worker)
            )
        return notes

    def leave(self, worker: int) -> None:
        self.rule.forget(self.state, worker)
        self._own.pop(worker, None)

    def _weights_of(self, push: Push) -> Array:
        """The weights that a push is computed on. Raises ValueError if they are held no more."""
        for version, weights in reversed(self._held[push.worker]):
            if version == push.base:
                return weights
        held = [version for version, _ in self._held[push.worker]]
        raise ValueError(
            f"push {push.clock} of worker {push.worker} was computed on version {push.base}, and versions {held} are held; "
            f"delay is {self._delay} here, give that of the mode"
        )

    def score(self) -> float:
        """The problem's score of the weights as they stand."""
        return self.problem.score(self.weights)

    def _gradient(self, weights: Array) -> tuple[Array, float]:
        self.batches += 1
        grad, loss = self.problem.gradient(_floats(weights))
        return _array(grad, self._library), loss

    def _local(self, worker: int, held: Array) -> tuple[Array, float]:
        """How far the worker goes by itself (weights before - weights after), and the mean loss on its way."""
        assert self.inner
        state = self._own.get(worker) or self._own.setdefault(worker, self.inner.rule.init(held))
        state.weights = arrays.copy(held)
        losses = 0.0
        for _ in range(self.inner.steps):
            grad, loss = self._gradient(state.weights)
            self.inner.rule.apply(state, grad, self.inner.hyperparameters, UpdateFacts(staleness=0, worker=worker))
            losses += loss
        return held - state.weights, losses / self.inner.steps

    def _gap(self, used: Floats) -> float:
        moved = self.weights - used
        return math.sqrt(float(moved @ moved) / len(moved))


def _combined(kept: list[_Sent], batch: Batch) -> Array:
    """The update's gradient: a mean (summed in the order of `kept`, multiplied once) or a sum with weights."""
    if batch.weights is None and len(kept) == 1:
        return kept[0].grad
    total = arrays.copy(kept[0].grad)
    if batch.weights is None:
        for sent in kept[1:]:
            total += sent.grad
        total *= 1 / len(kept)
        return total
    total *= batch.weights[0]
    for sent, weight in zip(kept[1:], batch.weights[1:], strict=True):
        arrays.add_scaled(total, sent.grad, weight)
    return total


def _array(values: Floats, library: Library) -> Array:
    return torch.from_numpy(values) if library == "torch" else values  # type: ignore[return-value]


def _floats(values: Array) -> Floats:
    return values.numpy() if isinstance(values, torch.Tensor) else values


BATCH = 32
HIDDEN = 64
PIXELS = 64
CLASSES = 10
SIZE = PIXELS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES


class Digits:
    """A perceptron 64-64-10 with ReLU and He initialisation, softmax and cross-entropy, in float32.

    1,437 digits to learn from in shuffled passes of 44 batches of 32, 360 to be judged by; the split is always the same, mean-centred.
    `seed` makes the first weights and the order of batches. Raises ImportError if scikit-learn is not installed.
    """

    updates_per_epoch = 44

    def __init__(self, seed: int = 0) -> None:
        self._images, self._labels, self._unseen, self._wanted = _digits()
        weights, order = np.random.SeedSequence(seed).spawn(2)
        self._first = np.random.default_rng(weights)
        self._rng = np.random.default_rng(order)
        self._order = np.empty(0, np.int64)
        self._rows = np.arange(BATCH)

    def begin(self) -> Floats:
        flat = np.zeros(SIZE, np.float32)
        w1, _, w2, _ = _parts(flat)
        w1[:] = self._first.standard_normal(w1.shape) * (2 / PIXELS) ** 0.5
        w2[:] = self._first.standard_normal(w2.shape) * (2 / HIDDEN) ** 0.5
        return flat

    def gradient(self, weights: Floats) -> tuple[Floats, float]:
        if len(self._order) < BATCH:
            self._order = self._rng.permutation(len(self._labels))
        batch, self._order = self._order[:BATCH], self._order[BATCH:]
        images, labels = self._images[batch], self._labels[batch]
        w1, b1, w2, b2 = _parts(weights)
        hidden = images @ w1
        hidden += b1
        np.maximum(hidden, 0, out=hidden)
        chances = _softmax(hidden @ w2 + b2)
        right = chances[self._rows, labels]
        loss = -float(np.log(np.maximum(right, 1e-30)).sum()) / BATCH
        chances[self._rows, labels] -= 1
        chances /= BATCH
        flat = np.empty(SIZE, np.float32)
        g1, c1, g2, c2 = _parts(flat)
        np.dot(hidden.T, chances, out=g2)
        chances.sum(0, out=c2)
        back = chances @ w2.T
        back *= hidden > 0
        np.dot(images.T, back, out=g1)
        back.sum(0, out=c1)
        return flat, loss

    def score(self, weights: Floats) -> float:
        """The part of the unseen digits that is recognised. Weights that are not finite recognise none for certain: chance, 0.1."""
        if not np.isfinite(weights).all():
            return 1 / CLASSES
        w1, b1, w2, b2 = _parts(weights)
        found = (np.maximum(self._unseen @ w1 + b1, 0) @ w2 + b2).argmax(1)
        return float((found == self._wanted).mean())


def _parts(flat: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Views: weights and biases of the two layers."""
    a = PIXELS * HIDDEN
    b = a + HIDDEN
    c = b + HIDDEN * CLASSES
    return flat[:a].reshape(PIXELS, HIDDEN), flat[a:b], flat[b:c].reshape(HIDDEN, CLASSES), flat[c:]


def _softmax(scores: Floats) -> Floats:
    scores -= scores.max(1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(1, keepdims=True)
    return scores


@cache
def _digits() -> tuple[Floats, Floats, Floats, Floats]:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    seen, unseen, names, wanted = train_test_split(images / 16, labels, test_size=0.2, random_state=42)
    mean = seen.mean(0)
    return (seen - mean).astype(np.float32), names, (unseen - mean).astype(np.float32), wanted
