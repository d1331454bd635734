"""Rows with their state, ids and last clocks: planes of memory that grow in place, and the slots that are free in them.

Weights, each state and the facts of a row are planes of their own. A pull reads whole rows of weights without the state between
them, and a look for old rows reads their clocks alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from psjob.tables.reserve import ROWS, reserve

NOBODY: Final = -1
"""The clock of a slot without a row."""


class Slab:
    """Slots 0 to `top` - 1 have been used; those without a row have clock NOBODY. `planes`: the width of each state, 0 for one number."""

    def __init__(self, dim: int, planes: Mapping[str, int], rows: int | None, dtype: torch.dtype = torch.float32) -> None:
        most = min(ROWS, rows or ROWS)
        self.ids = reserve(most, 0, torch.int64)
        self.seen = reserve(most, 0, torch.int64)
        self.weights = reserve(most, dim, dtype)
        self.state = {name: reserve(most, width, torch.float32) for name, width in planes.items()}
        self.limit = min(len(plane) for plane in self.all().values())
        self.top = 0
        self._free: list[torch.Tensor] = []

    def all(self) -> dict[str, torch.Tensor]:
        """Every plane by name."""
        return {"ids": self.ids, "seen": self.seen, "weights": self.weights, **self.state}

    @property
    def row_bytes(self) -> int:
        """Bytes of a row over all planes."""
        return sum(plane[:1].nbytes for plane in self.all().values())

    def take(self, count: int) -> torch.Tensor:
        """`count` slots (int64) that held no row; given-back ones first. Raises MemoryError with a sentence where the table is full."""
        found: list[torch.Tensor] = []
        while count and self._free:
            last = self._free.pop()
            found.append(last[:count])
            if len(last) > count:
                self._free.append(last[count:])
            count -= len(found[-1])
        if self.top + count > self.limit:
            raise MemoryError(
                f"a table has room for {self.limit} rows on a shard, {self.top + count} are asked for: use more shards or evict_after"
            )
        found.append(torch.arange(self.top, self.top + count, device="cpu"))
        self.top += count
        return torch.cat(found) if len(found) > 1 else found[0]

    def give_back(self, slots: torch.Tensor) -> None:
        """Rows that are no more."""
        self.seen.index_fill_(0, slots, NOBODY)
        if len(slots):
            self._free.append(slots)

    def seen_until(self, clock: int) -> torch.Tensor:
        """Slots of rows that were not pushed after `clock`, as int64."""
        seen = self.seen[: self.top]
        return ((seen <= clock) & (seen >= 0)).nonzero().squeeze(1)

    def live(self) -> torch.Tensor:
        """Slots that hold a row, as int64."""
        return (self.seen[: self.top] >= 0).nonzero().squeeze(1)
