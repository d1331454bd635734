"""Rows as they stood at one moment, read bit by bit while pushes go on.

A push that is about to change a row which the cut still owes keeps the row's image first; nothing else is copied at the cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from psjob.tables.reserve import reserve
from psjob.tables.slab import Slab

PART_BYTES: Final = 4 << 20
SPARE_BYTES: Final = 64 << 20
"""So much memory for images is kept for the next cut: pages that were used before cost a fifth of fresh ones."""

Rows = dict[str, torch.Tensor]
"""Tensors of equal length by plane: ids, seen, weights and the state of the rule."""


class RowCut:
    """The rows `slots` (int32) at this moment; `removed` are ids that went since the mark before. All calls under the table's lock.

    `owed` is a flag a slot; `images` is memory that an earlier cut has left.
    """

    def __init__(
        self, slab: Slab, slots: torch.Tensor, removed: torch.Tensor, counts: Rows, owed: torch.Tensor, images: Rows | None = None
    ) -> None:
        self.removed, self.counts = removed, counts
        self.slots = slots
        self._slab, self._owed = slab, owed
        step = PART_BYTES // slab.row_bytes
        self._step = step // 1024 * 1024 or max(1, step)  # whole pages, whatever the width
        self._where = reserve(max(1, slab.top), 0, torch.int32)
        """One more than the place of a row's image; 0: the row itself still holds."""
        self._images = images
        self._kept = 0
        owed.index_fill_(0, slots.long(), 1)

    def __len__(self) -> int:
        return len(self.slots)

    def sizes(self) -> list[int]:
        """Rows in each part."""
        whole, rest = divmod(len(self.slots), self._step)
        return [self._step] * whole + [rest] * (rest > 0)

    def keep(self, slots: torch.Tensor) -> None:
        """Keep images of those of `slots` (int64, each there once) that are still owed: they are about to change."""
        at = slots.index_select(0, self._owed.index_select(0, slots).nonzero().squeeze(1))
        if not len(at):
            return
        planes = self._slab.all()
        if self._images is None:
            self._images = {
                name: reserve(self._slab.limit, plane.shape[1] if plane.dim() > 1 else 0, plane.dtype) for name, plane in planes.items()
            }
        for name, plane in planes.items():
            torch.index_select(plane, 0, at, out=self._images[name][self._kept : self._kept + len(at)])
        self._where.index_copy_(0, at, torch.arange(self._kept + 1, self._kept + 1 + len(at), dtype=torch.int32, device="cpu"))
        self._kept += len(at)
        self._owed.index_fill_(0, at, 0)

    def take(self, part: int) -> Rows:
        """Copies of the rows of one part, as they stood. Each part once."""
        slots = self.slots[part * self._step : (part + 1) * self._step].long()
        rows = {name: plane.index_select(0, slots) for name, plane in self._slab.all().items()}
        where = self._where.index_select(0, slots)
        old = where.nonzero().squeeze(1)
        if len(old) and self._images is not None:
            images = where.index_select(0, old).long().sub_(1)
            for name, plane in self._images.items():
                rows[name].index_copy_(0, old, plane.index_select(0, images))
        self._owed.index_fill_(0, slots, 0)
        return rows

    def parts(self) -> Iterator[Rows]:
        """All parts in turn."""
        return (self.take(part) for part in range(len(self.sizes())))

    def release(self) -> None:
        """Nothing more is owed."""
        self._owed.index_fill_(0, self.slots.long(), 0)

    def leave(self) -> Rows | None:
        """Memory for the images of the next cut, unless that is too much to keep."""
        images, self._images = self._images, None
        return images if self._kept * self._slab.row_bytes <= SPARE_BYTES else None
