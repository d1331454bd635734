"""One table as a shard holds it: rows are pulled and pushed by id, come when they are named often enough, go when they are not."""

from __future__ import annotations

import torch

from psjob.rules.base import Hyperparameters
from psjob.tables import rules
from psjob.tables.admission import Counts
from psjob.tables.cut import RowCut, Rows
from psjob.tables.index import Index
from psjob.tables.init import initial_rows
from psjob.tables.partition import BUCKETS, bucket_of
from psjob.tables.reserve import reserve
from psjob.tables.slab import Slab
from psjob.tables.spec import TableSpec


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
        self._cut: RowCut | None = None
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
        if self._cut is not None:
            self._cut.keep(slots)
        gone = self._slab.ids.index_select(0, slots)
        self._index.delete(gone)
        self._removed.append(gone)
        self._changed.index_fill_(0, slots, 0)
        self._slab.give_back(slots)

    # -- checkpoints ---------------------------------------------------------------------------

    @property
    def changed_bytes(self) -> int:
        """Size of what a cut of the changes would hold."""
        counts = 0 if self._counts is None else self._counts.changed_bytes
        return self.changed_since_mark() * self._slab.row_bytes + counts

    def changed_since_mark(self) -> int:
        """Rows that came, changed or went since the last cut that was kept."""
        return int(self._changed[: self._slab.top].sum()) + sum(len(ids) for ids in self._removed)

    def cut(self, changed_only: bool) -> RowCut:
        """The rows as they are now, for reading while pushes go on; `settle` ends it. One at a time."""
        if self._cut is not None:
            raise ValueError(f"table {self.spec.name}: the cut before is still being read")
        slots = (self._changed[: self._slab.top].nonzero().squeeze(1) if changed_only else self._slab.live()).int()
        removed = torch.cat(self._removed) if self._removed else torch.empty(0, dtype=torch.int64, device="cpu")
        self._cut = RowCut(self._slab, slots, removed, self._save_counts(changed_only), self._owed, self._images)
        self._changed[: self._slab.top] = 0
        self._removed = []
        return self._cut

    def settle(self, kept: bool) -> None:
        """The cut is done with. `kept`: what it held counts as saved; otherwise it is still to be saved."""
        cut, self._cut = self._cut, None
        if cut is None:
            return
        cut.release()
        self._images = cut.leave()
        if not kept:
            live = cut.slots.long()
            live = live[self._slab.seen[live] >= 0]
            self._changed.index_fill_(0, live, 1)
            self._removed.insert(0, cut.removed)
            if self._counts is not None:
                self._counts.changed[cut.counts["buckets"]] = True

    def export(self, changed_only: bool = False) -> Rows:
        """All rows (or those changed since the last cut that was kept) as tensors by plane; nothing is marked."""
        slots = self._changed[: self._slab.top].nonzero().squeeze(1) if changed_only else self._slab.live()
        return {name: plane.index_select(0, slots) for name, plane in self._slab.all().items()}

    def ids(self) -> torch.Tensor:
        """The ids of all rows, in no order, a copy."""
        return self._slab.ids.index_select(0, self._slab.live())

    def load(self, rows: Rows, buckets: torch.Tensor | None = None) -> None:
        """Put rows (tensors by plane, ids each there once) back, over what is there.

        `buckets` is a mask of BUCKETS: only those of them. Raises ValueError where planes are missing or do not fit.
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
        """Put counts of admission back, of the buckets in the mask only where one is given. Raises ValueError where they do not fit."""
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
        if self._cut is not None:
            self._cut.keep(slots)
        self._changed.index_fill_(0, slots, 1)
