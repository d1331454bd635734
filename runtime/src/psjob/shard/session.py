"""One worker's conversation: hello, then frames until it ends. Each of its streams is read, and what came applied, by a loop of the pool.

The first stream carries everything; further lanes only blocks, so that several are received and applied at once. Answers go out by the
stream that asked, from memory that does not change while it is sent. A stream agrees once on how its pushes are written, and how it is
answered.

A session begins when the one before it has ended, and this shard has come to serve the term that the worker was welcomed in. Gradients
that overlap sent before their step was made count when a push names them, and are dropped with their session.
"""

from __future__ import annotations

import secrets
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from psjob.codecs import Codec
from psjob.layout import memory
from psjob.modes import format_mode
from psjob.protocol.messages import AckedDoubted
from psjob.protocol.records import PIECE, RecordDelta, RecordId, RecordIn, RecordsOnStream
from psjob.protocol.shard.events import Phase
from psjob.shard.block import ParameterBlock
from psjob.shard.checks import (
    MOST_SAID,
    REACHED,
    check_acked,
    check_leave,
    check_pull,
    check_push,
    check_reached,
    info_of,
    most_info,
    most_info_values,
)
from psjob.shard.deduplication import Verdict
from psjob.shard.pending import Gradient, Received
from psjob.shard.row_frames import RowFrames
from psjob.shard.worker_fields import known
from psjob.shard.worker_stream import Lending, ShardContext, ShardLane, WorkerState, lent_bytes, slots_of, transports_of
from psjob.wire.event_loop import NonBlockingStream, Sending
from psjob.wire.frame import MAX_RECORD, ROW_KINDS, Flag, Header, Kind, WireError, dump
from psjob.wire.reading import Pause, StreamClosed, Wants
from psjob.wire.shared_memory import Region

BEHIND_SECONDS = 0.01
"""From one look to the next at whether the coordinator has heard what a worker has said."""
WAITING_SECONDS = 2.0
OF_VIEW = (Kind.PUSH, Kind.EARLY, Kind.PULL, Kind.STATE, Kind.LOOKUP, Kind.ROW_PUSH, Kind.ROW_IDS)
"""Frames that only a shard which serves their term takes."""
END_SECONDS = 5.0
"""For the end of a session whose worker has dialled again."""
APART = 1 << 20
"""Bytes of a block whose update takes longer than to wake a thread for it."""
MORE_STATES = 16
"""A worker that asks again, on a step that it repeats, asks for a few twice."""


@dataclass(frozen=True)
class CoordinatorCalls:
    """What the coordinator hears of workers, in shard 0's process."""

    hello: Callable[[Session], None]
    behind: Callable[[Session], bool]
    frame: Callable[[Session, Header, dict[str, Any], bytes], None]
    ended: Callable[[Session], None]


@dataclass(frozen=True)
class SessionContext(ShardContext):
    """What sessions have of their shard beside that. `coordinator`: None in any process except shard 0's."""

    coordinator: CoordinatorCalls | None
    records: RecordsHere
    marked: Callable[[int, int], None]
    """Told of a worker's rank and the snapshot that it holds its pushes for."""
    left: Callable[[int], None]
    sessions: dict[int, Session] = field(default_factory=dict)
    """The newest one by rank."""
    admitting: dict[Session, None] = field(default_factory=dict)
    """Those that wait until this shard serves their term."""


