"""A worker's conversation with a shard, as `shard/session.py` leads it: hello, then frames. What counts is the shipped store's."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from psjob.modes import format_mode
from psjob.protocol.messages import AckedDoubted
from psjob.protocol.records import PIECE, RecordDelta, RecordId, RecordsOnStream
from psjob.protocol.shard.events import Phase
from psjob.shard.checks import check_acked, check_leave
from psjob.shard.deduplication import Verdict
from psjob.shard.pending import Waiter
from psjob.wire.frame import Flag, Header, Kind, WireError
from tests.simulation.protocol.ledger import Value
from tests.simulation.protocol.network import End

if TYPE_CHECKING:
    from tests.simulation.protocol.shard import SimShard

WAITING_SECONDS = 2.0
BLOCKS = (Kind.PUSH, Kind.PULL, Kind.ROW_PUSH, Kind.LOOKUP)


class Closed(Exception):
    """This stream is of no use any more."""


class SimSession:
    """A worker's stream. Frames are (header, body) pairs."""

    def __init__(self, shard: SimShard, end: End, header: Header, hello: Mapping[str, Any], number: int) -> None:
        self.shard, self.store, self.end, self.hello, self.number = shard, shard.store, end, hello, number
        self.rank, self.incarnation = header.worker, (header.start, header.rewinds)
        self.records = RecordsOnStream()
        self.welcomed = self.admitted = False
        self.restored_by = -1
        self.told = shard.clock()
        self.base = Header(Kind.PARAM, attempt=shard.attempt, worker=self.rank, start=header.start, rewinds=header.rewinds)
        end.heard, end.ended = self.heard, self.over

    @property
    def done(self) -> bool:
        """The stream has ended."""
        return self.end.closed

    @property
    def mode(self) -> str:
        """The one that the worker's process runs."""
        return str(self.hello.get("mode"))

    @property
    def stale(self) -> bool:
        """Has a restore come since this process was placed?"""
        return self.restored_by not in (-1, self.store.restored_by)

    # -- out ---------------------------------------------------------------------------------------

    def tell(self, kind: Kind, body: Any = None, size: int = 0, **fields: Any) -> None:
        """Send a control frame."""
        self.end.send((self.base._replace(kind=kind, term=self.store.term, **fields), body), size)

    def rewind(self) -> None:
        """Let the worker begin again in the job's mode."""
        self.tell(Kind.REWIND, {"mode": format_mode(self.store.mode)})
        self.hang_up()

    def hang_up(self) -> None:
        """Close after what was told."""
        if not self.end.closed:
            self.end.close()
            self.over()

    def over(self) -> None:
        """The stream has ended."""
        self.store.drop_waiters(self, self.rank)
        self.shard.session_over(self)

    def param(self, cell: Any, waiter: Waiter) -> None:
        """Answer a push or pull of a block."""
        self._answer(Kind.PARAM, cell, waiter, block=cell.index)

    def rows(self, cell: Any, waiter: Waiter) -> None:
        """Answer a push or lookup of a table."""
        self._answer(Kind.ROWS, cell, waiter, table=cell.number)

    def waiting(self, waiter: Waiter, cell: Any, missing: list[int], seconds: float) -> None:
        """Say that an answer is held."""
        self.tell(Kind.WAITING, {"workers": missing, "for": cell.name, "seconds": round(seconds, 1)}, request=waiter.request)

    def _answer(self, kind: Kind, cell: Any, waiter: Waiter, **which: int) -> None:
        shard, store = self.shard, self.store
        asks = shard.wishes if store.mode.decided else shard.snapshot_step == waiter.version
        header = self.base._replace(
            kind=kind, term=store.term, clock=waiter.clock, request=waiter.request, version=(store.attempt, cell.n),
            flags=Flag.SNAPSHOT if asks else Flag.NONE, **which,
        )  # fmt: skip
        held = cell.held._replace(digest=cell.held.before) if waiter.before else cell.held
        self.end.send((header, held), shard.world.plan.record_bytes // 100)

    # -- coming in ---------------------------------------------------------------------------------

    def admit(self, now: float) -> None:
        """A shard other than 0 welcomes a worker once it serves the term that the worker was welcomed in."""
        if self.admitted or self.done:
            return
        store, shard = self.store, self.shard
        if shard.final:
            self.tell(Kind.FINISHED)
            self.hang_up()
            return
        ready = store.phase is Phase.SERVING or (store.phase is Phase.INIT and self.hello.get("init"))
        if not ready or store.term < int(self.hello.get("term", 0)):
            if now - self.told > WAITING_SECONDS:
                self.told = now
                self.tell(Kind.WAITING, {"shard": store.index, "state": store.phase.value, "term": store.term})
            return
        together = store.mode.rewinds_together and store.phase is Phase.SERVING
        if (together and int(self.hello.get("restore_id", 0)) != store.restore_id) or self.mode != format_mode(store.mode):
            self.rewind()
            return
        try:
            self.join()
        except WireError as error:
            self.refuse(error)
            return
        self.welcome()

    def join(self) -> None:
        """As `Session.join`. Raises WireError."""
        store = self.store
        acked, attempt = int(self.hello.get("acked", 0)), int(self.hello.get("attempt", 0))
        self.restored_by = store.restored_by
        if not store.admission.meet(self.rank, self.incarnation):
            raise WireError(f"worker {self.rank}: a newer process of this rank is here; this one is fenced")
        self.shard.world.promises.met(self.shard.pod, self.rank, self.incarnation)
        if store.phase is not Phase.SERVING or not (self.hello.get("fresh") or 0 < attempt < store.attempt) or not store.admission.owned:
            return
        try:
            check_acked(store, self.rank, acked)
        except WireError:
            self.shard.tell(AckedDoubted(self.shard.index))
            raise
        lost = store.admission.jump(self.rank, acked)
        store.counters.lost += lost
        if lost:
            store.given_up(self.rank, acked)
            store.ask_again()

    def welcome(self, **extra: Any) -> None:
        """As `Session.welcome`."""
        store = self.store
        row = store.admission.rows[self.rank]
        cells = {cell.position: cell.index for cell in store.all_cells()}
        body = {
            "complete": row.complete, "open": [cells[p] for p in sorted(row.open)], "leftAt": row.left_at, "attempt": store.attempt,
            "term": store.term, "serving": store.phase is Phase.SERVING,
        }  # fmt: skip
        self.admitted = True
        self.welcomed = not extra.get("init")
        self.tell(Kind.WELCOME, body | extra)

    # -- frames ------------------------------------------------------------------------------------

    def heard(self, frame: tuple[Header, Any]) -> None:
        """A frame came."""
        header, body = frame
        try:
            self._handle(header, body)
        except Closed:
            self.hang_up()
        except WireError as error:
            self.refuse(error)

    def refuse(self, error: WireError) -> None:
        """Say what was wrong, and close."""
        self.shard.trace(f"closes a stream of worker {self.rank}: {error}")
        self.tell(Kind.ERROR, {"code": "protocol", "error": str(error)})
        self.hang_up()

    def _handle(self, header: Header, body: Any) -> None:
        shard, store, kind = self.shard, self.store, header.kind
        if kind in BLOCKS and (store.phase is not Phase.SERVING or (store.mode.rewinds_together and header.term != store.term)):
            if store.mode.rewinds_together:
                self.rewind()
            else:
                self.tell(Kind.WAITING, {})
            raise Closed
        if kind is Kind.PUSH or kind is Kind.ROW_PUSH:
            verdict = store.push(header, shard.cell(header), Value(body), self, self.restored_by)
            if verdict is Verdict.ADMIT:
                shard.world.promises.admitted(shard.pod, self.rank, self.incarnation)
            if verdict is Verdict.GAP:
                raise WireError(f"worker {self.rank} pushed clock {header.clock} of part {header.block}, "
                                f"complete are {store.admission.rows[self.rank].complete}")  # fmt: skip
            if verdict is Verdict.FENCED:
                raise Closed
        elif kind is Kind.PULL or kind is Kind.LOOKUP:
            store.pull(header, shard.cell(header), self)
        elif kind is Kind.INIT or kind is Kind.ROW_INIT:
            shard.first_value(self, header)
        elif kind is Kind.MARK:
            shard.to_coordinator(self, header, body)
            shard.marked(self.rank, header.request)
        elif kind is Kind.LEAVE:
            if not self.stale:
                check_leave(store, header)
                store.leave(self.rank, header.clock)
                shard.left(self.rank)
                shard.to_coordinator(self, header, body)
        elif kind is Kind.RECORD:
            self.records.last = body
            shard.to_coordinator(self, header, body)
        elif kind is Kind.RECORD_DELTA:
            try:
                record = self.records.take(RecordDelta(header.part, *header.version, body))
            except ValueError as error:
                raise WireError(str(error)) from None
            shard.to_coordinator(self, header._replace(kind=Kind.RECORD), record)
        elif kind is Kind.RECORD_PIECE:
            record = RecordId(header.clock, *header.version)
            count, whole = shard.records.take(self.rank, record, header.part, body)
            if whole is not None:
                shard.to_coordinator(self, header._replace(kind=Kind.RECORD), whole)
            self.tell(Kind.RECORD_HAS, clock=record.clock, version=header.version, part=count)
        else:
            shard.to_coordinator(self, header, body)

    def give_back(self, record: bytes, clock: int) -> None:
        """Give a worker its record, in pieces from where it says that it has it."""
        if len(record) <= PIECE:
            self.tell(Kind.RECORD, record, len(record), clock=clock)
            return
        name, has = RecordId(clock, zlib.crc32(record), len(record)), self.hello.get("has")
        began = int(has[3]) if has and has[:3] == list(name) else 0
        for at in range(min(began, len(record)), len(record), PIECE) if began < len(record) else (len(record),):
            data = record[at : at + PIECE]
            self.tell(Kind.RECORD_PIECE, data, len(data), clock=clock, part=at, version=(name.crc, name.size))
