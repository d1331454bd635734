"""How often an id was named before it has a row, in memory that is bounded whatever ids come.

A count-min sketch with conservative update (Cormode, Muthukrishnan, 2005; Estan, Varghese, 2002), one a bucket of the partition,
so that it moves with its bucket to another shard. It never counts too little: a row may come early, never late. When a bucket has
counted eight times its width, all its counts are halved, so that old noise does not fill it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from psjob.tables.mixing import splitmix64
from psjob.tables.partition import BUCKETS, bucket_of

DEPTH: Final = 4
WIDTH: Final = 4096
"""Counters of one byte: 16 MiB a table over all shards, touched where ids come."""
COUNTS: Final = ("buckets", "added", "cells")
"""What a checkpoint holds of them, by bucket."""
_BEFORE_HALVING: Final = 8 * WIDTH


class Counts:
    """Counts of ids that have no row yet."""

    def __init__(self) -> None:
        self._cells = torch.zeros(BUCKETS, DEPTH, WIDTH, dtype=torch.uint8, device="cpu")
        self._added = torch.zeros(BUCKETS, dtype=torch.int64, device="cpu")
        self.changed = torch.zeros(BUCKETS, dtype=torch.bool, device="cpu")
        """Buckets that have counted since they were last saved."""

    def add(self, ids: torch.Tensor) -> torch.Tensor:
        """Count each of `ids` (int64, there once) once more; their counts with it, as int64."""
        buckets = bucket_of(ids)
        at = self._places(ids, buckets)
        flat = self._cells.view(-1)
        seen = flat[at].amin(1).long().add_(1).clamp_(max=255)
        flat.scatter_reduce_(0, at.view(-1), seen.to(torch.uint8)[:, None].expand(-1, DEPTH).reshape(-1), "amax")
        self._added.add_(torch.bincount(buckets, minlength=BUCKETS))
        self.changed[buckets] = True
        full = (self._added >= _BEFORE_HALVING).nonzero().squeeze(1)
        if len(full):
            self._cells[full] >>= 1
            self._added[full] >>= 1
        return seen

    @property
    def changed_bytes(self) -> int:
        """Size of what `save(changed_only=True)` gives."""
        return int(self.changed.sum()) * (DEPTH * WIDTH + 16)

    def save(self, changed_only: bool) -> dict[str, torch.Tensor]:
        """Sketches of the buckets that have counted anything (ever, or since `changed` was cleared)."""
        here = (self.changed if changed_only else self._added).nonzero().squeeze(1)
        return dict(zip(COUNTS, (here, self._added[here], self._cells[here]), strict=True))

    def load(self, saved: Mapping[str, torch.Tensor], buckets: torch.Tensor | None = None) -> None:
        """Put back what `save` gave, of the buckets in this mask only where one is given; the others stay.

        Raises ValueError where it cannot be.
        """
        here, added, cells = (saved[name] for name in COUNTS)
        if here.dtype != torch.int64 or here.dim() != 1 or added.shape != here.shape or cells.shape != (len(here), DEPTH, WIDTH):
            raise ValueError(f"counts of {len(here)} buckets with sums of {tuple(added.shape)} and cells of {tuple(cells.shape)}")
        if bool(((here < 0) | (here >= BUCKETS)).any()):
            raise ValueError(f"counts of a bucket outside 0 to {BUCKETS - 1}")
        if buckets is not None:
            mine = buckets[here].nonzero().squeeze(1)
            here, added, cells = here[mine], added[mine], cells[mine]
        self._added[here] = added
        self._cells[here] = cells

    @staticmethod
    def _places(ids: torch.Tensor, buckets: torch.Tensor) -> torch.Tensor:
        """Where the counters of each id lie: [n, DEPTH]."""
        hashed = splitmix64(~ids)[:, None] >> torch.arange(0, 16 * DEPTH, 16, device="cpu")
        return hashed.bitwise_and_(WIDTH - 1) + (torch.arange(DEPTH, device="cpu") * WIDTH) + (buckets * (DEPTH * WIDTH))[:, None]