class Session(WorkerState):
    """A worker's conversation with this shard. `welcomed` is set by the coordinator (shard 0) or by `admit_worker` (others).

    Raises WireError for a hello that asks for what no worker has.
    """

    context: SessionContext

    def __init__(self, context: SessionContext, stream: NonBlockingStream, header: Header, hello: dict[str, Any]) -> None:
        super().__init__(context, stream, header, hello)
        self._coordinator = context.coordinator
        self.after: list[Callable[[], None]] = []
        """Called when this session is over."""
        self.welcomed = False
        self.row_frames = RowFrames(self, self.judge)
        self.lanes.append(ShardLane(self, stream, self.row_frames.answer))
        self.records = RecordFrames(self, context.records, self.to_coordinator)
        self.states = StateFrames(self)
        self._token = secrets.token_hex(16)
        """Who knows it may open further lanes of this very session."""
        self._lent = False
        self._ticket = ""
        self._slots = slots_of(hello)
        self._transports = transports_of(hello, "transports")
        self._lock = threading.Lock()
        self._reading = 1
        """Streams that are read, and pushes that were handed over."""

    def run(self, old: Session | None = None) -> Wants[None]:
        """Serve until the stream ends, once `old` is over. Raises WireError on a broken rule; the server answers it."""
        return self._read(self.lanes[0], admit_worker(self, old))

    def run_lane(self, stream: NonBlockingStream, hello: dict[str, Any]) -> Wants[None]:
        """Serve a further stream of the same worker, until any of them ends. Raises WireError."""
        lane = ShardLane(self, stream, self.row_frames.answer)
        with self._lock:
            if self.done.is_set() or not secrets.compare_digest(str(hello.get("token")), self._token):
                raise WireError(f"worker {self.rank}: this lane belongs to another session; dial again")
            if len(self.lanes) >= self.most_lanes:
                raise WireError(f"worker {self.rank} has {len(self.lanes)} lanes, at most {self.most_lanes} are served")
            self.lanes.append(lane)
            self._reading += 1
        return self._read(lane)

    def close(self, but: ShardLane | None = None) -> None:
        """Close every stream; what reads them ends."""
        with self._lock:
            lanes = [lane for lane in self.lanes if lane is not but]
        for lane in lanes:
            lane.stream.close()

    def _read(self, lane: ShardLane, first: Wants[None] | None = None) -> Wants[None]:
        try:
            if first is not None:
                yield from first
            while True:
                if lane.stream.full:
                    yield from lane.stream.emptied()
                while self._coordinator is not None and self._coordinator.behind(self):
                    yield Pause(BEHIND_SECONDS)
                header = yield from lane.stream.next_header(None)
                wants = self._handle(lane, header)
                if wants is not None:
                    yield from wants
                if lane.stream.ahead():
                    lane.stream.pass_on()
        except StreamClosed:
            pass
        finally:
            lane.end()
            self._let_go()
            self.close(but=lane)  # its own may still have to tell the worker what was wrong

    def _let_go(self) -> None:
        """A stream, or a push that was handed over, has come to its end."""
        with self._lock:
            self._reading -= 1
            if not self._reading:
                self._is_over()

    def _is_over(self) -> None:
        self.done.set()
        self.held.clear()
        for act in self.after:
            act()
        if self._coordinator is not None:
            self._coordinator.ended(self)
        if self.context.broker is not None:
            self.context.broker.forget(self._ticket)
        self.lending = None  # gigabytes, which would stay with whatever still knows this session
        self.row_frames.close()

    # -- out -----------------------------------------------------------------------------------

    def tell(self, kind: Kind, body: Any = None, payload: bytes | None = None, **fields: Any) -> None:
        """Queue a control frame: JSON `body`, or raw `payload`."""
        header = self.base._replace(kind=kind, term=self.store.term, **fields)
        if payload is None:
            self.stream.put_control(header, b"" if body is None else dump(body))
        elif kind is Kind.RECORD and len(payload) > PIECE:
            self.records.give_back(header, payload)
        else:
            self.stream.put_frame(header, payload)

    @property
    def mode(self) -> str:
        """The mode that this worker's process runs."""
        return str(self.hello.get("mode", format_mode(self.store.mode)))

    @property
    def stale(self) -> bool:
        """Has a restore come since this process was placed? It begins again; what it says of its steps is of weights that are undone."""
        return self.restored_by not in (-1, self.store.restored_by)

    def rewind(self) -> None:
        """Let the worker begin again in the mode of this job, and close."""
        self.tell(Kind.REWIND, {"mode": format_mode(self.store.mode)})
        self.hang_up()

    def hang_up(self) -> None:
        """Close after what is queued has been sent."""
        self.stream.finish()

    def welcome(self, **extra: Any) -> None:
        """Tell the worker what this shard has of it: complete clock, open blocks, attempt."""
        with self.store.lock:
            if len(self.lanes) == 1:  # it opens others once only
                self.most_lanes = self.streams()
            row = self.store.admission.rows[self.rank]
            cells = {c.position: c.index for c in self.store.all_cells()}
            body = {
                "complete": row.complete,
                "open": [cells[p] for p in sorted(row.open)],
                "leftAt": row.left_at,
                "attempt": self.store.attempt,
                "term": self.store.term,
                "serving": self.store.phase is Phase.SERVING,
                "lanes": self.most_lanes,
                "token": self._token,
                "codecs": self.encoded.agreed,
            }
        self.welcomed = not extra.get("init")
        self.tell(Kind.WELCOME, body | self._offer() | self.row_frames.offer() | extra)

    @property
    def transport(self) -> str:
        """How this worker's blocks and rows come and go: shared, tcp, or mixed."""
        blocks = "shared" if self._lent else "tcp"
        return blocks if not self.store.row_cells or self.row_frames.transport == blocks else "mixed"

    def _offer(self) -> dict[str, Any]:
        """Where a worker of this host may come for shared memory; nothing for any other."""
        broker, store, lanes = self.context.broker, self.store, self.most_lanes
        if broker is None or store.places is None or not self.near or "shared" not in self._transports:
            return {}
        span, region, slots = store.places, store.region, self._slots

        def give(fd: int) -> Region:
            lending = Lending(store, span, fd, lanes, slots)
            if store.region is not region:
                raise WireError("this shard has taken other memory meanwhile")
            with self._lock:
                if self.done.is_set():
                    raise WireError(f"worker {self.rank} has gone meanwhile")
                self.lending, self._lent = lending, True
            return lending.answers

        broker.forget(self._ticket)
        self._ticket = broker.expect(give)
        return {"shared": self.offer(self._ticket, lent_bytes(store, lanes, slots))}

    # -- in ------------------------------------------------------------------------------------

    def join(self) -> None:
        """Take note of this process: fence older ones, and count what this shard lost of a worker that knew an attempt before.

        Raises WireError when a newer process of this rank has been here, or more was acknowledged to it than can have been.
        """
        acked, attempt = int(self.hello.get("acked", 0)), int(self.hello.get("attempt", 0))
        with self.store.lock:
            self.restored_by = self.store.restored_by
            if not self.store.admission.meet(self.rank, self.incarnation):
                raise WireError(f"worker {self.rank}: a newer process of this rank is here; this one is fenced")
            self.store.note_rank(self.rank)
            if self.store.phase is not Phase.SERVING:
                return
            if not (self.hello.get("fresh") or 0 < attempt < self.store.attempt):
                return
            if not self.store.admission.rows[self.rank].owned:
                return
            try:
                check_acked(self.store, self.rank, acked)
            except WireError:
                self.context.tell(AckedDoubted(self.store.index))  # a lost process that lived on, cut off, may have acknowledged more
                raise
            lost = self.store.admission.jump(self.rank, acked)
            self.store.samples.forget(self.rank)
            self.store.counters.lost += lost
        if lost:
            self.store.ask_again()

    def _handle(self, lane: ShardLane, header: Header) -> Wants[None] | None:
        """Do what a frame asks for; what is left to be done once more of it has come. Raises WireError."""
        self._check(header)
        kind = header.kind
        if kind in REACHED and not self.stale:
            check_reached(self.store, header)
        if kind is Kind.PUSH:
            return self._push(lane, header)
        if kind is Kind.EARLY:
            return self._early(lane, header)
        if kind is Kind.PULL:
            cell = self.store.cell(header.block)
            check_pull(self.store, header, cell)
            self.store.pull(header, cell, lane)
        elif kind is Kind.INFO:
            return self._info(lane, header)
        elif kind in ROW_KINDS and lane is self.lanes[0]:
            return self.row_frames.handle(header)
        elif lane is not self.lanes[0]:
            raise WireError(f"{kind.name} belongs on a worker's first stream")
        elif kind is Kind.INIT:
            return self._init(header)
        elif kind is Kind.MARK:
            self.to_coordinator(header, {})
            self.context.marked(self.rank, header.request)
        elif kind is Kind.LEAVE:
            if not self.stale:
                check_leave(self.store, header)
                self.store.leave(self.rank, header.clock)
                self.context.left(self.rank)
                self.to_coordinator(header, {})
        elif kind is Kind.RECORD:
            return self.records.whole(header)
        elif kind is Kind.RECORD_DELTA:
            return self.records.delta(header)
        elif kind is Kind.RECORD_PIECE:
            return self.records.piece(header)
        elif kind is Kind.STATE:
            self.states.asked(header)
        else:
            return self._said(header)
        return None

    def _check(self, header: Header) -> None:
        """What every frame after hello must fit. Raises WireError; a frame of an older term ends the stream with REWIND."""
        if header.run != self.context.run or header.worker != self.rank or (header.start, header.rewinds) != self.incarnation:
            raise WireError(f"{header.kind.name} does not carry the run, rank and incarnation of this stream's hello")
        if header.kind in OF_VIEW:
            store = self.store
            if store.phase is not Phase.SERVING or (store.mode.rewinds_together and header.term != store.term):
                if store.mode.rewinds_together:
                    self.rewind()
                else:
                    self.tell(Kind.WAITING, {})
                    self.hang_up()
                raise StreamClosed(f"worker {self.rank} speaks of term {header.term}, this is {store.term}")

    def _said(self, header: Header) -> Wants[None]:
        """A frame with a body that the coordinator or this stream itself is told."""
        kind = header.kind
        if kind not in MOST_SAID:
            raise WireError(f"{kind.name} is not a worker's message")
        body = known(kind, (yield from self.stream.json(header, *MOST_SAID[kind])))
        if kind is Kind.CODEC:
            self.encoded.chosen(body.get("pull"))
        else:
            self.to_coordinator(header, body)

    def _push(self, lane: ShardLane, header: Header) -> Wants[None]:
        store, cell = self.store, self.store.cell(header.block)
        codec = self.encoded.codec_of(header, cell.block)
        check_push(store, header, cell, codec is not None)
        if header.flags & Flag.STORE:
            weights = torch.empty(cell.block.length, dtype=getattr(torch, cell.block.dtype), device="cpu")
            yield from lane.stream.payload(header, [memory.view(weights)])
            store.keep(cell, weights, header.version[1], self.restored_by)
            return
        grad = lane.held.take(header) if header.flags & Flag.HELD and store.wanted(header, cell) else None
        if header.length:
            grad = yield from self._receive(lane, header, cell, codec)
        lane.held.drop(header.block, header.clock)
        take = partial(self._take, lane, header, cell, grad)
        if grad is None or not self._makes_update(header, cell) or not self._hand_over(lane, take):
            take()

    def _take(self, lane: ShardLane, header: Header, cell: ParameterBlock, grad: Received | None) -> None:
        self.judge(header, self.store.push(header, cell, grad, lane, self.restored_by), cell.name, grad)

    def _makes_update(self, header: Header, cell: ParameterBlock) -> bool:
        """Is a push a large one, the last that its block waits for? In sync only, where it can be taken after later ones.

        And only of lent memory: the cores are idle then, and are not where streams bring the pushes.
        """
        store = self.store
        if not header.flags & Flag.LENT or cell.block.nbytes < APART or not store.mode.steady:
            return False
        others = store.workers if cell.group is None else len(cell.group)
        return len(cell.pending) + 1 >= others and store.wanted(header, cell)

    def _hand_over(self, lane: ShardLane, take: Callable[[], None]) -> bool:
        """Let another loop that is idle take a push, beside what this one reads next. False: none is. The session outlives it."""

        def beside() -> None:
            try:
                take()
            except (WireError, StreamClosed):  # a restore, or another process of this rank, came between
                self.close()
            finally:
                if lane.stream.closed:
                    self.store.drop_waiters(lane, self.rank)  # they were dropped before this one was there
                self._let_go()

        with self._lock:
            self._reading += 1
        if lane.stream.hand_over(beside):
            return True
        self._let_go()
        return False

    def judge(self, header: Header, verdict: Verdict, name: str, grad: Received | None) -> None:
        """Give back what a push brought and nobody took; end the stream where it could not be taken."""
        if grad is not None and verdict is not Verdict.ADMIT:
            grad.free()
        if verdict is Verdict.GAP:
            raise WireError(
                f"worker {self.rank} pushed step {header.clock} of {name}; "
                f"this shard has {self.store.admission.rows[self.rank].complete} complete steps of it"
            )
        if verdict is Verdict.FENCED:
            raise StreamClosed(f"worker {self.rank}: this stream is older than the last restore or than another process of its rank")

    def _early(self, lane: ShardLane, header: Header) -> Wants[None]:
        cell = self.store.cell(header.block)
        codec = self.encoded.codec_of(header, cell.block)
        check_push(self.store, header, cell, codec is not None)
        lane.held.drop(header.block, header.clock - 1)
        grad = yield from self._receive(lane, header, cell, codec)
        with self.store.lock:
            self.store.counters.bytes += header.length
        if grad is not None:
            lane.held.keep(header, grad)

    def _receive(self, lane: ShardLane, header: Header, cell: ParameterBlock, codec: Codec | None) -> Wants[Gradient | None]:
        """The gradient that follows its header, in the codec that was checked; None where the push of it will be refused anyway."""
        if header.flags & Flag.LENT and self.store.wanted(header, cell):
            if self.lending is None:
                raise WireError(f"push of block {header.block} lies in lent memory, and none was handed over")
            lent = self.lending.gradient(header, cell.block)
            grad = self.store.target(header, cell) if self.store.decided is not None and self.store.decided.early else None
            if grad is None:
                return lent
            grad.flat.copy_(lent.flat)
            return grad
        grad = self.store.target(header, cell)
        if grad is None:
            yield from lane.stream.skip(header)
        elif codec is None:
            began = time.monotonic()
            yield from lane.stream.payload(header, [grad.raw])
            told = self.encoded.measured(header, time.monotonic() - began, len(self.lanes))
            if told is not None:
                self.tell(Kind.CODEC, told)
        else:
            body = lane.room(header.length)
            yield from lane.stream.payload(header, [memory.view(body)])
            self.encoded.decode(codec, header, body, grad.flat)
        return grad

    def _info(self, lane: ShardLane, header: Header) -> Wants[None]:
        body = known(Kind.INFO, (yield from lane.stream.json(header, most_info(self.store), most_info_values(self.store))))
        self.store.infos.learn(self.rank, header.info, info_of(self.store, self.rank, body), self.store.mode.delay)

    def _init(self, header: Header) -> Wants[None]:
        cell = self.store.cell(header.block)
        if self.rank != 0 or self.store.phase is not Phase.INIT:
            raise WireError(f"INIT from worker {self.rank} while this shard is {self.store.phase.value}; only rank 0 starts a new run")
        weights = torch.empty(cell.block.length, dtype=getattr(torch, cell.block.dtype), device="cpu")
        yield from self.stream.payload(header, [memory.view(weights)])
        if self.store.initialise(header.block, weights):
            self.context.initialised()

    def to_coordinator(self, header: Header, body: dict[str, Any], blob: bytes = b"") -> None:
        """Let the coordinator have a frame, if it is in this process."""
        if self._coordinator is not None:
            self._coordinator.frame(self, header, body, blob)


