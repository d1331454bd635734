"""One table as a shard holds it: rows are pulled and pushed by id, come when they are named often enough, go when they are not.

`Counts` says how often an id was named before it has a row, in memory that is bounded whatever ids come. It is a count-min sketch with
conservative update (Cormode, Muthukrishnan, 2005; Estan, Varghese, 2002), one a bucket of the partition, so that it moves with its
bucket to another shard. It never counts too little: a row may come early, never late. When a bucket has counted eight times its width,
all its counts are halved, so that old noise does not fill it.

`merge` makes one gradient per row of the pushes of several workers, added in rank order, so that the same pushes give the same bits.

`RowSnapshot` holds rows as they stood at one moment, read bit by bit while pushes continue. A push that is about to change a row which the
snapshot still owes keeps the row's image first; nothing else is copied at the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch

from psjob.rules.base import Hyperparameters
from psjob.tables import rules
from psjob.tables.rules.base import add_rows
from psjob.tables.slab import Index, Slab, reserve
from psjob.tables.spec import BUCKETS, TableSpec, bucket_of, initial_rows, splitmix64

DEPTH: Final = 4
WIDTH: Final = 4096
"""Counters of one byte: 16 MiB per table over all shards, touched where ids come."""
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
        """Put back what `save` gave, of the buckets in this mask only if one is given; the others stay.

        Raises ValueError if it cannot be.
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


Part = tuple[torch.Tensor, torch.Tensor]


def merge(parts: Sequence[Part], present: int, out: torch.Tensor | None = None) -> Part:
    """(ids, gradients) of the mean over `present` workers; a worker that did not name a row counts as zero there.

    `parts` are (ids int64 [n], each there once; gradients float32 [n, dim]) in rank order. A row's gradients are added from the
    lowest rank on, then multiplied once by 1/present. Ids come sorted, or in the order of a single part; its gradients are then its
    own tensor, changed in place where present is not 1. `out` (float32, [as many rows as all parts have, or more, dim]) is where several
    parts are added: memory that was used before saves most of the time. Raises ValueError without any part.
    """
    if not parts:
        raise ValueError("a merge needs the part of one worker at least")
    if len(parts) == 1:
        ids, grads = parts[0]
        return ids, grads if present == 1 else grads.mul_(1.0 / present)
    ids, inverse = torch.unique(torch.cat([part[0] for part in parts]), return_inverse=True)
    total = (torch.empty(len(ids), parts[0][1].shape[1], dtype=torch.float32, device="cpu") if out is None else out[: len(ids)]).zero_()
    start = 0
    for mine, grads in parts:
        add_rows(total, inverse[start : start + len(mine)], grads)
        start += len(mine)
    return ids, total if present == 1 else total.mul_(1.0 / present)


