"""What a rule of rows is, and how it gets at them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Protocol

import torch
from torch import Tensor

from psjob.rules.base import HasHyperparameters, Hyperparameters

PART: Final = 1 << 17
"""Elements of a part: what a rule computes between two looks at memory stays in the second cache."""

Planes = Mapping[str, Tensor]


class RowRule(HasHyperparameters, Protocol):
    """What a push does to rows. One object serves every table.

    `planes` names the state of a row: True as many float32 as the row has, False one.
    """

    @property
    def planes(self) -> Mapping[str, bool]: ...

    def begin(self, weights: Tensor, hyperparameters: Hyperparameters) -> dict[str, Tensor | float]:
        """State of new rows with these weights, where it is not zero."""

    def apply(self, weights: Tensor, state: Planes, slots: Tensor, grads: Tensor, hyperparameters: Hyperparameters) -> None:
        """Update rows `slots` (int64, each there once) of `weights` and `state` in place by `grads`, which stay as they are."""


class BaseRowRule:
    """What most rules are: the state of a row begins with zeros."""

    def begin(self, weights: Tensor, hyperparameters: Hyperparameters) -> dict[str, Tensor | float]:
        """Zeros."""
        return {}


def parts(slots: Tensor, grads: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Slots and copies of their gradients, in parts that stay in the cache; a part's copy may be written to until the next."""
    step = max(1, PART // max(1, grads.shape[1]))
    room = torch.empty(min(step, len(slots)), grads.shape[1], dtype=grads.dtype, device="cpu")
    for start in range(0, len(slots), step):
        grad = grads[start : start + step]
        yield slots[start : start + step], room[: len(grad)].copy_(grad)


def put_rows(plane: Tensor, slots: Tensor, rows: Tensor) -> None:
    """plane[slots] = rows, for slots that are there once."""
    plane.index_copy_(0, slots, rows)


def add_rows(plane: Tensor, slots: Tensor, rows: Tensor) -> None:
    """plane[slots] += rows, for slots that are there once."""
    if plane.dim() == 1:
        plane.scatter_add_(0, slots, rows)
    else:
        plane.scatter_add_(0, slots[:, None].expand_as(rows), rows)  # with an index that repeats along the row, whole rows at a time


def decay(weights: Tensor, slots: Tensor, grads: Tensor, hyperparameters: Hyperparameters) -> None:
    """grads += weight_decay * weights, for the rows that are touched."""
    if hyperparameters["weight_decay"]:
        grads.add_(weights.index_select(0, slots), alpha=float(hyperparameters["weight_decay"]))
