"""One table's rows as a shard serves them: what `Cell` is to a block.

All methods are called with `lock` held. A lookup names the version it needs and is answered when the table has it, before
the table can move on. Every worker pushes one frame (maybe without a row) a clock, table and shard, so that the admission
table counts it as it counts a block's.

Rows to and from one worker of this host in memory that the two lend each other. The worker alone says where in it they lie.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from psjob.layout import memory
from psjob.modes import ServedMode
from psjob.shard.bound import Bound
from psjob.shard.cell import free, ready, take
from psjob.shard.decided import Decision
from psjob.shard.nonfinite import NonFinitePushes
from psjob.shard.pending import Arrived, PendingPushes, Replies, Waiter, Waiters
from psjob.shard.pushnorms import PushNorms
from psjob.tables import RowTable, TableSpec, merge
from psjob.tables.rules import Combine
from psjob.tables.table import Part, Rows
from psjob.wire.frame import ID_BYTES, LENT_ANSWERS, LENT_PUSHES, ROWS_ALIGNED, Header, WireError
from psjob.wire.shared_memory import Region

Buffers = tuple[torch.Tensor, torch.Tensor]


class RowGradient:
    """Ids and gradient rows of one push, in buffers of its worker's, to which they go back when they have been applied.

    `lent` are gradients that lie in memory of the worker's, and are only read; the ids are always this shard's own.
    """

    def __init__(self, pool: list[Buffers], rows: int, spec: TableSpec, lent: torch.Tensor | None = None) -> None:
        dim = spec.dim
        ids, flat = (
            pool.pop() if pool else (torch.empty(0, dtype=torch.int64, device="cpu"), torch.empty(0, dtype=torch.float32, device="cpu"))
        )
        if ids.numel() < rows:
            ids = torch.empty(rows, dtype=torch.int64, device="cpu")
        if lent is None and flat.numel() < rows * dim:
            flat = torch.empty(rows * dim, dtype=torch.float32, device="cpu")
        self._pool, self._buffers = pool, (ids, flat)
        self.ids = ids[:rows]
        self.grads = flat[: rows * dim].view(rows, dim).view(spec.torch_dtype) if lent is None else lent

    def free(self) -> None:
        """The buffers may take another push."""
        self._pool.append(self._buffers)


class RowCell:
    """`n` is the number of updates decided for this table here; for `bound` see Cell."""

    update: None = None
    """A table has no reduced gradient to give: its rows are always updated here."""

    def __init__(self, number: int, index: int, position: int, spec: TableSpec, mode: ServedMode, divides: bool = True) -> None:
        """`divides`: gradients of a row come to their mean, otherwise to their sum."""
        self._divides = divides
        self.number, self.index, self.position, self.spec, self.mode = number, index, position, spec, mode
        self.bound: Bound | None = None
        self.group: frozenset[int] | None = None
        """All ranks push a table's rows."""
        self.lock = threading.Lock()
        self.table = RowTable(spec)
        self.n = 0
        self.pending = PendingPushes()
        self.waiters = Waiters()
        self.non_finite = NonFinitePushes()
        self.push_norms: PushNorms | None = None
        self.gone: Mapping[int, int] | None = None
        """As of a block."""
        self._cut: tuple[int, Callable[[RowCell], None]] | None = None
        self._sum = torch.empty(0, spec.dim, dtype=torch.float32, device="cpu")
        """Where the rows of several workers are added; it grows to the largest step."""

    @property
    def name(self) -> str:
        return f"table {self.spec.name}"

    def put(self, table: RowTable, n: int) -> None:
        """Set the table to a known state (initialisation or restore) and forget what waited."""
        self.table, self.n = table, n
        self.pending.clear()
        self.waiters.clear()
        self._cut = None

    def begin(self, ids: torch.Tensor, weights: torch.Tensor, hyperparameters: Sequence[Mapping[str, Any]]) -> None:
        """First values of rows, with the state that the rule gives to new ones."""
        self.table.load(first_rows(self.table, ids, weights, hyperparameters[self.number]))

    def advance(self, expected: Callable[[RowCell], frozenset[int]], ranks: Iterable[int] | None = None) -> int:
        """As of a block."""
        made = 0
        while taken := self.mode.takes(self.pending.pushes, expected(self), self.n):
            batch = self.pending.take((push.worker, push.clock) for push in taken.kept)
            self._apply(batch, batch[0].push.clock)
            free(batch)
            self.n += 1
            made += 1
            self._hold_if_due()
            self.answer(ranks)
        if not made:  # a worker has left, or come back further on
            self._hold_if_due()
            self.answer(ranks)
        return made

    def decide(self, decision: Decision) -> None:
        """As of a block; a row's age counts updates."""
        batch, dropped = take(self.pending, decision)
        if batch:
            self._apply(batch, self.n, decision.weights)
            self.n += 1
        free([*batch, *dropped])

    def wait_for(self, waiter: Waiter) -> None:
        self.waiters.add(waiter)

    def order_cut(self, step: int, hold: Callable[[RowCell], None]) -> bool:
        """Hold on to the table with `hold` when it is at `step` (where that is negative: as it is now). False: too late."""
        if step >= 0 and (self.n > step if self.bound is None else self.bound.beyond(step)):
            return False
        self._cut = (step, hold)
        self._hold_if_due()
        return True

    def void_cut(self) -> None:
        """No cut waits for this table any more."""
        self._cut = None

    def drop_waiters(self, to: Replies, rank: int) -> None:
        self.waiters.drop(to, rank)

    @property
    def barrier(self) -> int | None:
        """The step of a cut that this table has not come to."""
        return None if self._cut is None or self._cut[0] < 0 else self._cut[0]

    def answer(self, ranks: Iterable[int] | None = None) -> None:
        """Serve the lookups that can be served now; for `ranks` see the block's."""
        for waiter in ready(self, ranks):
            waiter.to.rows(self, waiter)

    def _hold_if_due(self) -> None:
        if self._cut is None:
            return
        step, hold = self._cut
        if step < 0 or (self.n == step if self.bound is None else self.bound.stands_at(step)):
            self._cut = None
            hold(self)

    def _apply(self, batch: list[Arrived], clock: int, weights: Sequence[float] | None = None) -> None:
        present = [a.grad for a in batch if isinstance(a.grad, RowGradient)]
        if not present or any(a.skip for a in batch):
            return
        parts = [(part.ids, part.grads) for part in present]  # in rank order
        if self.push_norms is not None and not isinstance(self.table.rule, Combine):
            pushes = [a.push for a in batch if isinstance(a.grad, RowGradient)]
            bounded = self.push_norms.bounded
            parts = [(ids, bounded(push.worker, push.clock, self.name, grads)) for push, (ids, grads) in zip(pushes, parts, strict=True)]
        if weights is not None:
            shares = [share for a, share in zip(batch, weights, strict=True) if a.grad is not None]
            parts = [(ids, grads * share) for (ids, grads), share in zip(parts, shares, strict=True)]
        if not isinstance(self.table.rule, Combine):
            parts = [self._reduced(parts, len(parts) if self._divides and weights is None else 1)]
        bad = [a.push for a in batch if isinstance(a.grad, RowGradient) and self._bad(a.grad.grads)]
        for push in bad:
            self.non_finite.note(push.worker, push.clock, self.name)
        if bad and self.non_finite.left_out():
            return
        told = next(a.info for a in batch if isinstance(a.grad, RowGradient))
        for ids, grads in parts:
            self.table.push(ids, grads, told.rows[self.number], clock)
        self.table.evict(clock)

    def _bad(self, grads: torch.Tensor) -> bool:
        """Does this hold NaN or inf? Of what a rule combines only NaN is bad: the least of nothing is inf."""
        if isinstance(self.table.rule, Combine):
            return bool(grads.isnan().any())
        return self.non_finite.bad(grads, self.n)

    def _reduced(self, parts: Sequence[Part], over: int) -> Part:
        """One gradient a row."""
        ids, grads = parts[0]
        if len(parts) > 1:
            named = sum(len(part[0]) for part in parts)
            if len(self._sum) < named:
                self._sum = torch.empty(named, self.spec.dim, dtype=torch.float32, device="cpu")
            ids, grads = merge(parts, over, self._sum)
        return ids, grads


