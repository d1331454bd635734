"""A worker's streams to one shard: dial, hello, receive, and dial again where the machine says so.

The link's own thread reads, or the script's while it waits for answers, which saves it being woken by the other; the thread that pushes
writes. What was sent and not answered is kept in `requests` until it is. So the machine repairs a broken stream, or a shard that comes
back. A push that the shard had taken is only asked for again, one that it lost is sent again.

Of all addresses of a shard's name, the newest process is said hello to. A `WorkerLane` is one stream of a link: blocks are gathered and
sent, received and landed, beside those of the other lanes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from psjob.layout import memory
from psjob.layout.packing import Pack, Packs
from psjob.process import supervise
from psjob.protocol.records import PIECE, RecordId, RecordIn, RecordsOnStream
from psjob.protocol.streams import StreamTrial
from psjob.protocol.worker import events as e
from psjob.wire import tcp
from psjob.wire.frame import HELD_SECONDS, MAX_RECORD, UPDATED_SECONDS, Flag, Header, Kind, WireError, dump
from psjob.wire.handshake import greet
from psjob.wire.shared_memory import Offer
from psjob.wire.tcp import Stream, StreamClosed
from psjob.wire.unauthenticated import one_line
from psjob.worker import exits
from psjob.worker.compression import WorkerCompression
from psjob.worker.rendezvous import DIAL_SECONDS, newest_process
from psjob.worker.sharing import Sharing
from psjob.worker.state import SessionState
from psjob.worker.step_parts import WIRE, LandedAnswer


class SendPolicy(Protocol):
    """In which order blocks are sent, and the frame that a request becomes as its lane sends it. `Exchange` says what each method does."""

    def order(self, block: int) -> int: ...
    def outgoing(self, lane: WorkerLane, header: Header, pack: Pack) -> tuple[Header, torch.Tensor | None] | None: ...
    def sent(self, header: Header) -> None: ...


class BlockEnd(Protocol):
    """What links lend of blocks, and where the shards' answers land: as `SendPolicy`."""

    sharing: Sharing
    compression: WorkerCompression
    trial: StreamTrial
    beside: bool
    """Blocks are sent by threads of the lanes even where there is one lane."""
    nbytes: int
    """Of all blocks."""
    watched: bool
    """The script may wait for less than a link's last answer; where it does not, the others wake nobody."""

    def make_packs(self) -> Packs: ...
    def stage(self, link: ShardConnection, header: Header) -> tuple[int, int] | None: ...
    def land(self, link: ShardConnection, stream: Stream, header: Header, pack: Pack) -> float: ...
    def note(self, header: Header) -> None: ...


class RowEnd(Protocol):
    """What links send and receive of rows of tables. `Rows` says what each method does."""

    def send(self, link: ShardConnection, header: Header) -> None: ...
    def waits(self, link: ShardConnection) -> bool: ...
    def land(self, link: ShardConnection, stream: Stream, header: Header, applied: Callable[[Header], None]) -> None: ...
    def land_ids(self, link: ShardConnection, stream: Stream, header: Header) -> None: ...
    def share(self, link: ShardConnection, offer: Mapping[str, Any] | None) -> None: ...
    def lose(self, link: ShardConnection) -> None: ...


@dataclass
class ConnectionEnds:
    """What all links of a worker send, and to whom they give what comes. `policy` and `blocks` change with the worker's data path."""

    policy: SendPolicy
    blocks: BlockEnd
    rows: RowEnd
    hello: Callable[[ShardConnection, str], dict[str, Any]]
    """The body of a hello, from the address by which this process reaches the shard; called with the condition held."""
    adopt: Callable[[object], None]
    """The job's parameters lie in these blocks. Raises WireError for blocks that are no layout of them."""
    on_state: Callable[[int, bytes], None]
    """The shards' optimizer state of a block has come, by the request's number."""
    neighbour: Callable[[Mapping[str, Any]], None] | None
    """The coordinator tells of a neighbouring stage's worker; None: this worker has no stage."""


