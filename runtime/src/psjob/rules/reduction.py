"""Sums of pushes in rank order, so that the same pushes give the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def mean_in_rank_order(grads: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write the mean of `grads` (one a rank present, in rank order) to `out`: added from left to right, then one multiplication.

    `out` may be the first of them. NaN and inf pass through. Raises ValueError without any gradient.
    """
    if not grads:
        raise ValueError("a mean needs at least one gradient")
    if len(grads) == 1:
        out.copy_(grads[0])
        return
    torch.add(grads[0], grads[1], out=out)
    for grad in grads[2:]:
        out.add_(grad)
    out.mul_(1.0 / len(grads))
