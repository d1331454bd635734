"""One worker's row frames on this shard: lookups in, rows out, gradients and first values of rows in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from psjob.layout import memory
from psjob.protocol.shard.events import Phase
from psjob.shard.checks import check_ahead, check_info
from psjob.shard.deduplication import Verdict
from psjob.shard.pending import Received, Waiter
from psjob.shard.table import Buffers, RowGradient, ServedTable
from psjob.shard.worker_stream import WorkerState
from psjob.tables import TableSpec
from psjob.wire.event_loop import LARGE, Sending
from psjob.wire.frame import (
    ID_BYTES,
    ID_PAGE,
    LENT_ANSWERS,
    LENT_PUSHES,
    ROWS_ALIGNED,
    Flag,
    Header,
    Kind,
    WireError,
    lookup_limit,
    push_limit,
    row_bytes,
)
from psjob.wire.reading import Pause, Wants
from psjob.wire.shared_memory import Region

MAX_HELD = 64
"""Lookups of one worker that wait for a table's next version."""
MAX_QUEUED = 16
"""Answers that are gathered and not yet sent; the next lookup is read when there are fewer."""


class RowFrames:
    """Of one worker; answers are queued by whichever thread moves a table on. `judge` gives back, or ends, what was not taken."""

    def __init__(self, worker: WorkerState, judge: Callable[[Header, Verdict, str, Received | None], None]) -> None:
        self._worker, self._store, self._judge = worker, worker.store, judge
        self._pushes: list[Buffers] = []
        self._queued = 0
        self._counting = threading.Lock()
        self._lending: RowLending | None = None
        """If this worker's rows lie, from when it has come for memory that this shard lends until the session is over."""
        self._came = False
        self._ticket = ""
        self._listed: tuple[ServedTable, torch.Tensor] | None = None
        """The ids of the table that this worker reads in pages, in order, until it has had the last one."""

    def handle(self, header: Header) -> Wants[None]:
        """A frame of this worker about rows. Raises WireError."""
        if header.kind is Kind.LOOKUP:
            return self._lookup(header)
        if header.kind is Kind.ROW_IDS:
            return self._which(header)
        return self._push(header) if header.kind is Kind.ROW_PUSH else self._initial(header)

    @property
    def transport(self) -> str:
        """How this worker's rows come and go: shared or tcp."""
        return "shared" if self._came else "tcp"

    def offer(self) -> dict[str, Any]:
        """Where a worker of this host may come for memory of rows; nothing for any other, and where there is no table."""
        worker, broker = self._worker, self._worker.context.broker
        if broker is None or not worker.near or not self._store.row_cells or "shared" not in worker.row_transports:
            return {}
        broker.forget(self._ticket)
        self._ticket = broker.expect(self._give)
        return {"sharedRows": worker.offer(self._ticket, LENT_ANSWERS)}

    def close(self) -> None:
        """The session is over: nobody comes for its memory any more."""
        if self._worker.context.broker is not None:
            self._worker.context.broker.forget(self._ticket)
        self._lending = self._listed = None

    def _give(self, fd: int) -> Region:
        lending = RowLending(fd)
        self._lending, self._came = lending, True
        if self._worker.done.is_set():
            self._lending = None
            raise WireError(f"worker {self._worker.rank} has gone meanwhile")
        return lending.answers

    def _lent(self, header: Header, cell: ServedTable) -> RowLending:
        if self._lending is None:
            raise WireError(f"{header.kind.name} of {cell.name} names a place in lent memory, and none was handed over")
        return self._lending

    def _lookup(self, header: Header) -> Wants[None]:
        """Serve rows at `header.version[1]` or later; without ids, tell when the table is there."""
        cell = self._store.row_cell(header.table)
        limit = lookup_limit(cell.spec.dim) * ID_BYTES
        if header.length % ID_BYTES or header.length > limit:
            raise WireError(f"lookup in {cell.name} has {header.length} bytes, expected ids of {ID_BYTES} bytes, at most {limit} together")
        ids = place = None
        if header.length:
            if header.flags & Flag.PLACE:
                place = self._lent(header, cell).place(header, cell.spec, header.length // ID_BYTES)
            ids = torch.empty(header.length // ID_BYTES, dtype=torch.int64, device="cpu")
            yield from self._worker.stream.payload(header, [memory.view(ids)])
            _check_ids(cell, ids)
        while self._queued >= MAX_QUEUED:
            yield Pause()
        with cell.lock:
            if cell.waiters.of(header.worker) >= MAX_HELD:
                raise WireError(f"worker {header.worker} has {MAX_HELD} lookups in {cell.name} that are held already")
            waiter = self._store.waiter(header, self._worker.lanes[0], header.version[1], ids)
            waiter.place = place
            cell.waiters.add(waiter)
            cell.answer((header.worker,))

    def _which(self, header: Header) -> Wants[None]:
        """Answer with the ids that a table has above the one that is given, a page of them."""
        worker, cell = self._worker, self._store.row_cell(header.table)
        if header.length not in (0, ID_BYTES) or header.flags:
            raise WireError(
                f"ROW_IDS of {cell.name} has {header.length} bytes and flags {header.flags}, expected one id or none, and no flag"
            )
        above = torch.empty(header.length // ID_BYTES, dtype=torch.int64, device="cpu")
        if header.length:
            yield from worker.stream.payload(header, [memory.view(above)])
        while self._queued >= MAX_QUEUED:
            yield Pause()
        if not header.length or self._listed is None or self._listed[0] is not cell:
            with cell.lock:
                ids = cell.table.ids()
            self._listed = cell, torch.sort(ids).values
        ids = self._listed[1]
        begin = int(torch.searchsorted(ids, above, right=True)) if header.length else 0
        page = ids[begin : begin + ID_PAGE]
        if len(page) < ID_PAGE:
            self._listed = None
        answer = worker.base._replace(
            kind=Kind.ROW_IDS, term=self._store.term, clock=header.clock, request=header.request, table=cell.number, block=cell.index,
            version=(self._store.attempt, cell.n),
        )  # fmt: skip
        self._put(answer, page)

    def _push(self, header: Header) -> Wants[None]:
        """Take a clock's gradient rows."""
        worker, store, cell = self._worker, self._store, self._store.row_cell(header.table)
        grad = None
        check_ahead(store, header, cell)
        if header.flags & (Flag.ABSENT | Flag.SKIP):
            if header.length:
                raise WireError(f"push of {cell.name} has {header.length} bytes and says that it has none")
        else:
            rows = _rows(header, cell, push_limit(cell.spec.dim))
        if not header.flags & Flag.ABSENT:
            check_info(store, header, cell.name)
        if not header.flags & (Flag.ABSENT | Flag.SKIP):
            grad = yield from self._received(header, cell, rows)
        self._judge(header, store.push(header, cell, grad, worker.lanes[0], worker.restored_by), cell.name, grad)

    def _received(self, header: Header, cell: ServedTable, rows: int) -> Wants[RowGradient | None]:
        """The rows of a push; None where they lie in lent memory and the push will be refused anyway."""
        if not header.flags & Flag.LENT:
            grad = RowGradient(self._pushes, rows, cell.spec)
            yield from self._worker.stream.payload(header, [memory.view(grad.ids), memory.view(grad.grads)])
        elif self._store.wanted(header, cell):
            ids, grads = self._lent(header, cell).pushed(header, cell.spec, rows)
            judged = cell.push_norms is not None or not cell.non_finite.passes  # of a copy, which nobody can change any more
            apart = judged or (self._store.decided is not None and self._store.decided.early)
            grad = RowGradient(self._pushes, rows, cell.spec, None if apart else grads)
            grad.ids.copy_(ids)  # before the check: nobody may change them after it
            if apart:
                grad.grads.copy_(grads)
        else:
            return None
        _check_ids(cell, grad.ids)
        return grad

    def _initial(self, header: Header) -> Wants[None]:
        """Take first values of rows from rank 0."""
        worker, store, cell = self._worker, self._store, self._store.row_cell(header.table)
        if worker.rank != 0 or store.phase is not Phase.INIT:
            raise WireError(f"ROW_INIT from worker {worker.rank} while this shard is {store.phase.value}; only rank 0 starts a new run")
        rows = _rows(header, cell, lookup_limit(cell.spec.dim))
        if rows:
            info = check_info(store, header, cell.name)
            first = RowGradient(self._pushes, rows, cell.spec)
            yield from worker.stream.payload(header, [memory.view(first.ids), memory.view(first.grads)])
            _check_ids(cell, first.ids)
            with cell.lock:
                cell.begin(first.ids, first.grads, info.rows)
            first.free()
        if header.flags & Flag.STORE and store.initialised_one(cell.index):
            worker.context.initialised()

    def answer(self, cell: ServedTable, waiter: Waiter) -> None:
        """Gather a lookup's rows now (the table's lock is held) and queue them."""
        header = self._worker.base._replace(
            kind=Kind.ROWS, term=self._store.term, clock=waiter.clock, request=waiter.request, table=cell.number,
            block=cell.index, version=(self._store.attempt, cell.n),
        )  # fmt: skip
        stream = self._worker.stream
        if waiter.ids is None:
            stream.put_frame(header)
            return
        if waiter.place is not None:
            at, out = waiter.place
            cell.table.pull(waiter.ids, out)
            lent = Sending([header.lent(at, out.nbytes)])
            stream.put(lambda: lent)
            return
        self._put(header, cell.table.pull(waiter.ids))

    def _put(self, header: Header, body: torch.Tensor) -> None:
        """Queue an answer that has been gathered."""
        stream = self._worker.stream
        with self._counting:
            self._queued += 1
        stream.put(lambda: Sending(stream.framed(header, memory.view(body)), self._one_less), large=body.nbytes >= LARGE)

    def _one_less(self) -> None:
        """An answer has been sent: the next lookup may be read."""
        with self._counting:
            self._queued -= 1
            full = self._queued == MAX_QUEUED - 1
        if full:
            self._worker.stream.wake()


def _rows(header: Header, cell: ServedTable, limit: int) -> int:
    """How many rows a frame of ids and values has. Raises WireError before anything of it is read."""
    rows, rest = divmod(header.length, row_bytes(cell.spec.dim))
    if rest or rows > limit:
        raise WireError(
            f"{header.kind.name} of {cell.name} has {header.length} bytes, expected a multiple of {row_bytes(cell.spec.dim)} "
            f"(an id and {cell.spec.dim} elements), at most {limit} rows"
        )
    return rows


def _check_ids(cell: ServedTable, ids: torch.Tensor) -> None:
    """Ids are ascending without a repeat, and in the table's range where it has one. Raises WireError."""
    if not ids.numel():
        return
    if not bool((ids[1:] > ids[:-1]).all()):
        raise WireError(f"ids of {cell.name} are not in ascending order without a repeat")
    first, last, count = int(ids[0]), int(ids[-1]), cell.spec.num_rows
    if count is not None and not 0 <= first <= last < count:
        raise WireError(f"ids of {cell.name} go from {first} to {last}; it has {count} rows")


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
