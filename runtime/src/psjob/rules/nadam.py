"""NAdam, as torch.optim's: Adam that looks one step ahead along its momentum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from psjob.rules.arrays import Array
from psjob.rules.base import BaseRule, BlockState, Hyperparameters, Range


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

    def apply(
        self,
        state: BlockState,
        grad: Array,
        hyperparameters: Hyperparameters,
        ranges: Sequence[Range] | None = None,
        lag: int | None = None,
        worker: int | None = None,
    ) -> None:
        """One step; each stretch of equal count and product has its own corrections of bias."""
        lr, eps, decay = (float(hyperparameters[name]) for name in ("lr", "eps", "weight_decay"))
        beta1, beta2, falls = (float(hyperparameters[name]) for name in ("beta1", "beta2", "momentum_decay"))

        def momentum(step: int) -> float:
            return float(beta1 * (1.0 - 0.5 * 0.96 ** (step * falls)))

        def follow(step: int, numbers: tuple[float, ...]) -> tuple[float, ...]:
            # A float32 tensor, as torch keeps it: the product rounds as there.
            return (torch.tensor(numbers[0] if numbers else 1.0, dtype=torch.float32, device="cpu").mul_(momentum(step)).item(),)

        first, second = state.slot("exp_avg"), state.slot("exp_avg_sq")
        for at, (_, step, *numbers) in state.advance_with(ranges, follow):
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
