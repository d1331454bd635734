"""One worker's conversation: hello, then frames until it ends. Each of its streams is read, and what came applied, by a loop of the pool.

The first stream carries everything; further lanes only blocks, so that several are received and applied at once. Answers go out by the
stream that asked, from memory that does not change while it is sent. A stream agrees once on how its pushes are written, and how it is
answered.

A session begins when the one before it has ended, and this shard has come to serve the view that the worker was welcomed in. Gradients
that overlap sent before their step was made count when a push names them, and are dropped with their session.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from psjob import codecs, contract
from psjob.codecs import Codec, CodecError, CodecKey, choice
from psjob.layout import memory
from psjob.layout.blocks import Block
from psjob.modes import written
from psjob.process.config import Place
from psjob.protocol.records import PIECE
from psjob.protocol.shard.phase import Phase
from psjob.shard.admission import Verdict
from psjob.shard.believed import known
from psjob.shard.block import Cell
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
from psjob.shard.lane import ShardLane
from psjob.shard.lending import Lending, lent_bytes, slots_of, transports_of
from psjob.shard.pending import Gradient, Received
from psjob.shard.recordframes import RecordFrames
from psjob.shard.rowframes import RowFrames
from psjob.shard.stateframes import StateFrames
from psjob.wire.event_loop import NonBlockingStream
from psjob.wire.frame import ROW_KINDS, Flag, Header, Kind, WireError, dump
from psjob.wire.reading import Pause, StreamClosed, Wants
from psjob.wire.shared_memory import Region

if TYPE_CHECKING:
    from psjob.shard.server import Server


class Encoded:
    """`hello` is the worker's; `one_host`: the stream never leaves this machine. Used by the threads of all its lanes."""

    def __init__(self, place: Place, rank: int, hello: dict[str, Any], one_host: bool) -> None:
        self._config, self._seed, self._rank = place.config.compression, place.config.seed, rank
        wanted = {self._config.push, self._config.pull}
        if contract.AUTO_CODEC in wanted:
            wanted |= {name for _, name in choice.LADDER}
        offered = hello.get("codecs", [])
        listed = offered if isinstance(offered, list) else []
        self.agreed = [codecs.NONE, *sorted(name for name in codecs.CODECS if name in wanted and name in listed)]
        self._numbers = {codec.number for name, codec in codecs.CODECS.items() if name in self.agreed}
        self.push = self._named(hello.get("push"), self._config.push, one_host)
        self.pull = self._named(hello.get("pull"), self._config.pull, one_host)
        self._seen = choice.Goodput()
        self._lock = threading.Lock()

    # -- pushes --------------------------------------------------------------------------------

    def codec_of(self, header: Header, block: Block) -> Codec | None:
        """What a push is written in, its size checked; None: as it is. Raises WireError for what was not agreed."""
        if not header.codec:
            return None
        if header.codec not in self._numbers:
            raise WireError(f"codec {header.codec} was not agreed in hello; {', '.join(self.agreed)} were")
        codec = codecs.numbered(header.codec)
        if header.flags & (Flag.ABSENT | Flag.SKIP | Flag.STORE | Flag.HELD) or codecs.for_block(codec, block, self._config.ratio) is None:
            raise WireError(f"push of block {header.block} ({block.length} elements of {block.dtype}) cannot be in {codec.name}")
        try:
            codec.check_size(header.length, block.length, self._config.ratio)
        except CodecError as error:
            raise WireError(f"push of block {header.block}: {error}") from None
        return codec

    def decode(self, codec: Codec, header: Header, body: torch.Tensor, out: torch.Tensor) -> None:
        """Write a push's numbers to `out`. Raises WireError for a body that no worker can have written."""
        try:
            codec.decode(body, out, CodecKey(self._seed, header.clock, header.block, self._rank), self._config.ratio)
        except CodecError as error:
            raise WireError(f"push of block {header.block}: {error}") from None

    def measured(self, header: Header, seconds: float, lanes: int) -> dict[str, Any] | None:
        """A push came in `seconds` after its header, by one of `lanes`; once that makes a measurement, what to tell the worker."""
        with self._lock:
            if self.push != contract.AUTO_CODEC:
                return None
            self._seen.add(header.clock, header.length, seconds)
            if not self._seen.enough(header.clock):
                return None
            bits = self._seen.bits * lanes
            name = choice.for_push(bits)
            self.push = name if name in self.agreed else codecs.NONE
        return {"push": self.push, "bits": round(bits)}

    # -- answers -------------------------------------------------------------------------------

    def chosen(self, name: object) -> None:
        """The worker has measured its link and wants weights so from now on. Raises WireError for what was not agreed."""
        if name not in self.agreed or name not in contract.PULL_CODECS:
            raise WireError(f"CODEC asks for weights in {str(name)[:40]!r}; agreed are {', '.join(self.agreed)}")
        self.pull = str(name)

    def answer(
        self, header: Header, block: Block, numbers: torch.Tensor, spares: memory.Spares
    ) -> tuple[int, torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """(codec's number, body, which of `spares` holds it) of an answer; None: it is `numbers` itself."""
        codec = None if self.pull == contract.AUTO_CODEC else codecs.for_block(codecs.named(self.pull), block, self._config.ratio)
        if codec is None:
            return 0, numbers, None
        spare = spares.take(codec.bound(block.length, self._config.ratio))
        body = spare[: codec.bound(block.length, self._config.ratio)]
        size = codec.encode(numbers, body, CodecKey(self._seed, header.clock, header.block, self._rank), self._config.ratio)
        return (codec.number, body[:size], spare) if size else (0, numbers, spare)

    # -- inside --------------------------------------------------------------------------------

    def _named(self, said: object, asked: str, one_host: bool) -> str:
        """What this stream begins with: what the job asks for, or where that is left open what the worker chose before."""
        name = asked if asked != contract.AUTO_CODEC else str(said)
        if name in self.agreed:
            return name
        return contract.AUTO_CODEC if asked == contract.AUTO_CODEC and not one_host else codecs.NONE


def said_of(streams: Iterable[Encoded]) -> str | None:
    """How the workers' numbers travel, such as `push int8, pull bf16`; several names where they differ, None where all go as they are."""
    known = list(streams)
    sides = [("push", sorted({stream.push for stream in known})), ("pull", sorted({stream.pull for stream in known}))]
    if all(names in ([], [codecs.NONE]) for _, names in sides):
        return None
    return ", ".join(f"{side} {'+'.join(names)}" for side, names in sides)


class EarlyPushes:
    """Of one worker, and used by the threads that read its streams: at most one gradient a block, and `most` bytes together."""

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, 0
        self._by_block: dict[int, tuple[int, int, Gradient]] = {}
        self._lock = threading.Lock()

    def keep(self, header: Header, gradient: Gradient) -> None:
        """Hold what came by an EARLY frame, if there is room and no later one of its block is here; else give it back."""
        with self._lock:
            clock, number, _ = self._by_block.get(header.block, (-1, -1, None))
            if (clock, number) < (header.clock, header.request):
                self._drop(header.block)
                size = _nbytes(gradient)
                if self._bytes + size <= self._most:
                    self._by_block[header.block] = (header.clock, header.request, gradient)
                    self._bytes += size
                    return
        gradient.free()

    def take(self, header: Header) -> Gradient:
        """The gradient that a HELD push names. Raises WireError where it is not here; the worker then pushes the block whole."""
        with self._lock:
            clock, number, gradient = self._by_block.pop(header.block, (-1, 0, None))
            self._bytes -= 0 if gradient is None else _nbytes(gradient)
        if gradient is None or (clock, number) != (header.clock, header.part):
            raise WireError(f"push of block {header.block} names early data {header.part} of step {header.clock}, which is not held here")
        return gradient

    def drop(self, block: int, clock: int) -> None:
        """Other contents of the block come, or none: what was held up to that clock is not the push."""
        with self._lock:
            if self._by_block.get(block, (clock + 1,))[0] <= clock:
                self._drop(block)

    def clear(self) -> None:
        """A stream has ended, and the others do."""
        with self._lock:
            for block in list(self._by_block):
                self._drop(block)

    def nbytes(self) -> int:
        """Bytes that are held."""
        return self._bytes

    def _drop(self, block: int) -> None:
        held = self._by_block.pop(block, None)
        if held is not None:
            self._bytes -= _nbytes(held[2])
            held[2].free()


def _nbytes(gradient: Gradient) -> int:
    return gradient.flat.numel() * gradient.flat.element_size()


BEHIND_SECONDS = 0.01
"""From one look to the next at whether the coordinator has heard what a worker has said."""
log = logging.getLogger("psjob.shard")


class Session:
    """A worker's conversation with this shard. `welcomed` is set by the coordinator (shard 0) or by `let_in` (others).

    Raises WireError for a hello that asks for what no worker has.
    """

    def __init__(self, server: Server, stream: NonBlockingStream, header: Header, hello: dict[str, Any]) -> None:
        self.server, self.store = server, server.store
        self.rank, self.hello = header.worker, hello
        self.incarnation = (header.start, header.rewinds)
        self.encoded = Encoded(server.place, header.worker, hello, not stream.is_remote)
        self.done = threading.Event()
        self.after: list[Callable[[], None]] = []
        """Called when this session is over."""
        self.welcomed = False
        self.generation = -1
        self.base = Header(
            Kind.PARAM, run=server.run, attempt=self.store.attempt, worker=self.rank, start=header.start, rewinds=header.rewinds
        )
        """What every frame to this worker has in common."""
        self.held = EarlyPushes(self.store.budget // self.store.workers)
        self.lanes = [ShardLane(self, stream)]
        self.row_frames = RowFrames(self)
        self.records = RecordFrames(self)
        self.states = StateFrames(self)
        self._token = secrets.token_hex(16)
        """Who knows it may open further lanes of this very session."""
        self.lending: Lending | None = None
        """Where this worker's blocks lie, from when it has come for memory that this shard lends until the session is over."""
        self._lent = False
        self._ticket = ""
        self._slots = slots_of(hello)
        self._transports = transports_of(hello, "transports")
        self.row_transports = transports_of(hello, "rowTransports")
        self._lock = threading.Lock()
        self._reading = 1

    @property
    def stream(self) -> NonBlockingStream:
        """The one that hello came by."""
        return self.lanes[0].stream

    def run(self, old: Session | None = None) -> Wants[None]:
        """Serve until the stream ends, once `old` is over. Raises WireError on a broken rule; the server answers it."""
        return self._read(self.lanes[0], let_in(self, old))

    def run_lane(self, stream: NonBlockingStream, hello: dict[str, Any]) -> Wants[None]:
        """Serve a further stream of the same worker, until any of them ends. Raises WireError."""
        lane = ShardLane(self, stream)
        with self._lock:
            if self.done.is_set() or not secrets.compare_digest(str(hello.get("token")), self._token):
                raise WireError(f"worker {self.rank}: this lane belongs to another session; dial again")
            if len(self.lanes) >= self.store.lanes:
                raise WireError(f"worker {self.rank} has {len(self.lanes)} lanes, at most {self.store.lanes} are served")
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
                while self.server.coordinator is not None and self.server.coordinator.behind(self):
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
            with self._lock:
                self._reading -= 1
                if not self._reading:
                    self._is_over()
            self.close(but=lane)  # its own may still have to tell the worker what was wrong

    def _is_over(self) -> None:
        self.done.set()
        self.held.clear()
        for act in self.after:
            act()
        if self.server.coordinator is not None:
            self.server.coordinator.ended(self)
        if self.server.counter is not None:
            self.server.counter.forget(self._ticket)
        self.lending = None  # gigabytes, which would stay with whatever still knows this session
        self.row_frames.close()

    # -- out -----------------------------------------------------------------------------------

    def tell(self, kind: Kind, body: Any = None, payload: bytes | None = None, **fields: Any) -> None:
        """Queue a control frame: JSON `body`, or raw `payload`."""
        header = self.base._replace(kind=kind, view=self.store.view, **fields)
        if payload is None:
            self.stream.put_control(header, b"" if body is None else dump(body))
        elif kind is Kind.RECORD and len(payload) > PIECE:
            self.records.give_back(header, payload)
        else:
            self.stream.put_frame(header, payload)

    @property
    def mode(self) -> str:
        """The mode that this worker's process runs."""
        return str(self.hello.get("mode", written(self.store.mode)))

    @property
    def stale(self) -> bool:
        """Has a restore come since this process was placed? It begins again; what it says of its steps is of weights that are undone."""
        return self.generation not in (-1, self.store.generation)

    def rewind(self) -> None:
        """Let the worker begin again in the mode of this job, and close."""
        self.tell(Kind.REWIND, {"mode": written(self.store.mode)})
        self.hang_up()

    def hang_up(self) -> None:
        """Close after what is queued has been sent."""
        self.stream.finish()

    def welcome(self, **extra: Any) -> None:
        """Tell the worker what this shard has of it: complete clock, open blocks, attempt."""
        with self.store.lock:
            row = self.store.admission.rows[self.rank]
            cells = {c.position: c.index for c in self.store.all_cells()}
            body = {
                "complete": row.complete,
                "open": [cells[p] for p in sorted(row.open)],
                "leftAt": row.left_at,
                "attempt": self.store.attempt,
                "view": self.store.view,
                "serving": self.store.phase is Phase.SERVING,
                "lanes": self.store.lanes,
                "token": self._token,
                "codecs": self.encoded.agreed,
            }
        self.welcomed = not extra.get("init")
        self.tell(Kind.WELCOME, body | self._offer() | self.row_frames.offer() | extra)

    @property
    def near(self) -> bool:
        """May this worker and the shard lend each other memory?"""
        place = self.server.place
        return not self.stream.is_remote and (place.config.sharing == "host" or place.index == self.rank)

    @property
    def transport(self) -> str:
        """How this worker's blocks and rows come and go: shared, tcp, or mixed."""
        blocks = "shared" if self._lent else "tcp"
        return blocks if not self.store.row_cells or self.row_frames.transport == blocks else "mixed"

    def _offer(self) -> dict[str, Any]:
        """Where a worker of this host may come for shared memory; nothing for any other."""
        counter, store = self.server.counter, self.store
        if counter is None or store.places is None or not self.near or "shared" not in self._transports:
            return {}
        span, region, slots = store.places, store.region, self._slots

        def give(fd: int) -> Region:
            lending = Lending(store, span, fd, slots)
            if store.region is not region:
                raise WireError("this shard has taken other memory meanwhile")
            with self._lock:
                if self.done.is_set():
                    raise WireError(f"worker {self.rank} has gone meanwhile")
                self.lending, self._lent = lending, True
            return lending.answers

        counter.forget(self._ticket)
        self._ticket = counter.expect(give)
        return {"shared": {"name": counter.address, "token": self._ticket, "bytes": lent_bytes(store, slots)}}

    # -- in ------------------------------------------------------------------------------------

    def join(self) -> None:
        """Take note of this process: fence older ones, and count what this shard lost of a worker that knew an attempt before.

        Raises WireError when a newer process of this rank has been here, or more was acknowledged to it than can have been.
        """
        acked, attempt = int(self.hello.get("acked", 0)), int(self.hello.get("attempt", 0))
        with self.store.lock:
            self.generation = self.store.generation
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
                self.server.control.answer({"did": "doubts"})  # a lost process that lived on, cut off, may have acknowledged more
                raise
            lost = self.store.admission.jump(self.rank, acked)
            self.store.samples.forget(self.rank)
            self.store.counters.lost += lost
        if lost:
            self.store.ask_again()

    def _handle(self, lane: ShardLane, header: Header) -> Wants[None] | None:
        """Do what a frame asks for; what is left to be done once more of it has come. Raises WireError."""
        self.server.check(header, self)
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
            self.server.control.mark(self.rank, header.request)
        elif kind is Kind.LEAVE:
            if not self.stale:
                check_leave(self.store, header)
                self.store.leave(self.rank, header.clock)
                self.server.control.left(self.rank)
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
            store.keep(cell, weights, header.version[1], self.generation)
            return
        grad = lane.held.take(header) if header.flags & Flag.HELD and store.wanted(header, cell) else None
        if header.length:
            grad = yield from self._receive(lane, header, cell, codec)
        lane.held.drop(header.block, header.clock)
        self.judge(header, store.push(header, cell, grad, lane, self.generation), cell.name, grad)

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

    def _receive(self, lane: ShardLane, header: Header, cell: Cell, codec: Codec | None) -> Wants[Gradient | None]:
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
            yield from lane.stream.payload(header, [memory.view(grad.flat)])
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
        self.store.infos.learn(self.rank, header.info, info_of(self.store, self.rank, body))

    def _init(self, header: Header) -> Wants[None]:
        cell = self.store.cell(header.block)
        if self.rank != 0 or self.store.phase is not Phase.INIT:
            raise WireError(f"INIT from worker {self.rank} while this shard is {self.store.phase.value}; only rank 0 starts a new run")
        weights = torch.empty(cell.block.length, dtype=getattr(torch, cell.block.dtype), device="cpu")
        yield from self.stream.payload(header, [memory.view(weights)])
        if self.store.initialise(header.block, weights):
            self.server.initialised()

    def to_coordinator(self, header: Header, body: dict[str, Any], blob: bytes = b"") -> None:
        """Let the coordinator have a frame, if it is in this process."""
        if self.server.coordinator is not None:
            self.server.coordinator.frame(self, header, body, blob)


WAITING_SECONDS = 2.0
END_SECONDS = 5.0
"""For the end of a session whose worker has dialled again."""


def let_in(session: Session, old: Session | None) -> Wants[None]:
    """Welcome a worker once `old` is over, or let shard 0's coordinator do so. Raises WireError where it may not join."""
    if old is not None:
        until = time.monotonic() + END_SECONDS
        old.after.append(session.stream.wake)
        while not old.done.is_set() and (left := until - time.monotonic()) > 0:
            yield Pause(left)
    server, store = session.server, session.store
    if server.coordinator is not None:
        server.coordinator.hello(session)
        return
    server.admitting[session] = None
    try:
        yield from _served(session)
    finally:
        server.admitting.pop(session, None)
    if server.final:
        session.tell(Kind.FINISHED)
        session.hang_up()
        return
    together = store.mode.rewinds_together and store.phase is Phase.SERVING
    if (together and int(session.hello.get("recovery", 0)) != store.recovery) or session.mode != written(store.mode):
        session.rewind()
        return
    session.join()
    session.welcome()


def _served(session: Session) -> Wants[None]:
    """Wait until this shard serves the worker's view, or all is over; tell the worker now and then."""
    server, store, hello = session.server, session.store, session.hello
    told = time.monotonic()
    while not server.final:
        ready = store.phase is Phase.SERVING or (store.phase is Phase.INIT and hello.get("init"))
        if ready and store.view >= int(hello.get("view", 0)):
            return
        yield Pause(max(0.0, told + WAITING_SECONDS - time.monotonic()))
        if server.replaced(session):
            raise StreamClosed(session.stream.peer)
        if time.monotonic() - told >= WAITING_SECONDS:
            told = time.monotonic()
            session.tell(Kind.WAITING, {"shard": store.index, "state": store.phase.value, "view": store.view})