def admit_worker(session: Session, old: Session | None) -> Wants[None]:
    """Welcome a worker once `old` is over, or let shard 0's coordinator do so. Raises WireError if it may not join."""
    if old is not None:
        until = time.monotonic() + END_SECONDS
        old.after.append(session.stream.wake)
        while not old.done.is_set() and (left := until - time.monotonic()) > 0:
            yield Pause(left)
    context, store = session.context, session.store
    if context.coordinator is not None:
        context.coordinator.hello(session)
        return
    context.admitting[session] = None
    try:
        yield from _served(session)
    finally:
        context.admitting.pop(session, None)
    if context.job.final:
        session.tell(Kind.FINISHED)
        session.hang_up()
        return
    together = store.mode.rewinds_together and store.phase is Phase.SERVING
    if (together and int(session.hello.get("restore_id", 0)) != store.restore_id) or session.mode != format_mode(store.mode):
        session.rewind()
        return
    session.join()
    session.welcome()


def _served(session: Session) -> Wants[None]:
    """Wait until this shard serves the worker's term, or all is over; tell the worker now and then."""
    context, store, hello = session.context, session.store, session.hello
    told = time.monotonic()
    while not context.job.final:
        ready = store.phase is Phase.SERVING or (store.phase is Phase.INIT and hello.get("init"))
        if ready and store.term >= int(hello.get("term", 0)):
            return
        yield Pause(max(0.0, told + WAITING_SECONDS - time.monotonic()))
        if context.sessions.get(session.rank) is not session:
            raise StreamClosed(session.stream.peer)
        if time.monotonic() - told >= WAITING_SECONDS:
            told = time.monotonic()
            session.tell(Kind.WAITING, {"shard": store.index, "state": store.phase.value, "term": store.term})


