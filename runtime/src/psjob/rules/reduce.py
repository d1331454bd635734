"""No update on the shard: it gives the mean gradient back and keeps the weights that workers store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from psjob.rules.base import BlockState, Numbers, Range


class Reduce:
    """The workers step; the shard counts."""

    name = "reduce"
    slots: tuple[str, ...] = ()
    needs_lag = False
    numbers: Final[Mapping[str, float | bool]] = {}

    def init(self, weights: torch.Tensor) -> BlockState:
        """State before the first update."""
        return BlockState(weights)

    def apply(
        self, state: BlockState, grad: torch.Tensor, numbers: Numbers, ranges: Sequence[Range] | None = None, lag: int | None = None
    ) -> None:
        """Count; the weights change only when a worker stores them."""
        state.steps += 1