REST_SECONDS = 0.01
"""So long a link's thread leaves its stream to the script after the last answer. What else comes meanwhile is read so much later."""
MOST_BYTES = 512 << 10
"""Of a model. The answers of a larger one begin to come while its last pushes are sent: two threads do both at once."""
LISTEN_SECONDS = 0.5
SLICE_SECONDS = 0.05


class ReadLock:
    """Of one stream."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        """What the script's thread met as it read; for the link's."""
        self._reading = threading.Lock()
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._rests = False

    # -- the link's thread -----------------------------------------------------------------------

    def take(self) -> None:
        """Wait until the script does not read. Raises what it met; the turn is this thread's then too."""
        while not self._reading.acquire(blocking=False):
            self._sleep()
        if self.failure is not None:
            raise self.failure

    def give(self) -> None:
        """Read no more."""
        self._reading.release()

    def rest(self) -> None:
        """Leave the stream to the script until it calls, or for REST_SECONDS. Raises as `take`."""
        self._reading.release()
        self._sleep()
        self.take()

    def _sleep(self) -> None:
        self._rests = True
        with contextlib.suppress(queue.Empty):
            self._calls.get(timeout=REST_SECONDS)
        self._rests = False

    # -- the script's ------------------------------------------------------------------------------

    def borrow(self) -> bool:
        """Read from here on, if the link's thread does not; `give` ends it."""
        return self._reading.acquire(blocking=False)

    def call(self) -> None:
        """The script waits, and does not read by itself."""
        if self._rests:
            self._rests = False
            self._calls.put(None)


def read_answers(state: SessionState, links: Sequence[ShardConnection]) -> None:
    """Read the answers that are owed, in the script's thread, where every link that owes some leaves its stream to it.

    Returns once they are here, or after LISTEN_SECONDS, or where a stream ends: the caller waits for what is missing then.
    """
    owing = [link for link in links if link.outstanding]
    lanes: list[tuple[ShardConnection, WorkerLane]] = []
    began, begun = time.monotonic(), state.parts.wait()
    try:
        for link in owing:
            lane = link.main
            if lane is None or not lane.read_lock.borrow():
                return
            lanes.append((link, lane))
        _read(state, lanes)
    finally:
        for _, lane in lanes:
            lane.read_lock.give()
        state.parts.waited(begun)
        state.idle.waited += time.monotonic() - began


def _read(state: SessionState, lanes: list[tuple[ShardConnection, WorkerLane]]) -> None:
    deadline = time.monotonic() + LISTEN_SECONDS
    poll = select.poll()
    found = {}
    for link, lane in lanes:
        fd = lane.stream.sock.fileno()
        if lane.read_lock.failure is not None or fd < 0:
            return
        poll.register(fd, select.POLLIN)
        found[fd] = link, lane
    while any(link.outstanding for link, _ in lanes) and state.machine.ending is None and time.monotonic() < deadline:
        ready = [pair for pair in lanes if pair[1].stream.ahead()] or [found[fd] for fd, _ in poll.poll(1000 * SLICE_SECONDS)]
        for link, lane in ready:
            try:
                link.take(lane)
            except (StreamClosed, TimeoutError, WireError) as error:
                lane.read_lock.failure = error
                return
            except BaseException:  # an interrupted script: the rest of a frame is no frame
                lane.read_lock.failure = StreamClosed(f"{lane.stream.peer}: the script was interrupted while it read")
                raise


def dial(link: ShardConnection) -> Stream | None:
    """A stream on which hello was said; None: no shard answers. Raises WireError as `newest_process`."""
    try:
        chosen = newest_process(link.state.place, link.index)
    except (StreamClosed, TimeoutError):
        return None
    with link.state.cond:
        hello = link.ends.hello(link, str(chosen.sock.getsockname()[0]))
    chosen.send_json(link.state.header(Kind.HELLO, attempt=link.attempt), hello)
    return chosen


CLOSE_SECONDS = 5.0
log = logging.getLogger("psjob.worker")


