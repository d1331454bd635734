"""SGD with momentum, dampening, Nesterov and weight decay, as torch.optim.SGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from psjob.rules.base import BlockState, Fused, Numbers, Range


class SGD(Fused):
    """Weights follow the gradient, or its running sum where momentum is not 0."""

    name = "sgd"
    slots = ("momentum_buffer",)
    needs_lag = False
    numbers: Final[Mapping[str, float | bool]] = {
        "lr": 1e-3,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "maximize": False,
    }

    def apply(
        self, state: BlockState, grad: torch.Tensor, numbers: Numbers, ranges: Sequence[Range] | None = None, lag: int | None = None
    ) -> None:
        """One step. Counts are of updates *with momentum*: at the first of them the buffer becomes the gradient, undampened."""
        if not numbers["momentum"]:
            state.steps += 1
            for offset, length in [(0, state.weights.numel())] if ranges is None else ranges:
                _step(state.weights[offset : offset + length], grad[offset : offset + length], [], numbers, False)
            return
        buffer = state.slot("momentum_buffer")
        for part, count in state.advance(ranges):
            _step(state.weights[part], grad[part], [buffer[part]], numbers, count == 1)


def _step(weights: torch.Tensor, grad: torch.Tensor, buffers: list[torch.Tensor], numbers: Numbers, first: bool) -> None:
    torch._fused_sgd_(
        [weights],
        [grad],
        buffers,
        weight_decay=float(numbers["weight_decay"]),
        momentum=float(numbers["momentum"]),
        lr=float(numbers["lr"]),
        dampening=float(numbers["dampening"]),
        nesterov=bool(numbers["nesterov"]),
        maximize=bool(numbers["maximize"]),
        is_first_step=first,
    )
