"""Corrections for late gradients: predicted weights, learning rate by delay, momentum by stage, corrected gradients. Pure numerics.

All take numbers and tensors and return new ones; a delay is a number of updates.

`Corrector` has the arithmetic of the rules dc-asgd and gap-aware. The rules on the shards note the weights that each worker was sent
last. A stage has several versions open at once, so its worker corrects a gradient by the version that it was computed on, the open
version, before it pushes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from psjob import contract, rules
from psjob.pipeline.schedule import TrainingWay
from psjob.rules.optimizers import checked_options
from psjob.rules.stale import compensate, divide_by_gap, follow_mean_square


def lr_by_delay(lr: float, delay: int, step: int, horizon: int) -> float:
    """PipeMare's T1 (Yang et al. 2019, arXiv 1910.05124): lr / τ^(1 - min(t/T, 1)), so late stages begin slowly.

    Args:
        lr: learning rate of the run.
        delay: τ of the stage; 0 counts as 1.
        step: t, the updates that were made.
        horizon: T, the updates after which all stages have the run's rate; 1 or more.

    Raises:
        ValueError: a delay or a step below 0, or a horizon below 1.
    """
    _check_delay(delay)
    if horizon < 1 or step < 0:
        raise ValueError(f"step is {step} and horizon {horizon}; must be 0 or more and 1 or more")
    return float(lr / max(delay, 1) ** (1 - min(step / horizon, 1.0)))


def annealed(groups: Sequence[Mapping[str, float | bool]], delay: int, step: int, horizon: int) -> list[dict[str, float | bool]]:
    """Hyperparameters by parameter group, as the shards' rule has them, with `lr_by_delay` in place of each lr.

    Raises:
        ValueError: as `lr_by_delay`, or a rule without a learning rate.
    """
    if any("lr" not in group for group in groups):
        raise ValueError("a rule without a hyperparameter lr cannot be annealed")
    return [{**group, "lr": lr_by_delay(float(group["lr"]), delay, step, horizon)} for group in groups]


def momentum_by_stage(beta: float, delay: int, stages: int, highest: float = 0.99) -> float:
    """β1 of a stage's NAdam: β + τ (0.99 - β)/K, the latest stage nearest to 0.99 (Ajanthan et al. 2025, arXiv 2505.01099).

    Args:
        beta: of a stage without delay.
        delay: τ of the stage.
        stages: K.
        highest: what β tends to.

    Raises:
        ValueError: a delay below 0, fewer than one stage, or numbers that are no momentum.
    """
    _check_delay(delay)
    if stages < 1 or not 0 <= beta <= highest < 1:
        raise ValueError(f"beta is {beta}, highest {highest}, stages {stages}; must be 0 <= beta <= highest < 1 and one stage or more")
    return beta + delay * (highest - beta) / stages


def with_momentum(
    rule: str, groups: Sequence[Mapping[str, float | bool]], delay: int, stages: int, highest: float
) -> list[dict[str, float | bool]]:
    """Hyperparameters by parameter group, as the shards' rule nadam has them, with `momentum_by_stage` in place of each beta1.

    Raises:
        ValueError: another rule, or as `momentum_by_stage`.
    """
    if rule != "nadam":
        raise ValueError(f"the momentum of {rule} does not go by stage; take torch.optim.NAdam")
    return [{**group, "beta1": momentum_by_stage(float(group["beta1"]), delay, stages, highest)} for group in groups]


RULES = ("sgd", "adam")
"""Rules whose last step tells where their momentum leads."""


def from_step(
    rule: str, before: torch.Tensor, after: torch.Tensor, step: int, hyperparameters: Mapping[str, float | bool], delay: int
) -> torch.Tensor:
    """The weights to which an optimizer's momentum leads in `delay` updates with zero gradients, from its last update.

    FTPipe, `weight_prediction` (Eliad et al., ATC 2021), for who has the weights and not the optimizer's state. SGD's last step is -lr v,
    and the sum of τ more is that times (γ - γ^(τ+1))/(1-γ). Adam's is -lr m / (1 - β1^t) / (sqrt(v / (1 - β2^t)) + ε), and each later
    one differs by a factor, where ε is small beside the denominator.

    Args:
        rule: one of RULES.
        before: weights before the update, of any shape.
        after: weights after it, of the same shape.
        step: t, the updates that were made, this one included.
        hyperparameters: of this update, as the shards' rule has them.
        delay: τ, 0 or more.

    Raises:
        ValueError: as `check_step`, or a delay below 0.
    """
    _check_delay(delay)
    check_step(rule, hyperparameters)
    if rule == "sgd":
        momentum = float(hyperparameters["momentum"])
        factor = (momentum - momentum ** (delay + 1)) / (1 - momentum)
    else:
        first, second = float(hyperparameters["beta1"]), float(hyperparameters["beta2"])
        factor = 0.0
        for later in range(1, delay + 1):
            bias = (1 - first**step) / (1 - first ** (step + later))
            factor += first**later * bias * math.sqrt((1 - second ** (step + later)) / (1 - second**step))
    return after + factor * (after - before)


def check_step(rule: str, hyperparameters: Mapping[str, float | bool]) -> None:
    """Raise ValueError for a rule that `from_step` does not know, and for an option that its formulas leave out."""
    if rule not in RULES:
        raise ValueError(f"weights of {rule} cannot be predicted; known are {', '.join(RULES)}")
    if option := next((key for key in UNKNOWN if hyperparameters.get(key)), None):
        raise ValueError(f"weights of {rule} with {option}={hyperparameters[option]} cannot be predicted; leave {option} out")
    decay = hyperparameters["momentum" if rule == "sgd" else "beta1"]
    if not 0 <= decay < 1:
        raise ValueError(f"momentum is {decay}, must be from 0 to below 1 where weights are predicted")


UNKNOWN = ("nesterov", "dampening", "weight_decay", "maximize", "amsgrad", "decoupled_weight_decay")
"""Options of torch's SGD and Adam that the formulas leave out."""


