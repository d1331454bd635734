"""A worker's stream to one shard: dial, hello, receive, and after a break dial again and send again what was not answered.

The link's own thread reads; whoever pushes writes. What was sent and not answered is kept until it is, so a broken stream
or a shard that comes back is repaired here: a push that the shard had taken is only asked for again (once only), one that
it lost is sent again.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from psjob.modes import written
from psjob.protocol.records import PIECE, RecordId, RecordIn
from psjob.wire import tcp
from psjob.wire.frame import MAX_RECORD, Flag, Header, Kind, WireError, dump
from psjob.wire.tcp import HELLO_SECONDS, Stream, StreamClosed
from psjob.worker.lane import WorkerLane
from psjob.worker.sharing import SLOTS

if TYPE_CHECKING:
    from psjob.worker.session import WorkerSession

SILENCE_SECONDS = 10.0
"""A shard that owes an answer says WAITING every 2 s; after this long without a word the stream counts as dead."""
DIAL_SECONDS = 3.0
MAX_LANES = 8
log = logging.getLogger("psjob.worker")


class ShardLink:
    """All fields are guarded by the session's condition, but for the stream's reading side."""

    def __init__(self, session: WorkerSession, index: int) -> None:
        self.session, self.index = session, index
        self.peer = session.place.config.shards[index]
        self.lanes: list[WorkerLane] = []
        """Open streams to the shard; the first carries everything, blocks are spread over all."""
        self.attempt = 0
        self.acked = 0
        self.welcomed = False
        self.released = 0
        self.waiting = ""
        self.shared = False
        """Blocks to and from this shard lie in lent memory; only their headers are sent."""
        self._told: bool | None = None
        self.none: dict[int, frozenset[int]] = {}
        """By block: tensors for which no worker had a gradient, told before the block's reply where the workers step."""
        self.unsent = 0
        """Requests of the clock in hand that are still to be made."""
        self.outstanding: dict[int, Header] = {}
        """Pushes and pulls that wait for their PARAM, by number; what they carry can be gathered again until then."""
        self._pushed_clock = -1
        self._pushed: dict[int, Header] = {}
        """Every push of the newest clock, answered or not: a shard of a later attempt needs them all."""
        self.record = RecordIn()
        """What the coordinator gives back, as far as it has come: a break does not begin it anew."""
        self._request = 0
        self._last = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"link-{index}", daemon=True)

    def start(self) -> None:
        """Begin to dial, if that has not begun."""
        if not self._thread.is_alive():
            self._thread.start()

    # -- out -----------------------------------------------------------------------------------

    def ask(self, header: Header) -> Header:
        """Register a request that PARAM or ROWS answers; call with the session's condition held, send after releasing it."""
        header = header._replace(request=self.number())
        if not self.outstanding:
            self._last = time.monotonic()
        self.outstanding[self._request] = header
        self.unsent -= 1
        if header.kind is not Kind.PULL:
            if header.clock != self._pushed_clock:
                self._pushed_clock, self._pushed = header.clock, {}
            self._pushed[self._request] = header
        return header

    def number(self) -> int:
        """A number for a request; call with the session's condition held."""
        self._request += 1
        return self._request

    def send_block(self, header: Header) -> None:
        """Send a registered request with what it carries, if the link is up; if not, it goes out at the next welcome.

        With several lanes a thread of the block's lane gathers and sends it, else the calling one does.
        """
        lanes = self.lanes
        if self.welcomed and lanes:
            lanes[header.block % len(lanes)].send_block(header)

    def send(self, header: Header, payload: bytes | torch.Tensor | None = None) -> None:
        """Send on the first stream, if the link is up."""
        lanes = self.lanes
        if self.welcomed and lanes:
            lanes[0].send(header, payload)

    def send_parts(self, header: Header, parts: Sequence[memoryview]) -> None:
        """As `send`, of a payload that lies in several places."""
        lanes = self.lanes
        if self.welcomed and lanes:
            lanes[0].send_parts(header, parts)

    def send_lent(self, header: Header, offset: int, length: int) -> None:
        """As `send`, of a payload that lies in memory which this worker lends."""
        lanes = self.lanes
        if self.welcomed and lanes:
            lanes[0].send_lent(header, offset, length)

    def send_json(self, header: Header, body: Any, everywhere: bool = False) -> None:
        """Send on the first stream (`everywhere`: on each, ahead of the blocks to come), if the link is up."""
        raw = dump(body)
        for lane in (self.lanes if everywhere else self.lanes[:1]) if self.welcomed else ():
            lane.send_control(header, raw)

    def close(self) -> None:
        for lane in self.lanes:
            lane.stream.close()

    def join(self, seconds: float) -> None:
        """Wait for this link's threads, which end soon after `close` once the session has ended.

        A thread that frees a tensor while the interpreter ends would abort the process.
        """
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def dated(self, header: Header) -> Header:
        """The header with the view and attempt of now."""
        return header._replace(view=self.session.view, attempt=self.attempt)

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        deadline = time.monotonic() + self.session.place.config.connect_seconds
        while not self.session.ended:
            try:
                stream = self._dial()
                if stream is None:
                    if not self.attempt and time.monotonic() > deadline:
                        self.session.not_found(self.index)
                        return
                    time.sleep(0.1)
                    continue
                self._serve(stream)
            except (StreamClosed, TimeoutError) as error:
                log.debug("link to shard %d: %s", self.index, error)
            except WireError as error:
                log.warning("link to shard %d: %s", self.index, error)
                time.sleep(0.2)
            finally:
                self._drop_lanes()
            time.sleep(0.02)

    def _dial(self) -> Stream | None:
        """A stream on which hello was said: of all addresses of the name, the one whose shard has the highest (view, attempt)."""
        found: list[tuple[tuple[int, int], Stream]] = []
        streams = list(tcp.connect(self.peer.host, self.peer.port, DIAL_SECONDS))
        for stream in streams:
            with self.session.cond:
                hello = self._hello()
            try:
                stream.send_json(self.session.header(Kind.HELLO, attempt=self.attempt), hello)
                first = stream.peek_header(HELLO_SECONDS) if len(streams) > 1 else None
            except (StreamClosed, WireError):
                stream.close()
                continue
            found.append(((0, 0) if first is None else (first.view, first.attempt), stream))
        found.sort(key=lambda entry: entry[0])
        for _, stream in found[:-1]:
            stream.close()
        return found[-1][1] if found else None

    def _hello(self) -> dict[str, Any]:
        session, codecs = self.session, self.session.exchange.compression
        body: dict[str, Any] = {
            "role": "worker", "scheme": "none", "codecs": codecs.offered(),
            "transports": session.transports, "rowTransports": session.row_transports, "slots": SLOTS,
            "layout": session.layout.digest(), "view": session.view, "recovery": session.recovery,
            "fresh": not (session.joined if self.index == 0 else self.attempt),
            "acked": self.acked if self.attempt else session.clock, "attempt": self.attempt, "init": session.initialising,
            "mode": written(session.mode),
            "push": codecs.push[self.index], "pull": codecs.pull[self.index],
        }  # fmt: skip
        if self.index == 0:
            body["has"] = None if self.record.id is None else [*self.record.id, self.record.count]
            body["rule"] = session.rule
            body["aliases"] = session.aliases
            body["tables"] = [spec.to_json() for spec in session.rows.specs]
            body["table"] = [spec.to_json() for spec in session.layout.table]
        return body

    def _serve(self, stream: Stream) -> None:
        lane = WorkerLane(self, stream)
        with self.session.cond:
            self.lanes = [lane]
        self._last = time.monotonic()
        self.read(lane)

    def read(self, lane: WorkerLane) -> None:
        """Handle what comes by a lane until its stream ends. Raises StreamClosed, TimeoutError, WireError."""
        poll = select.poll()
        try:
            poll.register(lane.stream.sock, select.POLLIN)
        except ValueError:
            raise StreamClosed(f"{lane.stream.peer}: closed before it was read") from None
        while not self.session.ended:
            if not lane.stream.ahead() and not poll.poll(1000):
                if (
                    self.outstanding or self.session.rows.waits(self) or not self.welcomed
                ) and time.monotonic() - self._last > SILENCE_SECONDS:
                    raise StreamClosed(f"{lane.stream.peer}: not a word for {SILENCE_SECONDS:.0f} s")
                continue
            self._handle(lane, lane.stream.recv_header(SILENCE_SECONDS))
            self._last = time.monotonic()

    def _drop_lanes(self) -> None:
        """Close every stream, and wait until no thread lands a block any more."""
        with self.session.cond:
            self.welcomed = self.shared = False
            self.session.rows.sharing.lose(self.index)
            lanes, self.lanes = self.lanes, []
            self.session.cond.notify_all()
        for lane in lanes:
            lane.close()

    def _open_lanes(self, main: WorkerLane, body: dict[str, Any]) -> None:
        """Dial the further lanes that the shard offers. Raises StreamClosed where it does not take them."""
        for number in range(1, min(int(body.get("lanes", 1)), MAX_LANES)):
            stream = tcp.again(main.stream, DIAL_SECONDS)
            hello = {"role": "worker", "scheme": "none", "lane": number, "token": str(body["token"])}
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
        elif kind is Kind.WELCOME:
            self._welcome(lane, stream.recv_json(header))
        elif kind is Kind.WAITING:
            session.on_waiting(self, stream.recv_json(header))
        elif kind is Kind.RECORD:
            session.on_record(header.clock, bytes(stream.recv_body(header, MAX_RECORD)))
        elif kind is Kind.RECORD_PIECE:
            self._record_piece(header, stream.recv_body(header, PIECE))
        elif kind is Kind.RECORD_HAS:
            session.on_record_has(header)
        elif kind is Kind.ERROR:
            session.on_error(self, stream.recv_json(header))
        elif kind is Kind.INFO:
            none = frozenset(stream.recv_json(header)["none"])
            with session.cond:
                self.none[header.block] = none
        elif kind is Kind.CODEC:
            session.exchange.compression.told(self.index, stream.recv_json(header))
        elif kind is Kind.REWIND:
            session.on_rewind(stream.recv_json(header) if header.length else {})
        elif kind is Kind.STATE:
            session.on_state(header.request, bytes(stream.recv_body(header, MAX_RECORD)))
        else:
            stream.drain(header)
            session.on_signal(self, header)

    def _welcome(self, lane: WorkerLane, body: dict[str, Any]) -> None:
        session = self.session
        if len(self.lanes) == 1 and not body.get("init"):
            self._open_lanes(lane, body)
        session.on_assignment(self, body)
        self._share(body)
        session.rows.share(self, body.get("sharedRows"))
        with session.cond:
            pushing = (self._pushed_clock == session.clock and self.unsent) or self._pushed.keys() & self.outstanding.keys()
            if self.attempt and int(body["attempt"]) > self.attempt and pushing:
                # What the attempt before answered of the open clock is lost with it; without it this clock would never be whole.
                self.outstanding |= self._pushed
            self.attempt = int(body["attempt"])
            self.welcomed = True
            self.waiting = ""
            session.exchange.compression.agreed(self.index, [str(name) for name in body["codecs"]], not lane.stream.sums)
            session.on_welcome(self, body)
            again = [] if body.get("init") else sorted(self.outstanding.items())
        complete, opened = int(body["complete"]), set(body["open"])
        session.exchange.send_info(self)
        for number, old in again:
            taken = old.kind is not Kind.PULL and (old.clock < complete or (old.clock == complete and old.block in opened))
            if taken and old.kind is Kind.ROW_PUSH:
                version = (0, session.mode.version_for(old.clock))
                self.send(session.header(Kind.LOOKUP, table=old.table, clock=old.clock, version=version, request=number))
            elif old.kind is Kind.ROW_PUSH:
                session.rows.send(self, old)
            elif taken:
                flag = Flag.STORE if session.reduces else Flag.NONE
                version = (0, session.mode.version_for(old.clock))
                self.send_block(old._replace(kind=Kind.PULL, flags=flag, version=version))
            else:
                self.send_block(old)
        session.rows.again(self)
        session.on_relinked(self)

    def _record_piece(self, header: Header, data: bytearray) -> None:
        record = RecordId(header.clock, *header.version)
        if record.size > MAX_RECORD:
            raise WireError(f"a record of {record.size} bytes is above the limit of {MAX_RECORD}")
        with self.session.cond:
            whole = self.record.take(record, header.part, data)
        if whole is not None:
            self.session.on_record(record.clock, whole)

    def _applied(self, header: Header) -> None:
        """A shard has applied the rows of a push."""
        with self.session.cond:
            request = self.outstanding.get(header.request)
            if request is not None and request.kind is Kind.ROW_PUSH:
                self._settle(request)

    def _settle(self, request: Header) -> None:
        """A request is answered; call with the session's condition held."""
        self.outstanding.pop(request.request, None)
        if not self.outstanding and not self.unsent and request.kind is not Kind.PULL:
            self.acked = request.clock + 1
        if not self.outstanding or self.session.exchange.watched:
            self.session.cond.notify_all()

    def _share(self, body: dict[str, Any]) -> None:
        """Exchange memory with a shard that offers it; where that cannot be done, blocks go over the streams."""
        session, offer = self.session, body.get("shared")
        if offer is not None:
            blocks = [block for block, owner in enumerate(session.owner) if owner == self.index]
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
                session.cut_clock = request.clock + (request.kind is Kind.PUSH)
                session.stores = bool(header.flags & Flag.STORE)
            self._settle(request)
