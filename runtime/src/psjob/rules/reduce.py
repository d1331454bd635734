"""No update on the shard: it gives the mean gradient back and keeps the weights that workers store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from psjob.rules.arrays import Array
from psjob.rules.base import BaseRule, BlockState, Hyperparameters, Range


class Reduce(BaseRule):
    """The workers step; the shard counts."""

    name = "reduce"
    hyperparameters: Final[Mapping[str, float | bool]] = {}

    def init(self, weights: Array) -> BlockState:
        """State before the first update."""
        return BlockState(weights)

    def apply(
        self,
        state: BlockState,
        grad: Array,
        hyperparameters: Hyperparameters,
        ranges: Sequence[Range] | None = None,
        lag: int | None = None,
        worker: int | None = None,
    ) -> None:
        """Count; the weights change only when a worker stores them."""
        state.steps += 1
