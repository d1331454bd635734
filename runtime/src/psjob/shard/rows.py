"""One table's rows as a shard serves them: what `Cell` is to a block.

All methods are called with `lock` held. A lookup names the version it needs and is answered when the table has it, before
the table can move on. Every worker pushes one frame (maybe without a row) a clock, table and shard, so that the admission
table counts it as it counts a block's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from psjob.modes import Served
from psjob.shard.cell import Arrived, Replies, Waiter
from psjob.tables import Table, TableSpec, merge
from psjob.tables.cut import Rows

Buffers = tuple[torch.Tensor, torch.Tensor]


class RowGradient:
    """Ids and gradient rows of one push, in buffers of its worker's, to which they go back when they have been applied.

    `lent` are gradients that lie in memory of the worker's, and are only read; the ids are always this shard's own.
    """

    def __init__(self, pool: list[Buffers], rows: int, dim: int, lent: torch.Tensor | None = None) -> None:
        ids, flat = pool.pop() if pool else (torch.empty(0, dtype=torch.int64), torch.empty(0))
        if ids.numel() < rows:
            ids = torch.empty(rows, dtype=torch.int64)
        if lent is None and flat.numel() < rows * dim:
            flat = torch.empty(rows * dim)
        self._pool, self._buffers = pool, (ids, flat)
        self.ids = ids[:rows]
        self.grads = flat[: rows * dim].view(rows, dim) if lent is None else lent

    def free(self) -> None:
        """The buffers may take another push."""
        self._pool.append(self._buffers)


class RowCell:
    """`n` is the number of updates decided for this table here; in sync it is also the open clock."""

    update: None = None
    """A table has no reduced gradient to give: its rows are always updated here."""

    def __init__(self, number: int, index: int, position: int, spec: TableSpec, mode: Served) -> None:
        self.number, self.index, self.position, self.spec, self.mode = number, index, position, spec, mode
        self.lock = threading.Lock()
        self.table = Table(spec)
        self.n = 0
        self.pending: dict[int, Arrived] = {}
        self.waiters: list[Waiter] = []
        self._cut: tuple[int, Callable[[RowCell], None]] | None = None
        self._sum = torch.empty(0, spec.dim)
        """Where the rows of several workers are added; it grows to the largest step."""

    @property
    def name(self) -> str:
        return f"table {self.spec.name}"

    def put(self, table: Table, n: int) -> None:
        """Set the table to a known state (initialisation or restore) and forget what waited."""
        self.table, self.n = table, n
        self.pending.clear()
        self.waiters.clear()
        self._cut = None

    def begin(self, ids: torch.Tensor, weights: torch.Tensor, numbers: Sequence[Mapping[str, Any]]) -> None:
        """First values of rows, with the state that the rule gives to new ones."""
        self.table.load(first_rows(self.table, ids, weights, numbers[self.number]))

    def advance(self, expected: Callable[[int], frozenset[int]]) -> int:
        """Apply what counts, answer who waited. Returns the number of updates made."""
        made = 0
        while taken := self.mode.takes([a.push for a in self.pending.values()], expected(self.n), self.n):
            batch = [self.pending.pop(push.worker) for push in taken.kept]
            self._apply(batch)
            for arrived in batch:
                if arrived.grad is not None:
                    arrived.grad.free()
            self.n += 1
            made += 1
            self._hold_if_due()
            self.answer()
        return made

    def wait_for(self, waiter: Waiter) -> None:
        self.waiters.append(waiter)
        self.answer()

    def order_cut(self, step: int, hold: Callable[[RowCell], None]) -> bool:
        """Hold on to the table with `hold` when it is at `step` (where that is negative: as it stands). False: too late."""
        if step >= 0 and self.n > step:
            return False
        self._cut = (step, hold)
        self._hold_if_due()
        return True

    def void_cut(self) -> None:
        """No cut waits for this table any more."""
        self._cut = None

    def drop_waiters(self, to: Replies) -> None:
        self.waiters = [w for w in self.waiters if w.to is not to]

    def answer(self) -> None:
        """Serve the lookups that can be served now."""
        ready = [w for w in self.waiters if self.n >= w.version]
        if ready:
            self.waiters = [w for w in self.waiters if self.n < w.version]
            for waiter in ready:
                waiter.to.rows(self, waiter)

    def _hold_if_due(self) -> None:
        if self._cut is not None and self._cut[0] in (self.n, -1):
            hold, self._cut = self._cut[1], None
            hold(self)

    def _apply(self, batch: list[Arrived]) -> None:
        clock = batch[0].push.clock
        present = [a.grad for a in batch if isinstance(a.grad, RowGradient)]
        if not present or any(a.skip for a in batch):
            return
        ids, grads = present[0].ids, present[0].grads
        if len(present) > 1:
            named = sum(len(part.ids) for part in present)
            if len(self._sum) < named:
                self._sum = torch.empty(named, self.spec.dim)
            ids, grads = merge([(part.ids, part.grads) for part in present], len(present), self._sum)
        self.table.push(ids, grads, batch[0].info.rows[self.number], clock)
        self.table.evict(clock)


def first_rows(table: Table, ids: torch.Tensor, weights: torch.Tensor, numbers: Mapping[str, Any]) -> Rows:
    """Planes of rows that begin with these weights, as `Table.load` takes them."""
    rows: Rows = {"ids": ids, "seen": torch.zeros(len(ids), dtype=torch.int64), "weights": weights}
    begun = table.rule.begin(weights, numbers)
    for name, wide in table.rule.planes.items():
        value = begun.get(name, 0.0)
        rows[name] = value if isinstance(value, torch.Tensor) else torch.full((len(ids), table.spec.dim) if wide else (len(ids),), value)
    return rows
