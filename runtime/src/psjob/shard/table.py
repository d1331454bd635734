"""One table's rows as a shard serves them: what `ParameterBlock` is to a block. And the tables of a shard at a snapshot.

All methods of a table are called with `lock` held. A lookup names the version it needs and is answered when the table has it, before
the table can move on. Every worker pushes one frame (maybe without a row) per clock, table and shard, so that the admission
table counts it as it counts a block's.

At a snapshot tables are held as they stand when they come to it, then written beside the path. Between two snapshots a chain of files
grows: all rows in the first, what changed in the next ones. It ends when reading it back would cost more than the rows are worth. What
was written counts as saved when the coordinator names its snapshot as that of the newest manifest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from psjob.checkpoint.disk import Moved
from psjob.checkpoint.manifest import MAX_CHAIN
from psjob.checkpoint.states import bytes_of, write_rows
from psjob.modes import ServedMode
from psjob.protocol.messages import Decision
from psjob.shard.pending import PendingPush, ServedState, free
from psjob.shard.push_metrics import NonFinitePushes, PushNorms
from psjob.shard.snapshot_memory import Voided
from psjob.tables import RowTable, TableSpec, merge
from psjob.tables.rules import Combine
from psjob.tables.table import Part, Rows

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


class ServedTable(ServedState):
    """`n` is the number of updates decided for this table here."""

    update: None = None
    """A table has no reduced gradient to give: its rows are always updated here."""

    def __init__(self, number: int, index: int, position: int, spec: TableSpec, mode: ServedMode, divides: bool = True) -> None:
        """`divides`: gradients of a row come to their mean, otherwise to their sum."""
        self._divides = divides
        super().__init__(index, position, mode, None)  # all ranks push a table's rows
        self.number, self.spec = number, spec
        self.table = RowTable(spec)
        self.non_finite = NonFinitePushes()
        self.push_norms: PushNorms | None = None
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
        self._snapshot = None

    def begin(self, ids: torch.Tensor, weights: torch.Tensor, hyperparameters: Sequence[Mapping[str, Any]]) -> None:
        """First values of rows, with the state that the rule gives to new ones."""
        self.table.load(first_rows(self.table, ids, weights, hyperparameters[self.number]))

    def advance(self, expected: Callable[[ServedTable], frozenset[int]], ranks: Iterable[int] | None = None) -> int:
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
        batch, dropped = self.decided_on(decision)
        if batch:
            self._apply(batch, self.n, decision.weights)
            self.n += 1
        free([*batch, *dropped])

    def answer(self, ranks: Iterable[int] | None = None) -> None:
        """Serve the lookups that can be served now; for `ranks` see the block's."""
        for waiter in self.ready(ranks):
            waiter.to.rows(self, waiter)

    def _hold_if_due(self) -> None:
        if self._snapshot is None:
            return
        step, _, hold = self._snapshot
        if not self._comes_to(step):
            self._snapshot = None
            hold(self)

    def _apply(self, batch: list[PendingPush], clock: int, weights: Sequence[float] | None = None) -> None:
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


@dataclass(frozen=True)
class Chain:
    """Files in which the rows of `tables` lie as they were at `snapshot`, the oldest first, with their bytes."""

    snapshot: int | None = None
    tables: tuple[RowTable, ...] = ()
    files: tuple[tuple[str, int], ...] = ()

    def may_grow(self, more: int) -> bool:
        """Is it worth while to write `more` bytes of changes after it, and not all rows anew?"""
        if not 1 <= len(self.files) < MAX_CHAIN:
            return False
        return sum(size for _, size in self.files[1:]) + more <= self.files[0][1] // 2


class HeldTable:
    """A table at a snapshot. `lock` is the one that guards the table."""

    def __init__(self, cell: ServedTable, full: bool, check: Callable[[], None]) -> None:
        self.table, self.n, self.lock, self._check = cell.table, cell.n, cell.lock, check
        self.spec: TableSpec = self.table.spec
        self._snapshot = self.table.snapshot(changed_only=not full)
        self.removed: torch.Tensor = self._snapshot.removed
        self.counts: Rows = self._snapshot.counts

    def sizes(self) -> list[int]:
        """Rows of each part."""
        return self._snapshot.sizes()

    def take(self, part: int) -> Rows:
        """Rows of a part. Raises what `check` does, where the snapshot is void."""
        with self.lock:
            self._check()
            return self._snapshot.take(part)

    def release(self) -> None:
        """Pushes keep nothing for it any more."""
        with self.lock:
            self._snapshot.release()

    def settle(self, kept: bool) -> None:
        """`kept`: its rows are saved; otherwise they are still to be."""
        with self.lock:
            self.table.settle(kept)


class RowSnapshots:
    """At most one snapshot at a time. `cells` are the shard's tables in order of their numbers."""

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._run = folder, run
        self._lock = threading.Lock()
        self._cells: list[ServedTable] = []
        self._held: dict[int, HeldTable] = {}
        self._full = self._void = False
        self._saved = self._written = Chain()
        """What the newest manifest names, and what was written after it."""

    def begin(self, cells: Sequence[ServedTable], base: int | None) -> None:
        """A snapshot is ordered; `base` is the one that the newest manifest holds, which says whether what was written last is saved."""
        with self._lock:
            before, self._held, self._cells, self._void = self._held, {}, list(cells), False
        kept = base is not None and self._written.snapshot == base
        for held in before.values():
            held.settle(kept)
        if kept:
            self._saved = self._written
        if self._saved.snapshot != base or any(a is not b.table for a, b in zip(self._saved.tables, cells, strict=False)):
            self._saved = Chain()  # of another manifest, or the tables came from one since
        self._full = not self._saved.may_grow(sum(_changed_bytes(cell) for cell in cells))

    def hold(self, cell: ServedTable) -> None:
        """A table has come to the snapshot; its lock is held by the caller."""
        with self._lock:
            self._held[cell.number] = HeldTable(cell, self._full, self._check)

    def complete(self) -> bool:
        """Has every table come to the snapshot?"""
        return len(self._held) == len(self._cells)

    def release(self) -> None:
        """The snapshot is written, or will not be: pushes keep nothing for it any more. Not with a table's lock held."""
        for held in list(self._held.values()):
            held.release()

    def void(self) -> None:
        """The snapshot is given up: what it holds is still to be saved. Not with a table's lock held."""
        with self._lock:
            self._void = True
            before, self._held, self._written = self._held, {}, Chain()
        for held in before.values():
            held.settle(False)

    def bytes(self) -> int:
        """Size of the rows that are held."""
        return sum(bytes_of(held.spec, sum(held.sizes())) for held in list(self._held.values()))

    def write(self, snapshot: int, stem: str, moved: Moved | None = None) -> dict[str, Any] | None:
        """Write what is held to `<stem>-rows.safetensors`; what the coordinator hears of it, None without tables.

        Raises CheckpointProblem, and Voided where the snapshot was given up meanwhile.
        """
        if not self._cells:
            return None
        held = [self._held[number] for number in sorted(self._held)]
        fact = write_rows(self._folder, f"{stem}-rows.safetensors", held, {"run": self._run}, moved)
        self.release()
        files = () if self._full else self._saved.files
        chain = Chain(snapshot, tuple(table.table for table in held), (*files, (fact.name, fact.bytes)))
        with self._lock:
            self._written = chain
        return {"file": fact.to_json(), "chain": [name for name, _ in chain.files], "versions": [table.n for table in held]}

    def _check(self) -> None:
        if self._void:
            raise Voided


def _changed_bytes(cell: ServedTable) -> int:
    with cell.lock:
        return cell.table.changed_bytes
