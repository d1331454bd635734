"""Corrections of gradients that a stage computed on old weights: the arithmetic of the rules dc-asgd and gap-aware. Pure numerics.

The rules on the shards note the weights that each worker was sent last. A stage has several versions open at once, so its worker
corrects a gradient by the version that it was computed on, the open version, before it pushes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import torch

from psjob import contract, rules
from psjob.pipeline.ways import TrainingWay
from psjob.rules.compensated import compensate
from psjob.rules.gap_aware import divide_by_gap, follow
from psjob.rules.options import checked_options

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

    `adaptive`: λ = lam / sqrt(mean square of this worker's gradients + 1e-7), else lam. See `psjob.rules.compensated`.
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
    learning rate. With SGD such a step is the momentum, as in `psjob.rules.gap_aware`. `max_lr` 0: the rate of the update.
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
        follow(mean, (before - after) / lr, self._average)
        self._steps[name] = mean, steps + 1


Begin = Callable[[], Corrector]
"""A corrector without state."""


def of(way: TrainingWay, word: str, options: Mapping[str, float]) -> Begin | None:
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


def check_step(word: str, hyperparameters: Mapping[str, float | bool]) -> None:
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