def _check_delay(delay: int) -> None:
    if delay < 0:
        raise ValueError(f"delay is {delay}, must be 0 or more")


FIELD: Final = "training.pipeline.correct"


class Corrector(Protocol):
    """Of the gradients of one worker; its state is by parameter, and begins empty."""

    def corrected(self, name: str, grad: torch.Tensor, now: torch.Tensor, opened: torch.Tensor, lr: float) -> torch.Tensor:
        """What is pushed in place of `grad`, a new tensor. All tensors are of the parameter's shape.

        Args:
            name: of the parameter.
            grad: the mean over this worker's samples of an update.
            now: the weights that the update will change.
            opened: those that the gradient was computed on.
            lr: learning rate of the update.
        """
        ...

    def moved(self, name: str, before: torch.Tensor, after: torch.Tensor, lr: float) -> None:
        """An update was made at this learning rate: the weights before it and after it."""
        ...


class Compensated:
    """DC-ASGD (Zheng et al. 2017, arXiv 1609.08326): g + λ g² (w_now - w_opened), element by element.

    `adaptive`: λ = lam / sqrt(mean square of this worker's gradients + 1e-7), else lam. See `psjob.rules.stale`.
    """

    def __init__(self, lam: float, decay: float, adaptive: bool) -> None:
        self._lam, self._decay, self._adaptive = lam, decay, adaptive
        self._mean_squares: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def corrected(self, name: str, grad: torch.Tensor, now: torch.Tensor, opened: torch.Tensor, lr: float) -> torch.Tensor:
        made = _dense(grad)
        mean = self._mean_squares.setdefault(name, torch.zeros_like(made)) if self._adaptive else None
        compensate(made, now - opened, self._lam, None if mean is None else (mean, self._decay))
        return made

    def moved(self, name: str, before: torch.Tensor, after: torch.Tensor, lr: float) -> None:
        """Nothing is kept of it."""


class ByGap:
    """Gap-Aware (Barkai et al. 2020, arXiv 1909.10802): g / (1 + |w_now - w_opened| / C), element by element.

    C is the usual step of an element: the highest learning rate times the root of the mean square of its steps, each divided by its
    learning rate. With SGD such a step is the momentum, as in `psjob.rules.stale`. `max_lr` 0: the rate of the update.
    """

    def __init__(self, average: float, max_lr: float) -> None:
        self._average, self._max_lr = average, max_lr
        self._steps: dict[str, tuple[torch.Tensor, int]] = {}

    @torch.no_grad()
    def corrected(self, name: str, grad: torch.Tensor, now: torch.Tensor, opened: torch.Tensor, lr: float) -> torch.Tensor:
        made, lr = _dense(grad), self._max_lr or lr
        if lr and name in self._steps:
            mean, steps = self._steps[name]
            divide_by_gap(made, now - opened, mean, self._average, steps, lr)
        return made

    @torch.no_grad()
    def moved(self, name: str, before: torch.Tensor, after: torch.Tensor, lr: float) -> None:
        """Nothing is kept of an update without a rate."""
        if not lr:
            return
        mean, steps = self._steps.get(name) or (torch.zeros_like(after, requires_grad=False), 0)
        follow_mean_square(mean, (before - after) / lr, self._average)
        self._steps[name] = mean, steps + 1


Begin = Callable[[], Corrector]
"""A corrector without state."""


def corrector(way: TrainingWay, word: str, options: Mapping[str, float]) -> Begin | None:
    """What a manifest names, for one that trains in this way; None: gradients are pushed as they are.

    Raises:
        ValueError: a word or a number that is not known, or a way with nothing to correct.
    """
    if word not in contract.CORRECTIONS:
        raise ValueError(f"{FIELD} is {word}, must be one of {', '.join(contract.CORRECTIONS)}")
    if word == "none":
        if options:
            raise ValueError(f"{FIELD}Options has {min(options)}, and {FIELD} names no correction; leave it out, or name one")
        return None
    if why := _nothing_old(way):
        raise ValueError(f"{FIELD} {word}: {why}; leave correct out, or take schedule: 2bw, or pipedream with weights: stash or vertical")
    rule = rules.named(word)
    numbers: dict[str, Any] = {name: rule.hyperparameters[name] for name in contract.UPDATE_RULES[word]}
    numbers |= checked_options(rule, contract.UPDATE_RULES[word], options, f"{FIELD}Options", "correct")
    made = Compensated if word == "dc-asgd" else ByGap
    return lambda: made(**numbers)


def check_correction(word: str, hyperparameters: Mapping[str, float | bool]) -> None:
    """Raise ValueError for what the script steps with, where it cannot be corrected so."""
    if word == "dc-asgd" and hyperparameters.get("maximize"):
        raise ValueError("it takes g² for the curvature of a loss that is to fall; leave maximize out, take correct: gap-aware")
    if word == "gap-aware" and "lr" not in hyperparameters:
        raise ValueError("a rule without a hyperparameter lr has no usual step")


def _nothing_old(way: TrainingWay) -> str | None:
    if way.flushes:
        return "with schedule: flush no gradient is of old weights"
    if way.recompute:
        return "with weights: recompute a gradient is of the newest weights"
    if way.in_place:
        return "with weights: latest a stage keeps no older weights, and a gradient is of two versions"
    return None


def _dense(grad: torch.Tensor) -> torch.Tensor:
    return grad.clone() if grad.layout is torch.strided else grad.to_dense()
