"""Cuts a batch, a nested structure of tensors, into micro-batches along dimension 0; their loss, and gradients that meet in `.grad`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Micro:
    """One micro-batch: the structure of the batch with its samples, and the share of the batch's samples that it has, above 0 to 1."""

    value: Any
    weight: float


def cut(batch: Any, microbatches: int) -> list[Micro]:
    """Cut `batch` into at most `microbatches`; fewer where it has fewer samples.

    Sizes differ by one at most, larger ones first. The n_i of N samples weigh n_i/N, so that the weighted sum of the micro-batches'
    means is the mean of the batch. Tensors of a micro-batch are views of the batch's. What is no tensor, and tensors without
    dimensions, are given to every micro-batch.

    Args:
        batch: tuples, lists, dicts and other structures known to torch's pytree, nested, of tensors. Tensors have the same length of
            dimension 0.
        microbatches: 1 or more.

    Raises:
        ValueError: a number below 1, lengths that differ, an empty batch, or no tensor with a dimension.
    """
    if microbatches < 1:
        raise ValueError(f"microbatches is {microbatches}, must be 1 or more")
    leaves, structure = pytree.tree_flatten(batch)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    samples = _samples(batch, [leaves[place] for place in places])
    cuts = min(microbatches, samples)
    sizes = [samples // cuts + (number < samples % cuts) for number in range(cuts)]
    parts: list[list[Any]] = [list(leaves) for _ in sizes]
    for place in places:
        for part, piece in zip(parts, leaves[place].split(sizes), strict=True):
            part[place] = piece
    return [Micro(pytree.tree_unflatten(part, structure), size / samples) for part, size in zip(parts, sizes, strict=True)]


def arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model is called with, `(args, kwargs)`: a tuple holds its arguments, a mapping those by name; else there is one."""
    if isinstance(x, Mapping):
        return (), dict(x)
    return (x if isinstance(x, tuple) else (x,)), {}


def _samples(batch: Any, tensors: list[torch.Tensor]) -> int:
    if not tensors:
        raise ValueError(
            f"the batch ({type(batch).__name__}) holds no tensor with a dimension; give tensors whose dimension 0 counts samples"
        )
    lengths = [len(tensor) for tensor in tensors]
    if len(set(lengths)) > 1:
        found = ", ".join(map(str, sorted(set(lengths))))
        raise ValueError(f"the tensors of the batch have {found} samples in dimension 0; all must have the same number")
    if not lengths[0]:
        raise ValueError("the batch has 0 samples; leave empty batches out")
    return lengths[0]


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
