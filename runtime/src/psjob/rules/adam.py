"""Adam, AdamW and NAdam, as torch.optim's. Adam and AdamW differ in where weight decay acts; NAdam looks one step ahead along its momentum.

`AsyncAdam` is Adam for pushes that come one by one: its averages reach back as many rounds as they would over means of all workers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from psjob.rules.arrays import Array
from psjob.rules.base import BaseRule, BlockState, Hyperparameters, UpdateFacts


class Adam(BaseRule):
    """Steps scaled by running moments of the gradient; weight decay is added to the gradient."""

    name = "adam"
    on_torch = True
    slots = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    hyperparameters: Mapping[str, float | bool] = {
        "lr": 1e-3,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "amsgrad": False,
        "maximize": False,
    }
    _kernel = "_fused_adam_"

    def apply(self, state: BlockState, grad: Array, hyperparameters: Hyperparameters, facts: UpdateFacts = UpdateFacts()) -> None:
        """One step; each stretch of equal count has its own bias correction."""
        kernel = getattr(torch, self._kernel)
        first, second = state.slot("exp_avg"), state.slot("exp_avg_sq")
        largest = state.slot("max_exp_avg_sq") if hyperparameters["amsgrad"] else None
        for part, count in state.advance(facts.ranges):
            kernel(
                [state.weights[part]],
                [grad[part]],
                [first[part]],
                [second[part]],
                [] if largest is None else [largest[part]],
                [torch.tensor(float(count), dtype=torch.float32, device="cpu")],
                lr=float(hyperparameters["lr"]),
                beta1=float(hyperparameters["beta1"]),
                beta2=float(hyperparameters["beta2"]),
                weight_decay=float(hyperparameters["weight_decay"]),
                eps=float(hyperparameters["eps"]),
                amsgrad=bool(hyperparameters["amsgrad"]),
                maximize=bool(hyperparameters["maximize"]),
            )


class AdamW(Adam):
    """Adam whose weight decay shrinks the weights themselves."""

    name = "adamw"
    hyperparameters: Mapping[str, float | bool] = {**Adam.hyperparameters, "weight_decay": 1e-2}
    _kernel = "_fused_adamw_"


class AsyncAdam(Adam):
    """Adam with beta1^(1/m) and beta2^(1/m), where m is `workers`.

    A round of m pushes makes m updates. With betas to the power 1/m it fades the past by beta1 and beta2 as one update by their mean
    would. The bias correction 1 - beta^(updates/m) counts rounds. This is the rule rho^kappa for a batch kappa times as large, of
    Busbridge et al. 2023, arXiv 2307.13813. Weight decay is added to the gradient.
    """

    name = "adam-async"
    hyperparameters: Mapping[str, float | bool] = {**Adam.hyperparameters, "workers": 1.0}

    def apply(self, state: BlockState, grad: Array, hyperparameters: Hyperparameters, facts: UpdateFacts = UpdateFacts()) -> None:
        """One step."""
        workers = float(hyperparameters["workers"])
        betas = {name: float(hyperparameters[name]) ** (1 / workers) for name in ("beta1", "beta2")}
        super().apply(state, grad, {**hyperparameters, **betas}, facts)


class NAdam(BaseRule):
    """torch.optim.NAdam (Dozat 2016), operation by operation: torch has no fused kernel of it.

    The momentum of update t is beta1 (1 - 0.96^(t momentum_decay) / 2). The product of all momenta is a number of a segment beside its
    count, since beta1 may change between updates.
    """

    name = "nadam"
    on_torch = True
    slots = ("exp_avg", "exp_avg_sq")
    hyperparameters: Mapping[str, float | bool] = {
        "lr": 2e-3,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "momentum_decay": 4e-3,
        "decoupled_weight_decay": False,
        "maximize": False,
    }

    def apply(self, state: BlockState, grad: Array, hyperparameters: Hyperparameters, facts: UpdateFacts = UpdateFacts()) -> None:
        """One step; each stretch of equal count and product has its own corrections of bias."""
        lr, eps, decay = (float(hyperparameters[name]) for name in ("lr", "eps", "weight_decay"))
        beta1, beta2, falls = (float(hyperparameters[name]) for name in ("beta1", "beta2", "momentum_decay"))

        def momentum(step: int) -> float:
            return float(beta1 * (1.0 - 0.5 * 0.96 ** (step * falls)))

        def follow(step: int, numbers: tuple[float, ...]) -> tuple[float, ...]:
            # A float32 tensor, as torch keeps it: the product rounds as there.
            return (torch.tensor(numbers[0] if numbers else 1.0, dtype=torch.float32, device="cpu").mul_(momentum(step)).item(),)

        first, second = state.slot("exp_avg"), state.slot("exp_avg_sq")
        for at, (_, step, *numbers) in state.advance_with(facts.ranges, follow):
            product = numbers[0]
            weights, part = state.weights[at], -grad[at] if hyperparameters["maximize"] else grad[at]
            if decay and hyperparameters["decoupled_weight_decay"]:
                weights.mul_(1 - lr * decay)
            elif decay:
                part = part.add(weights, alpha=decay)
            now, later = momentum(step), momentum(step + 1)
            first[at].lerp_(part, 1 - beta1)
            second[at].mul_(beta2).addcmul_(part, part, value=1 - beta2)
            denominator = second[at].div(1 - beta2**step).sqrt_().add_(eps)
            weights.addcdiv_(part, denominator, value=-lr * (1.0 - now) / (1.0 - product))
            weights.addcdiv_(first[at], denominator, value=(-lr * later) / (1.0 - product * later))