class WorkerLane:
    """`stream` to the shard of `link`. Until `start` blocks are sent by the caller and somebody else reads."""

    def __init__(self, link: ShardConnection, stream: Stream) -> None:
        self.link, self.stream = link, stream
        self.read_lock = ReadLock()
        self._out: queue.PriorityQueue[tuple[int, int, Header | None]] = queue.PriorityQueue()
        self._count = itertools.count()
        self._threads: list[threading.Thread] = []
        self._records = RecordsOnStream()
        self._recording = threading.Lock()

    @cached_property
    def landing(self) -> Packs:
        """For the thread that reads."""
        return self.link.ends.blocks.make_packs()

    @cached_property
    def _leaving(self) -> Packs:
        """For the thread that sends blocks."""
        return self.link.ends.blocks.make_packs()

    def start(self, reads: bool) -> None:
        """Send blocks in a thread of the lane's own, and read in another if `reads`."""
        name = f"lane-{self.link.index}-{self.stream.peer}"
        works = [self._send_loop, self._read] if reads else [self._send_loop]
        self._threads = [supervise.start_thread(work, name) for work in works]

    def send_block(self, header: Header) -> None:
        """Send a request and what it carries, now or, once the lane was started, in its turn."""
        policy, blocks = self.link.ends.policy, self.link.ends.blocks
        lent = self.link.shared and blocks.sharing.steady and not blocks.beside  # a header alone: not worth waking a thread for
        if self._threads and not lent:
            self._out.put((policy.order(header.block), next(self._count), header))
        else:
            self._send_now(header)

    def send(self, header: Header, payload: bytes | torch.Tensor | None = None, rides: bool = False) -> None:
        """Send a frame; `rides` as in `Stream.send`.

        Where the stream has ended it is forgotten: what must not be lost is said again after the next welcome.
        """
        parts = self.link.state.parts
        before = parts.to(WIRE)  # a frame waits behind the bytes of others
        with contextlib.suppress(StreamClosed):
            self.stream.send(self.link.dated(header), memory.view(payload) if isinstance(payload, torch.Tensor) else payload or b"", rides)
        parts.to(before)

    def send_record(self, header: Header, record: bytes, idle: tuple[int, int], rides: bool) -> None:
        """As `send`, of a resume record of at most a piece: what it changes of the last one on this stream. `idle` as in AtStepBoundary."""
        with self._recording:
            delta = self._records.delta(record)
            if delta is None:
                self.send(header._replace(kind=Kind.RECORD, part=idle[0], request=idle[1]), record, rides)
            else:
                told = header._replace(kind=Kind.RECORD_DELTA, part=delta.begin, version=(delta.crc, delta.size))
                self.send(told._replace(generation=idle[0], request=idle[1]), delta.data, rides)

    def send_control(self, header: Header, raw: bytes) -> None:
        """As `send`, of a control body."""
        with contextlib.suppress(StreamClosed):
            self.stream.send_control(self.link.dated(header), raw)

    def send_parts(self, header: Header, parts: Sequence[memoryview]) -> None:
        """As `send`, of a payload that lies in several places."""
        with contextlib.suppress(StreamClosed):
            self.stream.send_parts(self.link.dated(header), parts)

    def send_lent(self, header: Header, offset: int, length: int) -> None:
        """As `send`, of a payload that lies in memory which this worker lends."""
        try:
            self.stream.send_lent(self.link.dated(header), offset, length)
        except StreamClosed:
            pass

    def close(self) -> None:
        """Close the stream and wait for the lane's threads."""
        self.stream.close()
        self._out.put((-1, 0, None))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_SECONDS)

    def _send_now(self, header: Header) -> None:
        policy = self.link.ends.policy
        try:
            place = self.link.ends.blocks.stage(self.link, header)
            if place is not None:
                self.send_lent(header, *place)
                return
            frame = policy.outgoing(self, header, self._leaving[header.block])
            if frame is not None:
                self.send(*frame)
        finally:
            policy.sent(header)

    def _send_loop(self) -> None:
        while (header := self._out.get()[2]) is not None:
            if not self.stream.closed:
                self._send_now(header)

    def _read(self) -> None:
        try:
            self.link.read(self)
        except (StreamClosed, TimeoutError) as error:
            log.debug("lane to shard %d: %s", self.link.index, error)
        except WireError as error:
            log.warning("lane to shard %d: %s", self.link.index, one_line(error, 1000))
        self.link.close()


