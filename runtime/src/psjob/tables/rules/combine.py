"""Rows that are no parameters: what is pushed is joined to what is there, by a monoid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from psjob.rules import arrays
from psjob.rules.base import Hyperparameters
from psjob.rules.reduction import Monoid, ReductionProblem
from psjob.tables.rules.base import BaseRowRule, Planes, parts, put_rows


@dataclass(frozen=True)
class Combine(BaseRowRule):
    """row = row joined with what was pushed; a row that nobody pushed is the monoid's identity. Sums of int32 are exact or refused."""

    name: str
    monoid: Monoid
    planes: ClassVar[Mapping[str, bool]] = {}
    hyperparameters: ClassVar[Mapping[str, float | bool]] = {}

    def apply(self, weights: Tensor, state: Planes, slots: Tensor, grads: Tensor, hyperparameters: Hyperparameters) -> None:
        """Join rows `grads`. Raises ReductionProblem if a sum is no int32, of whose part no row has changed then."""
        for at, pushed in parts(slots, grads):
            put_rows(weights, at, self.join(weights.index_select(0, at), pushed))

    def identity(self, dtype: torch.dtype) -> float | int:
        """What changes no element of that dtype."""
        value = self.monoid.identity
        if dtype.is_floating_point:
            return value
        limits = torch.iinfo(dtype)
        return int(min(max(value, limits.min), limits.max))

    def join(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x joined with y, element by element, a new tensor or x. Raises ReductionProblem if a sum is no int32."""
        if self.monoid.join != "add" or x.dtype != torch.int32:
            return arrays.combine(self.monoid.join, x, y, x)
        total = x.long() + y
        limits = torch.iinfo(torch.int32)
        if total.numel() and not limits.min <= int(total.min()) <= int(total.max()) <= limits.max:
            raise ReductionProblem(f"sums reach {int(total.abs().max())}, beyond int32; push smaller numbers, or take dtype float32")
        return total.int()

    def distinct(self, ids: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids ascending, each there once; their rows joined in the order in which they stood). Raises as `join`."""
        ids, order = torch.sort(ids, stable=True)
        rows = rows[order]
        while bool((ids[1:] == ids[:-1]).any()):  # a round halves the longest run
            place = torch.arange(len(ids), device="cpu") - torch.searchsorted(ids, ids)
            second = (place % 2 == 1).nonzero().squeeze(1)
            rows[second - 1] = self.join(rows[second - 1], rows[second])
            first = place % 2 == 0
            ids, rows = ids[first], rows[first]
        return ids, rows
