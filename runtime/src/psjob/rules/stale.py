"""Rules that correct a gradient for the updates since the weights that it was computed on.

Their base keeps, for each worker, the weights that it was sent: those that its next gradient is computed on.

- `DelayCompensated`: a gradient corrected, to first order, for how far the weights have moved (Zheng et al. 2017, arXiv 1609.08326).
- `GapAware`: a gradient counts the less, the further the weights have moved since (Barkai et al. 2020, arXiv 1909.10802).
- `LrOverLag`: the learning rate is divided by the staleness of a push (Zhang et al. 2016, arXiv 1511.05950).
"""

from __future__ import annotations

from collections.abc import Mapping

from psjob.rules import arrays
from psjob.rules.arrays import Array
from psjob.rules.base import (
    BaseRule,
    BlockState,
    Hyperparameters,
    Rule,
    UpdateFacts,
    decayed,
    of_worker,
    one_worker,
    range_views,
    staleness_of,
)
from psjob.rules.sgd import HeavyBall


class MovementAware(BaseRule):
    """Around another rule: changes the gradient by what the weights have moved since its worker was sent them, then lets `inner` update.

    A push must answer a reply: its base must be known (`needs_staleness`), and its worker. Costs one copy of the block a worker.
    """

    needs_staleness = True

    def __init__(
        self, name: str, inner: Rule, hyperparameters: Mapping[str, float | bool], slots: tuple[str, ...], per_worker: tuple[str, ...]
    ) -> None:
        self.name, self.inner = name, inner
        self.hyperparameters = {**inner.hyperparameters, **hyperparameters}
        self.slots = inner.slots + slots
        self.per_worker = (*inner.per_worker, *per_worker, "sent")

    def sent(self, state: BlockState, worker: int) -> Array:
        """What the worker's gradient was computed on. Raises ValueError if it was sent nothing."""
        note = state.slots.get(of_worker("sent", worker))
        if note is None:
            raise ValueError(f"rule {self.name}: worker {worker} pushes, but has not been sent weights")
        return note

    def reply(self, state: BlockState, hyperparameters: Hyperparameters, worker: int) -> Array:
        """What the inner rule replies; it is kept. Another array each time: nobody changes it."""
        reply = self.inner.reply(state, hyperparameters, worker)
        if reply is state.weights:
            reply = arrays.copy(reply)
        state.slots[of_worker("sent", worker)] = reply
        return reply

    def forget(self, state: BlockState, worker: int) -> None:
        """Remove what this rule and the inner one have of the worker."""
        self.inner.forget(state, worker)
        super().forget(state, worker)


class DelayCompensated(MovementAware):
    """g += strength g² (weights - sent), element by element, then the inner rule; g² stands for the curvature.

    `adaptive` (DC-ASGD-a): strength = lam / sqrt(mean square of this worker's gradients + 1e-7), a running mean with `decay`;
    else (DC-ASGD-c) strength = lam. Weight decay is the inner rule's and is not compensated.
    """

    def __init__(self, name: str, inner: Rule, adaptive: bool) -> None:
        super().__init__(name, inner, {"lam": 2.0, "decay": 0.95, "adaptive": adaptive}, (), ("mean_square",))

    def apply(self, state: BlockState, grad: Array, hyperparameters: Hyperparameters, facts: UpdateFacts = UpdateFacts()) -> None:
        """One step of the inner rule by the corrected gradient."""
        staleness_of(self, facts.staleness)
        rank = one_worker(self, facts.worker)
        sent, corrected = self.sent(state, rank), arrays.copy(grad)
        lam, decay = float(hyperparameters["lam"]), float(hyperparameters["decay"])
        mean_square = state.slot(of_worker("mean_square", rank)) if hyperparameters["adaptive"] else sent
        for weights, at, mean, part in range_views(facts.ranges, state.weights, sent, mean_square, corrected):
            compensate(part, weights - at, lam, (mean, decay) if hyperparameters["adaptive"] else None)
        self.inner.apply(state, corrected, hyperparameters, facts)


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


class GapAware(MovementAware):
    """g /= 1 + |weights - sent| / C, element by element, then the inner rule. C = max_lr (sqrt(m) + 1e-8) is the usual step of an element.

    m is the running mean, with `average`, of the squared momentum, free of its bias. Weight decay is part of the gradient, so it is
    divided too. `max_lr`: the highest learning rate of the schedule; 0: that of the push.
    """

    def __init__(self, name: str, inner: Rule, momentum: str) -> None:
        super().__init__(name, inner, {"average": 0.999, "max_lr": 0.0}, ("mean_square",), ())
        self.momentum = momentum

    def apply(self, state: BlockState, grad: Array, hyperparameters: Hyperparameters, facts: UpdateFacts = UpdateFacts()) -> None:
        """One step of the inner rule by the divided gradient."""
        staleness_of(self, facts.staleness)
        rank = one_worker(self, facts.worker)
        sent, mean_square = self.sent(state, rank), state.slot("mean_square")
        average = float(hyperparameters["average"])
        lr = float(hyperparameters["max_lr"]) or float(hyperparameters["lr"])
        divided = decayed(grad, state.weights, hyperparameters)
        if lr and state.steps:
            divided = arrays.copy(grad) if divided is grad else divided
            for weights, at, mean, part in range_views(facts.ranges, state.weights, sent, mean_square, divided):
                divide_by_gap(part, weights - at, mean, average, state.steps, lr)
        self.inner.apply(state, divided, {**hyperparameters, "weight_decay": 0.0}, facts)
        name = self.momentum if self.momentum in self.inner.slots else of_worker(self.momentum, rank)
        step = state.slots[name] if hyperparameters["momentum"] else divided
        for v, mean in range_views(facts.ranges, step, mean_square):
            follow_mean_square(mean, v, average)


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


def follow_mean_square(mean_square: Array, step: Array, average: float) -> None:
    """Let the running mean of squares have one step more, in place."""
    mean_square *= average
    arrays.add_product(mean_square, step, step, 1 - average)


class LrOverLag(HeavyBall):
    """SGD with lr / max(1, staleness); without momentum unless one is given."""

    name = "lr-over-lag"
    needs_staleness = True
    hyperparameters: Mapping[str, float | bool] = {**HeavyBall.hyperparameters, "momentum": 0.0}

    def apply(self, state: BlockState, grad: Array, hyperparameters: Hyperparameters, facts: UpdateFacts = UpdateFacts()) -> None:
        """One step."""
        lr = float(hyperparameters["lr"]) * stale_share(staleness_of(self, facts.staleness))
        super().apply(state, grad, {**hyperparameters, "lr": lr}, facts)


def stale_share(staleness: int) -> float:
    """What a push of this staleness counts; also the weight of one gradient in a mean of several."""
    return 1 / max(1, staleness)