def first_rows(table: RowTable, ids: torch.Tensor, weights: torch.Tensor, hyperparameters: Mapping[str, Any]) -> Rows:
    """Planes of rows that begin with these weights, as `Table.load` takes them."""
    rows: Rows = {"ids": ids, "seen": torch.zeros(len(ids), dtype=torch.int64, device="cpu"), "weights": weights}
    begun = table.rule.begin(weights, hyperparameters)
    for name, wide in table.rule.planes.items():
        value = begun.get(name, 0.0)
        rows[name] = (
            value
            if isinstance(value, torch.Tensor)
            else torch.full((len(ids), table.spec.dim) if wide else (len(ids),), value, dtype=torch.float32, device="cpu")
        )
    return rows


class RowLending:
    """Made when a worker has come for the handover; `fd` is the memory from which it pushes.

    It names a place for an answer only when it has no more need of what it finds there, so that no answer is ever waited with for another.
    """

    def __init__(self, fd: int) -> None:
        self._pushes = Region.borrow(fd, LENT_PUSHES)
        self.answers = Region.lend(LENT_ANSWERS)

    def pushed(self, header: Header, spec: TableSpec, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and gradients of a push where their worker has them, and could change them. Raises WireError outside of what it lends."""
        at = _aligned(header)
        ids = memory.lent(self._pushes, at, rows, "int64")
        grads = memory.lent(self._pushes, at + ID_BYTES * rows, rows * spec.dim, spec.dtype)
        return ids, grads.view(rows, spec.dim)

    def place(self, header: Header, spec: TableSpec, rows: int) -> tuple[int, torch.Tensor]:
        """Offset and memory for the rows of a lookup. Raises WireError outside of what this shard lends."""
        at = _aligned(header)
        return at, memory.lent(self.answers, at, rows * spec.dim, spec.dtype).view(rows, spec.dim)


def _aligned(header: Header) -> int:
    if header.part % ROWS_ALIGNED:
        raise WireError(f"{header.kind.name} names byte {header.part} of lent memory, expected a multiple of {ROWS_ALIGNED}")
    return header.part