class RecordsHere:
    """Records by rank, as far as they have come. They outlive the streams that bring them, so that a break does not begin one anew."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_rank: dict[int, RecordIn] = {}

    def take(self, rank: int, record: RecordId, offset: int, data: bytes | bytearray) -> tuple[int, bytes | None]:
        """A piece came: how much of its record is here, and the record where `RecordIn.take` gives it."""
        with self._lock:
            here = self._by_rank.setdefault(rank, RecordIn())
            whole = here.take(record, offset, data)
            return here.count, whole


class RecordFrames:
    """The record frames of one worker. `records` are those of all; `give` hands a whole one to the coordinator, if it is here."""

    def __init__(self, worker: WorkerState, records: RecordsHere, give: Callable[[Header, dict[str, Any], bytes], None]) -> None:
        self._worker, self._records, self._give = worker, records, give
        self._stream = RecordsOnStream()

    def whole(self, header: Header) -> Wants[None]:
        """A RECORD of the worker. Raises WireError."""
        record = bytes((yield from self._worker.stream.body(header)))  # above PIECE a worker sends it in pieces
        self._stream.last = record if len(record) <= PIECE else None
        self._give(header, {}, record)

    def delta(self, header: Header) -> Wants[None]:
        """A RECORD_DELTA of the worker. Raises WireError if it does not go with the record before."""
        worker, (crc, size) = self._worker, header.version
        data = bytes((yield from worker.stream.body(header, PIECE)))
        if size > PIECE:
            raise WireError(f"a record of {size} bytes in one frame; above {PIECE} it comes in pieces")
        try:
            record = self._stream.take(RecordDelta(header.part, crc, size, data))
        except ValueError as error:
            raise WireError(f"worker {worker.rank}: {error}") from None
        self._give(header._replace(kind=Kind.RECORD, part=header.generation), {}, record)

    def piece(self, header: Header) -> Wants[None]:
        """A RECORD_PIECE of the worker. Raises WireError if it is none that a coordinator takes."""
        worker, record = self._worker, RecordId(header.clock, *header.version)
        if worker.context.place.index or not 0 < record.size <= MAX_RECORD:
            raise WireError(f"a piece of a record of {record.size} bytes; shard 0 takes records of 1 to {MAX_RECORD}")
        body = yield from worker.stream.body(header, PIECE)
        count, whole = self._records.take(worker.rank, record, header.part, body)
        if whole is not None:
            self._give(header._replace(kind=Kind.RECORD, part=header.generation), {}, whole)
        has = worker.base._replace(kind=Kind.RECORD_HAS, term=worker.store.term, clock=record.clock, version=header.version, part=count)
        worker.stream.put_frame(has)

    def give_back(self, header: Header, blob: bytes) -> None:
        """Send a record in pieces, other frames between them, from where the worker's hello says that it has it."""
        worker, stream, view = self._worker, self._worker.stream, memoryview(blob)
        record = RecordId(header.clock, zlib.crc32(blob), len(blob))
        has = worker.hello.get("has")
        began = has[3] if isinstance(has, list) and len(has) == 4 and has[:3] == list(record) and type(has[3]) is int else 0

        def send(at: int) -> Sending:
            data = view[at : at + PIECE]
            head = header._replace(kind=Kind.RECORD_PIECE, part=at, version=(record.crc, record.size))
            if at + PIECE < len(view):
                stream.put(lambda: send(at + PIECE))
            return Sending(stream.framed(head, data))

        stream.put(lambda: send(min(max(0, began), len(blob))))