class RowTable:
    """The rows of `spec` whose ids lie on this shard. No method takes a lock: the caller has one table in one thread at a time."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.rule = rules.named(spec.rule)
        self._index = Index()
        self._slab = Slab(spec.dim, {name: spec.dim * wide for name, wide in self.rule.planes.items()}, spec.num_rows, spec.torch_dtype)
        self._changed = reserve(self._slab.limit, 0, torch.uint8)
        self._owed = reserve(self._slab.limit, 0, torch.uint8)
        self._counts = Counts() if spec.admit_after > 1 else None
        self._removed: list[torch.Tensor] = []
        self._snapshot: RowSnapshot | None = None
        self._images: Rows | None = None
        self._clock = 0
        self._looked = -1
        """The clock at which rows that are too old were looked for last."""

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of rows, state and index that are in use."""
        return self._slab.top * (self._slab.row_bytes + 2) + self._index.nbytes

    def pull(self, ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Weights of rows `ids` (int64 [n]), [n, dim], a copy (in `out`). A row that does not exist gives its first values."""
        self.check(ids)
        slots = self._index.lookup(ids)
        unknown = (slots < 0).nonzero().squeeze(1)
        values = torch.empty(len(ids), self.spec.dim, dtype=self.spec.torch_dtype, device="cpu") if out is None else out
        torch.index_select(self._slab.weights, 0, slots.clamp_(min=0) if len(unknown) else slots, out=values)
        if len(unknown):
            values.index_copy_(0, unknown, initial_rows(self.spec, ids.index_select(0, unknown)))
        return values

    def push(self, ids: torch.Tensor, grads: torch.Tensor, hyperparameters: Hyperparameters, clock: int) -> int:
        """Update rows `ids` (int64 [n], each there once) by `grads` ([n, dim] of their dtype, left as is) with the rule's hyperparameters.

        A row that does not exist is counted, and made when it was named in `admit_after` pushes; before that its gradient is dropped.
        Returns the rows updated. Raises ValueError for other shapes and ids that are not the table's, ReductionProblem where rows cannot
        be joined, MemoryError where it is full.
        """
        self.check(ids)
        if grads.shape != (len(ids), self.spec.dim) or grads.dtype != self.spec.torch_dtype:
            wanted = f"{self.spec.dtype} of {(len(ids), self.spec.dim)}"
            raise ValueError(f"table {self.spec.name}: gradients are {wanted}, got {grads.dtype} of {tuple(grads.shape)}")
        slots = self._index.lookup(ids)
        new = (slots < 0).nonzero().squeeze(1)
        if len(new):
            slots.index_copy_(0, new, self._admit(ids.index_select(0, new), hyperparameters))
            here = (slots >= 0).nonzero().squeeze(1)
            if len(here) < len(slots):
                slots, grads = slots.index_select(0, here), grads.index_select(0, here)
        self._about_to_change(slots)
        self._clock = max(self._clock, clock)  # a slow worker's push makes no row older
        self._slab.seen.index_fill_(0, slots, self._clock)
        self.rule.apply(self._slab.weights, self._slab.state, slots, grads, hyperparameters)
        return len(slots)

    def evict(self, clock: int) -> int:
        """Remove the rows that were not pushed in `evict_after` clocks up to `clock`, where it is time to look (`evict_every`).

        Rows are looked at once a clock, however many pushes have that clock, and not at all for a push behind the last look.
        """
        after = self.spec.evict_after
        if after is None or clock <= self._looked or clock % self.spec.evict_every:
            return 0
        self._looked = clock
        slots = self._slab.seen_until(clock - after)
        self.remove(self._slab.ids.index_select(0, slots))
        return len(slots)

    def remove(self, ids: torch.Tensor) -> None:
        """Forget rows `ids`; those that do not exist are left."""
        slots = self._index.lookup(ids)
        slots = torch.unique(slots[slots >= 0])
        if not len(slots):
            return
        if self._snapshot is not None:
            self._snapshot.keep(slots)
        gone = self._slab.ids.index_select(0, slots)
        self._index.delete(gone)
        self._removed.append(gone)
        self._changed.index_fill_(0, slots, 0)
        self._slab.give_back(slots)

    # -- checkpoints ---------------------------------------------------------------------------

    @property
    def changed_bytes(self) -> int:
        """Size of what a snapshot of the changes would hold."""
        counts = 0 if self._counts is None else self._counts.changed_bytes
        return self.changed_since_mark() * self._slab.row_bytes + counts

    def changed_since_mark(self) -> int:
        """Rows that came, changed or went since the last snapshot that was kept."""
        return int(self._changed[: self._slab.top].sum()) + sum(len(ids) for ids in self._removed)

    def snapshot(self, changed_only: bool) -> RowSnapshot:
        """The rows as they are now, for reading while pushes continue; `settle` ends it. One at a time."""
        if self._snapshot is not None:
            raise ValueError(f"table {self.spec.name}: the snapshot before is still being read")
        slots = (self._changed[: self._slab.top].nonzero().squeeze(1) if changed_only else self._slab.live()).int()
        removed = torch.cat(self._removed) if self._removed else torch.empty(0, dtype=torch.int64, device="cpu")
        self._snapshot = RowSnapshot(self._slab, slots, removed, self._save_counts(changed_only), self._owed, self._images)
        self._changed[: self._slab.top] = 0
        self._removed = []
        return self._snapshot

    def settle(self, kept: bool) -> None:
        """The snapshot is done with. `kept`: what it held counts as saved; otherwise it is still to be saved."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is None:
            return
        snapshot.release()
        self._images = snapshot.leave()
        if not kept:
            live = snapshot.slots.long()
            live = live[self._slab.seen[live] >= 0]
            self._changed.index_fill_(0, live, 1)
            self._removed.insert(0, snapshot.removed)
            if self._counts is not None:
                self._counts.changed[snapshot.counts["buckets"]] = True

    def export(self, changed_only: bool = False) -> Rows:
        """All rows (or those changed since the last snapshot that was kept) as tensors by plane; nothing is marked."""
        slots = self._changed[: self._slab.top].nonzero().squeeze(1) if changed_only else self._slab.live()
        return {name: plane.index_select(0, slots) for name, plane in self._slab.all().items()}

    def ids(self) -> torch.Tensor:
        """The ids of all rows, in no order, a copy."""
        return self._slab.ids.index_select(0, self._slab.live())

    def load(self, rows: Rows, buckets: torch.Tensor | None = None) -> None:
        """Put rows (tensors by plane, ids each there once) back, over what is there.

        `buckets` is a mask of BUCKETS: only those of them. Raises ValueError if planes are missing or do not fit.
        """
        planes = self._slab.all()
        count = len(rows.get("ids", ()))
        for name, plane in planes.items():
            if name not in rows or rows[name].shape != (count, *plane.shape[1:]) or rows[name].dtype != plane.dtype:
                found = f"{rows[name].dtype} of {tuple(rows[name].shape)}" if name in rows else "nothing"
                raise ValueError(f"table {self.spec.name}: plane {name} is {plane.dtype} of {(count, *plane.shape[1:])}, found {found}")
        if bool((rows["seen"] < 0).any()):
            raise ValueError(f"table {self.spec.name}: a row was last seen at a step below 0")
        self.check(rows["ids"])
        if buckets is not None:
            mine = buckets[bucket_of(rows["ids"])].nonzero().squeeze(1)
            rows = {name: tensor.index_select(0, mine) for name, tensor in rows.items()}
        slots = self._index.lookup(rows["ids"])
        new = (slots < 0).nonzero().squeeze(1)
        if len(new):
            made = self._slab.take(len(new))
            self._index.insert(rows["ids"].index_select(0, new), made)
            slots.index_copy_(0, new, made)
        self._about_to_change(slots)
        for name, plane in planes.items():
            plane.index_copy_(0, slots, rows[name])

    def load_counts(self, counts: Rows, buckets: torch.Tensor | None = None) -> None:
        """Put counts of admission back, of the buckets in the mask only if one is given. Raises ValueError if they do not fit."""
        if self._counts is not None:
            self._counts.load(counts, buckets)

    def select(self, buckets: torch.Tensor) -> None:
        """Keep only rows of the buckets in this mask of BUCKETS."""
        if buckets.shape != (BUCKETS,):
            raise ValueError(f"a mask of buckets has {BUCKETS} of them, got {tuple(buckets.shape)}")
        ids = self._slab.ids[self._slab.live()]
        self.remove(ids[~buckets[bucket_of(ids)]])

    def mark(self) -> None:
        """Everything that is here counts as saved."""
        self._changed[: self._slab.top] = 0
        self._removed = []
        if self._counts is not None:
            self._counts.changed.zero_()

    # -- inside --------------------------------------------------------------------------------

    def check(self, ids: torch.Tensor) -> None:
        """Raise ValueError unless `ids` is a vector of this table's ids."""
        if ids.dim() != 1 or ids.dtype != torch.int64:
            raise ValueError(f"table {self.spec.name}: ids are a vector of int64, got {ids.dtype} of {tuple(ids.shape)}")
        if self.spec.num_rows is not None and len(ids):
            low, high = (int(edge) for edge in ids.aminmax())
            if low < 0 or high >= self.spec.num_rows:
                raise ValueError(f"table {self.spec.name}: ids are 0 to {self.spec.num_rows - 1}, got {low if low < 0 else high}")

    def _admit(self, ids: torch.Tensor, hyperparameters: Hyperparameters) -> torch.Tensor:
        """Slots of rows that were not there: made now, or -1 where they were not named often enough."""
        slots = torch.full_like(ids, -1)
        ready = torch.arange(len(ids), device="cpu")
        if self._counts is not None:
            ready = (self._counts.add(ids) >= self.spec.admit_after).nonzero().squeeze(1)
            ids = ids.index_select(0, ready)
        if len(ids):
            made = self._slab.take(len(ids))
            self._index.insert(ids, made)
            weights = initial_rows(self.spec, ids)
            self._slab.ids.index_copy_(0, made, ids)
            self._slab.weights.index_copy_(0, made, weights)
            first = self.rule.begin(weights, hyperparameters)
            for name, plane in self._slab.state.items():
                value = first.get(name, 0.0)
                if isinstance(value, torch.Tensor):
                    plane.index_copy_(0, made, value)
                else:
                    plane.index_fill_(0, made, value)
            slots.index_copy_(0, ready, made)
        return slots

    def _save_counts(self, changed_only: bool) -> Rows:
        if self._counts is None:
            return {}
        saved = self._counts.save(changed_only)
        self._counts.changed.zero_()
        return saved

    def _about_to_change(self, slots: torch.Tensor) -> None:
        if self._snapshot is not None:
            self._snapshot.keep(slots)
        self._changed.index_fill_(0, slots, 1)


PART_BYTES: Final = 4 << 20
SPARE_BYTES: Final = 64 << 20
"""So much memory for images is kept for the next snapshot: pages that were used before cost a fifth of fresh ones."""

Rows = dict[str, torch.Tensor]
"""Tensors of equal length by plane: ids, seen, weights and the state of the rule."""


class RowSnapshot:
    """The rows `slots` (int32) at this moment; `removed` are ids that went since the mark before. All calls under the table's lock.

    `owed` is a flag a slot; `images` is memory that an earlier snapshot has left.
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
        """Memory for the images of the next snapshot, unless that is too much to keep."""
        images, self._images = self._images, None
        return images if self._kept * self._slab.row_bytes <= SPARE_BYTES else None
