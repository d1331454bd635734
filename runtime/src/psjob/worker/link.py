"""A worker's streams to one shard: dial, hello, receive, and dial again where the machine says so.

The link's own thread reads, or the script's while it waits (see `turns`); the thread that pushes writes. What was sent and not answered is
kept in `requests` until it is. So the machine repairs a broken stream, or a shard that comes back. A push that the shard had taken is only
asked for again, one that it lost is sent again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from psjob.process import supervise
from psjob.protocol.records import PIECE, RecordId, RecordIn
from psjob.protocol.worker import events as e
from psjob.wire import tcp
from psjob.wire.frame import MAX_RECORD, Flag, Header, Kind, WireError, dump
from psjob.wire.handshake import greet
from psjob.wire.tcp import Stream, StreamClosed
from psjob.wire.words import one_line
from psjob.worker import turns, watchdog
from psjob.worker.dialling import DIAL_SECONDS, dial
from psjob.worker.lane import WorkerLane

if TYPE_CHECKING:
    from psjob.worker.session import WorkerSession

SILENCE_SECONDS = 10.0
"""A shard that owes an answer says WAITING every 2 s; where no byte moves either way for so long, the stream counts as dead."""
LOOK_SECONDS = 1.0
MAX_LANES = 8
TURNS = {Kind.FINISHED: "finished", Kind.LEFT: "left", Kind.STOPPED: "stopped"}
log = logging.getLogger("psjob.worker")


class ShardLink:
    """All fields are guarded by the session's condition, but for the stream's reading side."""

    def __init__(self, session: WorkerSession, index: int) -> None:
        self.session, self.index = session, index
        self.peer = session.place.config.shards[index]
        self.state = session.machine.links[index]
        self.requests = self.state.requests
        self.outstanding = self.requests.outstanding
        self.ask, self.number = self.requests.ask, self.requests.number
        """Call with the session's condition held; send after releasing it."""
        self.lanes: list[WorkerLane] = []
        """Open streams to the shard; the first carries everything, blocks are spread over all."""
        self.shared = False
        """Blocks to and from this shard lie in lent memory; only their headers are sent."""
        self._told: bool | None = None
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
        return self.state.welcomed

    @property
    def main(self) -> WorkerLane | None:
        """The first stream; None where the link is not up."""
        lanes = self.lanes
        return lanes[0] if self.welcomed and lanes else None

    @property
    def attempt(self) -> int:
        """The shard's, as it said last."""
        return self.state.attempt

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
            lanes[header.block % len(lanes)].send_block(header)

    def send(self, header: Header, payload: bytes | torch.Tensor | None = None) -> None:
        """Send on the first stream, if the link is up."""
        if (lane := self.main) is not None:
            lane.send(header, payload)

    def send_json(self, header: Header, body: Any, everywhere: bool = False) -> None:
        """Send on the first stream (`everywhere`: on each, ahead of the blocks to come), if the link is up."""
        raw = dump(body)
        for lane in (self.lanes if everywhere else self.lanes[:1]) if self.welcomed else ():
            lane.send_control(header, raw)

    def resend(self, header: Header) -> None:
        """Send a request again that was not answered."""
        if header.kind is Kind.ROW_PUSH:
            self.session.rows.send(self, header)
        elif header.kind is Kind.LOOKUP:
            self.send(header)
        else:
            self.send_block(header)

    def call(self) -> None:
        """The script waits: this link's thread is to read."""
        for lane in self.lanes:
            lane.turn.call()

    def close(self) -> None:
        """Close every stream; the thread that reads goes on with the next one."""
        for lane in self.lanes:
            lane.stream.close()

    def join(self, seconds: float) -> None:
        """Wait for this link's threads, which end soon after `close` once the session has ended.

        A thread that frees a tensor while the interpreter ends would abort the process.
        """
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def dated(self, header: Header) -> Header:
        """The header with the view and attempt of now."""
        return header._replace(view=self.session.machine.view, attempt=self.state.attempt)

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while self._next is not None and not self.session.ended:
            time.sleep(self._next)
            self._next = None
            self.session.handle(self._stream())

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
        return e.StreamEnded(self.index, broken_rule)

    def _serve(self, stream: Stream) -> None:
        lane = WorkerLane(self, stream)
        with self.session.cond:
            self.lanes = [lane]
        self._moved, self._last = -1, time.monotonic()
        self.read(lane)

    def read(self, lane: WorkerLane) -> None:
        """Handle what comes by a lane until its stream ends. Raises StreamClosed, TimeoutError, WireError."""
        lane.turn.take()
        try:
            while not self.session.ended:
                if not lane.stream.readable(LOOK_SECONDS):
                    self._look(lane)
                elif self.take(lane) is Kind.PARAM and self._leaves(lane):
                    lane.turn.rest()
        finally:
            lane.turn.give()

    def take(self, lane: WorkerLane) -> Kind:
        """Handle the frame that comes next. Raises as `read`."""
        header = lane.stream.recv_header(SILENCE_SECONDS)
        self._handle(lane, header)
        return header.kind

    def _leaves(self, lane: WorkerLane) -> bool:
        """May the script read by itself from here on? It waits for all that it asks for next, which is little, and one stream brings it."""
        exchange = self.session.exchange
        alone = len(self.lanes) == 1 and not exchange.beside and exchange.nbytes <= turns.MOST_BYTES
        return alone and not (self.outstanding or lane.stream.ahead() or self.session.rows.waits(self))

    def _look(self, lane: WorkerLane) -> None:
        """Nothing came for LOOK_SECONDS.

        Raises StreamClosed where the shard's host has confirmed nothing for SILENCE_SECONDS, or something is owed and no byte has moved.
        """
        if lane.stream.unheard() > SILENCE_SECONDS:
            raise StreamClosed(f"{lane.stream.peer}: its host has confirmed nothing for {SILENCE_SECONDS:.0f} s")
        owed = self.outstanding or self.session.rows.waits(self) or not self.welcomed
        moved, now = sum(one.stream.moved() for one in list(self.lanes)), time.monotonic()
        if not owed or moved != self._moved:
            self._moved, self._last = moved, now
        elif now - self._last > SILENCE_SECONDS:
            raise StreamClosed(f"{lane.stream.peer}: not a byte for {SILENCE_SECONDS:.0f} s")

    def _drop_lanes(self) -> None:
        """Close every stream, and wait until no thread lands a block any more."""
        with self.session.cond:
            self.state.welcomed = self.shared = False
            self.session.rows.sharing.lose(self.index)
            lanes, self.lanes = self.lanes, []
            self.session.cond.notify_all()
        for lane in lanes:
            lane.close()
            lane.stream.borrowed = None  # a shard that was lost lent as much as it had

    def _open_lanes(self, main: WorkerLane, body: dict[str, Any]) -> None:
        """Dial the further lanes that the shard offers. Raises StreamClosed where it does not take them."""
        for number in range(1, min(int(body.get("lanes", 1)), MAX_LANES)):
            stream = tcp.again(main.stream, DIAL_SECONDS)
            greet(stream, self.session.place, self.index)
            hello = {"role": "worker", "lane": number, "token": str(body["token"])}
            stream.send_json(self.session.header(Kind.HELLO, attempt=self.attempt), hello)
            with self.session.cond:
                self.lanes.append(WorkerLane(self, stream))
        if len(self.lanes) > 1 or self.session.exchange.beside:
            for lane in self.lanes:
                if self.session.exchange.beside:
                    lane.stream.hold_little()
                lane.start(reads=lane is not main)

    def _handle(self, lane: WorkerLane, header: Header) -> None:
        session, kind, stream = self.session, header.kind, lane.stream
        if kind is Kind.PARAM:
            self._param(lane, header)
        elif kind is Kind.ROWS:
            session.rows.land(self, stream, header, self._applied)
        elif kind is Kind.ROW_IDS:
            session.rows.listing.land(self, stream, header)
        elif kind is Kind.WELCOME:
            self._welcome(lane, stream.recv_json(header))
        elif kind is Kind.WAITING:
            session.handle(e.ShardWaits.of(self.index, stream.recv_json(header)))
        elif kind is Kind.RECORD:
            session.handle(e.RecordCame(header.clock, bytes(stream.recv_body(header, MAX_RECORD))))
        elif kind is Kind.RECORD_PIECE:
            self._record_piece(header, stream.recv_body(header, PIECE))
        elif kind is Kind.RECORD_HAS:
            session.handle(e.RecordHas(RecordId(header.clock, *header.version), header.part))
        elif kind is Kind.ERROR:
            self._error(stream.recv_json(header))
        elif kind is Kind.INFO:
            self._none(header, stream.recv_json(header))
        elif kind is Kind.CODEC:
            session.exchange.compression.told(self.index, stream.recv_json(header))
        elif kind is Kind.NEIGHBOUR and session.stage_links is not None and self.index == 0:
            session.stage_links.told(stream.recv_json(header))
        elif kind is Kind.REWIND:
            session.handle(e.Rewound(str((stream.recv_json(header) if header.length else {}).get("mode", ""))))
        elif kind is Kind.STATE:
            session.on_state(header.request, bytes(stream.recv_body(header, MAX_RECORD)))
        else:
            stream.drain(header)
            self._signal(header)

    def _signal(self, header: Header) -> None:
        """A frame without a body."""
        if header.kind in TURNS:
            self.session.handle(e.TurnOver(TURNS[header.kind]))
        elif header.kind is Kind.STOP:
            self.session.handle(e.StopSet(header.clock))
        elif header.kind is Kind.MARK:
            self.session.handle(e.MarkWanted(header.request))
        elif header.kind is Kind.RELEASE:
            self.session.handle(e.Released(self.index, header.request))
        elif header.kind is Kind.HUNG and self.index == 0:
            watchdog.hung(self.session.place.config.step_timeout)

    def _error(self, body: Mapping[str, Any]) -> None:
        message = one_line(body.get("error", "the shard refused this worker"), 1000)
        code, start = str(body.get("code")), body.get("start")
        if code == "fenced" and type(start) is int:
            self.session.fenced_by = start
        if code in ("refused", "fenced"):
            self.session.handle(e.Refused(code, message))
        else:
            log.warning("shard %d: %s", self.index, message)

    def _none(self, header: Header, body: Mapping[str, Any]) -> None:
        try:
            none = frozenset(int(row) for row in body["none"])
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"INFO of shard {self.index} is not in shape: {error!r}") from None
        with self.session.cond:
            self.none[header.block] = none

    def _welcome(self, lane: WorkerLane, body: dict[str, Any]) -> None:
        session, welcomed = self.session, e.Welcomed.of(self.index, body)
        try:
            codecs = [str(name) for name in body["codecs"]]
            owner = [int(shard) for shard in body.get("assignment", session.owner)]
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"WELCOME of shard {self.index} is not in shape: {error!r}") from None
        if "blocks" in body and self.index == 0:
            session.adopt(body["blocks"])
        if len(self.lanes) == 1 and not welcomed.init:
            self._open_lanes(lane, body)
        if self.index == 0:
            with session.cond:
                session.owner = owner
        self._share(body)
        session.rows.share(self, body.get("sharedRows"))
        with session.cond:
            session.exchange.compression.agreed(self.index, codecs, not lane.stream.apart)
        session.handle(welcomed)

    def _record_piece(self, header: Header, data: bytearray) -> None:
        record = RecordId(header.clock, *header.version)
        if record.size > MAX_RECORD:
            raise WireError(f"a record of {record.size} bytes is above the limit of {MAX_RECORD}")
        with self.session.cond:
            whole = self.record.take(record, header.part, data)
        if whole is not None:
            self.session.handle(e.RecordCame(record.clock, whole))

    def _applied(self, header: Header) -> None:
        """A shard has applied the rows of a push."""
        with self.session.cond:
            request = self.outstanding.get(header.request)
            if request is not None and request.kind is Kind.ROW_PUSH:
                self._settle(request)

    def _settle(self, request: Header) -> None:
        """A request is answered; call with the session's condition held."""
        if self.requests.settle(request.request) or self.session.exchange.watched:
            self.session.cond.notify_all()

    def _share(self, body: dict[str, Any]) -> None:
        """Exchange memory with a shard that offers it; where that cannot be done, blocks go over the streams."""
        session, offer = self.session, body.get("shared")
        if offer is not None:
            blocks = [block.index for block in session.blocks if session.owner[block.index] == self.index]
            try:
                region = session.exchange.sharing.take(self.index, blocks, offer)
                for lane in self.lanes:
                    lane.stream.borrowed = region
                self.shared = True
            except (OSError, WireError) as error:
                self.shared = False  # what was lent before is not where the shard puts answers, once it has been asked again
                log.warning("shard %d: its memory is out of reach: %s", self.index, error)
        if self._told != self.shared:
            self._told = self.shared
            log.info("blocks to and from shard %d go over %s", self.index, "shared memory" if self.shared else "TCP")

    def _param(self, lane: WorkerLane, header: Header) -> None:
        session, stream = self.session, lane.stream
        with session.cond:
            request = self.outstanding.get(header.request)
        if request is None or request.block != header.block:
            session.exchange.compression.codec_of(header)
            stream.drain(header)
            return
        session.exchange.land(self, stream, header, lane.landing[header.block])
        with session.cond:
            session.exchange.note(header)
            if not header.info:
                self.none.pop(header.block, None)
            if header.flags & Flag.CUT and self.index == 0:
                told = e.CutTold(request.clock + (request.kind is Kind.PUSH), bool(header.flags & Flag.STORE))
                session.machine.handle(told, 0.0)
            self._settle(request)