class StateFrames:
    """The STATE frames of one worker."""

    def __init__(self, worker: WorkerState) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._count = 0
        """Blocks whose state was asked for and not sent yet."""

    def asked(self, header: Header) -> None:
        """Answer with the state of a block that is no one worker's: slots one after the other, counters as JSON first.

        It is copied when its turn to be sent has come: at most one copy a worker is held. Raises WireError for too many at a time.
        """
        worker = self._worker
        cell = worker.store.cell(header.block)
        if self._count >= len(worker.store.cells) + MORE_STATES:
            raise WireError(f"worker {worker.rank} has asked for the state of {self._count} blocks and taken none")
        with self._lock:
            self._count += 1
        worker.stream.put(partial(self._answer, header, cell), True)

    def _answer(self, header: Header, cell: ParameterBlock) -> Sending | None:
        with self._lock:
            self._count -= 1
        with cell.lock:
            if cell.state is None:
                return None  # a restore has come between, which ends this stream
            copy = cell.state.optimizers().copy()
        worker = self._worker
        head = dump({"slots": {name: t.numel() * t.element_size() for name, t in copy.slots.items()}, **copy.counts()})
        parts = [memoryview(len(head).to_bytes(4, "little") + head), *(memory.view(t) for t in copy.slots.values())]
        answer = worker.base._replace(kind=Kind.STATE, term=worker.store.term, request=header.request, block=header.block)
        return Sending(worker.stream.framed_parts(answer, parts))