SILENCE_SECONDS = 10.0
"""A shard that owes an answer says WAITING every 2 s; where no byte moves either way for so long, the stream counts as dead."""
LOOK_SECONDS = 1.0
MAX_LANES = 8
TURNS = {Kind.FINISHED: "finished", Kind.LEFT: "left", Kind.STOPPED: "stopped"}


class ShardConnection:
    """All fields are guarded by the worker's condition, but for the stream's reading side."""

    def __init__(self, state: SessionState, index: int, ends: ConnectionEnds) -> None:
        self.state, self.index, self.ends = state, index, ends
        self.told = state.machine.links[index]
        """What the machine knows of the shard."""
        self.requests = self.told.requests
        self.outstanding = self.requests.outstanding
        self.ask, self.number = self.requests.ask, self.requests.number
        """Call with the worker's condition held; send after releasing it."""
        self.lanes: list[WorkerLane] = []
        """Open streams to the shard; the first carries everything, blocks are spread over all."""
        self.shared = False
        """Blocks to and from this shard lie in lent memory; only their headers are sent."""
        self._said_shared: bool | None = None
        self.none: dict[int, frozenset[int]] = {}
        """By block: tensors for which no worker had a gradient, told before the block's reply where the workers step."""
        self.record = RecordIn()
        """What the coordinator gives back, as far as it has come: a break does not begin it anew."""
        self._moved, self._last = -1, 0.0
        self._next: float | None = None
        """In how many seconds the thread dials; None: it ends."""
        self._thread: threading.Thread | None = None

    @property
    def welcomed(self) -> bool:
        """Has the shard let this worker in, on the streams of now?"""
        return self.told.welcomed

    @property
    def main(self) -> WorkerLane | None:
        """The first stream; None where the link is not up."""
        lanes = self.lanes
        return lanes[0] if self.welcomed and lanes else None

    @property
    def attempt(self) -> int:
        """The shard's, as it said last."""
        return self.told.attempt

    @property
    def carried(self) -> tuple[int, int]:
        """Bytes that have come from the shard and gone to it, by the streams that are open now; what lies in lent memory is not in them."""
        streams = [lane.stream for lane in self.lanes]
        return sum(stream.received for stream in streams), sum(stream.sent for stream in streams)

    def dial(self, seconds: float) -> None:
        """Dial in so many seconds, in the link's thread."""
        self._next = seconds
        if self._thread is None:
            self._thread = supervise.thread(self._run, f"link-{self.index}")
            self._thread.start()  # it dials again by itself, maybe before this comes back

    @property
    def alive(self) -> bool:
        """Does its thread run?"""
        return self._thread is not None and self._thread.is_alive()

    # -- out -----------------------------------------------------------------------------------

    def send_block(self, header: Header) -> None:
        """Send a registered request with what it carries, if the link is up; if not, it goes out at the next welcome.

        With several lanes a thread of the block's lane gathers and sends it, else the calling one does.
        """
        lanes = self.lanes
        if self.welcomed and lanes:
            lanes[header.block % (1 if self.ends.blocks.trial.one else len(lanes))].send_block(header)

    def send(self, header: Header, payload: bytes | torch.Tensor | None = None) -> None:
        """Send on the first stream, if the link is up."""
        if (lane := self.main) is not None:
            lane.send(header, payload)

    def send_riding(self, header: Header, body: Any) -> None:
        """Send on the first stream with what is sent next, if the link is up."""
        if (lane := self.main) is not None:
            lane.stream.ride(self.dated(header), dump(body))

    def send_json(self, header: Header, body: Any, everywhere: bool = False) -> None:
        """Send on the first stream (`everywhere`: on each, ahead of the blocks to come), if the link is up."""
        raw = dump(body)
        for lane in (self.lanes if everywhere else self.lanes[:1]) if self.welcomed else ():
            lane.send_control(header, raw)

    def resend(self, header: Header) -> None:
        """Send a request again that was not answered."""
        if header.kind is Kind.ROW_PUSH:
            self.ends.rows.send(self, header)
        elif header.kind is Kind.LOOKUP:
            self.send(header)
        else:
            self.send_block(header)

    def call(self) -> None:
        """The script waits: this link's thread is to read."""
        for lane in self.lanes:
            lane.read_lock.call()

    def close(self) -> None:
        """Close every stream; the thread that reads continues with the next one."""
        for lane in self.lanes:
            lane.stream.close()

    def join(self, seconds: float) -> None:
        """Wait for this link's threads, which end soon after `close` once the session has ended.

        A thread that frees a tensor while the interpreter ends would abort the process.
        """
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def dated(self, header: Header) -> Header:
        """The header with the term and attempt of now."""
        return header._replace(term=self.state.machine.term, attempt=self.told.attempt)

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while self._next is not None and not self.state.ended:
            time.sleep(self._next)
            self._next = None
            self.state.handle(self._stream())

    def _stream(self) -> e.Event:
        """Dial once, and serve the stream until it ends."""
        broken_rule = False
        try:
            stream = dial(self)
            if stream is None:
                return e.NotFound(self.index)
            self._serve(stream)
        except (StreamClosed, TimeoutError) as error:
            log.debug("link to shard %d: %s", self.index, error)
        except WireError as error:
            log.warning("link to shard %d: %s", self.index, one_line(error, 1000))
            broken_rule = True
        finally:
            self._drop_lanes()
        return e.ShardStreamEnded(self.index, broken_rule)

    def _serve(self, stream: Stream) -> None:
        lane = WorkerLane(self, stream)
        with self.state.cond:
            self.lanes = [lane]
        self._moved, self._last = -1, time.monotonic()
        self.read(lane)

    def read(self, lane: WorkerLane) -> None:
        """Handle what comes by a lane until its stream ends. Raises StreamClosed, TimeoutError, WireError."""
        lane.read_lock.take()
        try:
            while not self.state.ended:
                if not lane.stream.readable(LOOK_SECONDS):
                    self._look(lane)
                elif self.take(lane) is Kind.PARAM and self._leaves(lane):
                    lane.read_lock.rest()
        finally:
            lane.read_lock.give()

    def take(self, lane: WorkerLane) -> Kind:
        """Handle the frame that comes next. Raises as `read`."""
        header = lane.stream.recv_header(SILENCE_SECONDS)
        self._handle(lane, header)
        return header.kind

    def _leaves(self, lane: WorkerLane) -> bool:
        """May the script read by itself from here on? It waits for all that it asks for next, which is little, and one stream brings it."""
        alone = len(self.lanes) == 1 and not self.ends.blocks.beside and self.ends.blocks.nbytes <= MOST_BYTES
        return alone and not (self.outstanding or lane.stream.ahead() or self.ends.rows.waits(self))

    def _look(self, lane: WorkerLane) -> None:
        """Nothing came for LOOK_SECONDS.

        Raises StreamClosed if the shard's host has confirmed nothing for SILENCE_SECONDS, or something is owed and no byte has moved.
        """
        if lane.stream.unheard() > SILENCE_SECONDS:
            raise StreamClosed(f"{lane.stream.peer}: its host has confirmed nothing for {SILENCE_SECONDS:.0f} s")
        owed = self.outstanding or self.ends.rows.waits(self) or not self.welcomed
        moved, now = sum(one.stream.moved() for one in list(self.lanes)), time.monotonic()
        if not owed or moved != self._moved:
            self._moved, self._last = moved, now
        elif now - self._last > SILENCE_SECONDS:
            raise StreamClosed(f"{lane.stream.peer}: not a byte for {SILENCE_SECONDS:.0f} s")

    def _drop_lanes(self) -> None:
        """Close every stream, and wait until no thread lands a block any more."""
        with self.state.cond:
            self.told.welcomed = self.shared = False
            self.ends.rows.lose(self)
            lanes, self.lanes = self.lanes, []
            self.state.cond.notify_all()
        for lane in lanes:
            lane.close()
            lane.stream.borrowed = None  # a shard that was lost lent as much as it had

    def _open_lanes(self, main: WorkerLane, body: dict[str, Any]) -> None:
        """Dial the further lanes that the shard offers. Raises StreamClosed if it does not take them."""
        for number in range(1, min(int(body.get("lanes", 1)), MAX_LANES)):
            stream = tcp.again(main.stream, DIAL_SECONDS)
            greet(stream, self.state.place, self.index)
            hello = {"role": "worker", "lane": number, "token": str(body["token"])}
            stream.send_json(self.state.header(Kind.HELLO, attempt=self.attempt), hello)
            with self.state.cond:
                self.lanes.append(WorkerLane(self, stream))
        if len(self.lanes) > 1 or self.ends.blocks.beside:
            log.info("%d streams to shard %d", len(self.lanes), self.index)
            for lane in self.lanes:
                if self.ends.blocks.beside:
                    lane.stream.hold_little()
                lane.start(reads=lane is not main)

    def _handle(self, lane: WorkerLane, header: Header) -> None:
        state, kind, stream = self.state, header.kind, lane.stream
        if kind is Kind.PARAM:
            self._param(lane, header)
        elif kind is Kind.ROWS:
            self.ends.rows.land(self, stream, header, self._applied)
        elif kind is Kind.ROW_IDS:
            self.ends.rows.land_ids(self, stream, header)
        elif kind is Kind.WELCOME:
            self._welcome(lane, stream.recv_json(header))
        elif kind is Kind.WAITING:
            state.handle(e.ShardWaits.of(self.index, stream.recv_json(header)))
        elif kind is Kind.RECORD:
            state.handle(e.RecordReturned(header.clock, bytes(stream.recv_body(header, MAX_RECORD))))
        elif kind is Kind.RECORD_PIECE:
            self._record_piece(header, stream.recv_body(header, PIECE))
        elif kind is Kind.RECORD_HAS:
            state.handle(e.RecordHas(RecordId(header.clock, *header.version), header.part))
        elif kind is Kind.ERROR:
            self._error(stream.recv_json(header))
        elif kind is Kind.INFO:
            self._none(header, stream.recv_json(header))
        elif kind is Kind.CODEC:
            self.ends.blocks.compression.told(self.index, stream.recv_json(header))
        elif kind is Kind.NEIGHBOUR and self.ends.neighbour is not None and self.index == 0:
            self.ends.neighbour(stream.recv_json(header))
        elif kind is Kind.REWIND:
            state.handle(e.Rewound(str((stream.recv_json(header) if header.length else {}).get("mode", ""))))
        elif kind is Kind.STATE:
            self.ends.on_state(header.request, bytes(stream.recv_body(header, MAX_RECORD)))
        else:
            stream.drain(header)
            self._signal(header)

    def _signal(self, header: Header) -> None:
        """A frame without a body."""
        if header.kind in TURNS:
            self.state.handle(e.TurnOver(TURNS[header.kind]))
        elif header.kind is Kind.STOP:
            self.state.handle(e.StopSet(header.clock))
        elif header.kind is Kind.MARK:
            self.state.handle(e.MarkWanted(header.request))
        elif header.kind is Kind.RELEASE:
            self.state.handle(e.Released(self.index, header.request))
        elif header.kind is Kind.HUNG and self.index == 0:
            exits.end_hung(self.state.place.config.step_timeout)

    def _error(self, body: Mapping[str, Any]) -> None:
        message = one_line(body.get("error", "the shard refused this worker"), 1000)
        code, start = str(body.get("code")), body.get("start")
        if code == "fenced" and type(start) is int:
            self.state.fenced_by = start
        if code in ("refused", "fenced"):
            self.state.handle(e.WorkerRefused(code, message))
        else:
            log.warning("shard %d: %s", self.index, message)

    def _none(self, header: Header, body: Mapping[str, Any]) -> None:
        try:
            none = frozenset(int(row) for row in body["none"])
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"INFO of shard {self.index} is not in shape: {error!r}") from None
        with self.state.cond:
            self.none[header.block] = none

    def _welcome(self, lane: WorkerLane, body: dict[str, Any]) -> None:
        state, welcomed = self.state, e.Welcomed.of(self.index, body)
        try:
            codecs = [str(name) for name in body["codecs"]]
            owner = [int(shard) for shard in body.get("assignment", state.owner)]
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"WELCOME of shard {self.index} is not in shape: {error!r}") from None
        if "blocks" in body and self.index == 0:
            self.ends.adopt(body["blocks"])
        if len(self.lanes) == 1 and not welcomed.init:
            self._open_lanes(lane, body)
        if self.index == 0:
            with state.cond:
                state.owner = owner
        self._share(body)
        self.ends.rows.share(self, body.get("sharedRows"))
        with state.cond:
            self.ends.blocks.compression.agreed(self.index, codecs, state.place.pairs_with(self.index) or not lane.stream.is_remote)
        state.handle(welcomed)

    def _record_piece(self, header: Header, data: bytearray) -> None:
        record = RecordId(header.clock, *header.version)
        if record.size > MAX_RECORD:
            raise WireError(f"a record of {record.size} bytes is above the limit of {MAX_RECORD}")
        with self.state.cond:
            whole = self.record.take(record, header.part, data)
        if whole is not None:
            self.state.handle(e.RecordReturned(record.clock, whole))

    def _applied(self, header: Header) -> None:
        """A shard has applied the rows of a push."""
        with self.state.cond:
            request = self.outstanding.get(header.request)
            if request is not None and request.kind is Kind.ROW_PUSH:
                self._settle(request)

    def _settle(self, request: Header) -> None:
        """A request is answered; call with the worker's condition held."""
        if self.requests.settle(request.request) or self.ends.blocks.watched:
            self.state.cond.notify_all()

    def _share(self, body: dict[str, Any]) -> None:
        """Exchange memory with a shard that offers it; where that cannot be done, blocks go over the streams."""
        state, offer = self.state, body.get("shared")
        if offer is not None:
            blocks = [block.index for block in state.blocks if state.owner[block.index] == self.index]
            try:
                region = self.ends.blocks.sharing.take(self.index, blocks, Offer.of(offer, state.place.pair))
                for lane in self.lanes:
                    lane.stream.borrowed = region
                self.shared = True
            except (OSError, WireError) as error:
                self.shared = False  # what was lent before is not where the shard puts answers, once it has been asked again
                log.warning("shard %d: its memory is out of reach: %s", self.index, error)
        if self._said_shared != self.shared:
            self._said_shared = self.shared
            log.info("blocks to and from shard %d go over %s", self.index, "shared memory" if self.shared else "TCP")

    def _param(self, lane: WorkerLane, header: Header) -> None:
        state, stream = self.state, lane.stream
        with state.cond:
            request = self.outstanding.get(header.request)
        if request is None or request.block != header.block:
            self.ends.blocks.compression.codec_of(header)
            stream.drain(header)
            return
        came = time.monotonic()
        copied = self.ends.blocks.land(self, stream, header, lane.landing[header.block])
        held, updated = header.generation * HELD_SECONDS, header.table * UPDATED_SECONDS
        state.parts.answers.append(LandedAnswer(came, time.monotonic(), copied, held, updated))
        with state.cond:
            self.ends.blocks.note(header)
            if not header.info:
                self.none.pop(header.block, None)
            if header.flags & Flag.SNAPSHOT and self.index == 0:
                told = e.SnapshotTold(request.clock + (request.kind is Kind.PUSH), bool(header.flags & Flag.STORE))
                state.machine.handle(told, 0.0)
            self._settle(request)
