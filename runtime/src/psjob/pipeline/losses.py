"""What the end of a pipeline does: the loss of a micro-batch, and gradients that meet in `.grad`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

LossFn = Callable[[Any, Any], torch.Tensor]
"""From the model's output and the target, the mean loss of the samples."""


def mean_loss(loss_fn: LossFn, target: Any, weight: float) -> Callable[[Any], torch.Tensor]:
    """From the model's output of a micro-batch, its part of the batch's mean loss. That raises ValueError for a loss that is none."""

    def finish(output: Any) -> torch.Tensor:
        loss = loss_fn(output, target)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            shape = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn returned {shape}, must be the mean loss as a tensor without dimensions")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ValueError("the loss has no gradient: no parameter of the model that needs one leads to it")
        return loss * weight

    return finish


def accumulate(p: nn.Parameter, grad: torch.Tensor) -> None:
    """As autograd adds a gradient to a leaf."""
    if p.grad is None:
        p.grad = grad.clone()  # autograd may give one tensor as the gradient of several
    elif p.grad.layout is torch.strided:
        p.grad.add_(grad)
    else:
        p.grad = p.grad + grad
