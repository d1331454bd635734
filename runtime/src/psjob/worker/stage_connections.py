"""The streams between a worker of a stage and its neighbours: who listens, who dials, what comes and what is sent.

A worker listens at a port that it tells the coordinator, which tells its neighbours, with a key for each link. Of two neighbours the one
of the earlier stage dials. `StageExchange` decides what is sent; the worker's condition guards it.

On one host payloads lie in memory that the two lend each other, and the stream carries where. Each side writes into a region of its own
and reads the other's. The reader copies a payload at once and says so; only then are its bytes written again. A payload that is given
again, on another stream, is copied again, into the memory of that stream.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from psjob.contract import MOST_NUMBER, keys
from psjob.layout import memory, structures
from psjob.process import supervise
from psjob.process.errors import Refused
from psjob.protocol.pipeline import Action, AllBack, Give, Key, SayStands, StageExchange
from psjob.protocol.worker import events as e
from psjob.wire import shared_memory, tcp
from psjob.wire.auth import GREETING_BYTES, Peer, ShardIdentity, Unproven
from psjob.wire.event_loop import NonBlockingStream, Sending
from psjob.wire.frame import MAX_JSON, Flag, Header, Kind, WireError, dump
from psjob.wire.handshake import admit, greet
from psjob.wire.reading import HELLO_SECONDS, StreamClosed, Wants
from psjob.wire.shared_memory import Region, RingAllocator, SharedMemoryBroker, copy_in
from psjob.wire.stream_pool import StreamPool
from psjob.wire.tcp import Stream
from psjob.wire.unauthenticated import one_line
from psjob.worker.rendezvous import DIAL_SECONDS
from psjob.worker.state import SessionState, StageGauge
from psjob.worker.step_parts import OTHERS

BYTES: Final = 64 << 20
"""That each side lends. Only pages that hold a payload at some time take memory. What finds no room goes over the stream."""
LEAST: Final = 256 << 10
"""A payload below this many bytes goes over the stream."""
MOST_OFFER: Final = 4096
"""Bytes of an offer's body."""
log = logging.getLogger("psjob.worker")


class StageLending:
    """What one side lends for one stream. Raises OSError if the system has no such memory."""

    def __init__(self) -> None:
        self.region = Region.lend(BYTES)
        self.ring = RingAllocator(BYTES)
        self._lock = threading.Lock()

    def place(self, parts: Sequence[memoryview], size: int) -> int | None:
        """Copy a payload of `size` bytes to where the neighbour reads it; its offset. None: there is no room."""
        with self._lock:
            offset = self.ring.take(size)
        if offset is not None:
            copy_in(parts, self.region.buffer(offset, size))
        return offset

    def copied(self, offset: int) -> None:
        """The neighbour has copied what lies at `offset`. Raises WireError if nothing lies there."""
        with self._lock:
            self.ring.copied(offset)


class StageSharing:
    """Of a worker of a stage, with all its neighbours. `lends`: may it lend memory to those of its host?"""

    def __init__(self, rank: int, lends: bool) -> None:
        self._rank, self._lends = rank, lends
        self.placed = 0
        """Payloads that went through lent memory."""
        self._lock = threading.Lock()
        self._counter: SharedMemoryBroker | None = None
        self._offered: dict[Stream, str] = {}
        """By stream that is open, the token that its dialler may come with."""
        self._lent: dict[Stream, StageLending] = {}
        self._barred: set[int] = set()
        """Neighbours whose memory could not be had once."""

    def open(self) -> None:
        """Wait for neighbours that come for memory."""
        if self._lends:
            self._counter = SharedMemoryBroker(f"worker-{self._rank}-lends")

    def offer(self, stream: Stream, header: Header, rank: int) -> None:
        """Offer memory to a neighbour of this host that has dialled, in a frame with this header."""
        counter = self._counter
        if counter is None or stream.is_remote or not isinstance(stream, NonBlockingStream):
            return

        def give(fd: int) -> Region:
            region, lending = Region.borrow(fd, BYTES), StageLending()
            with self._lock:
                if stream not in self._offered:
                    raise WireError(f"the stream of worker {rank} has ended meanwhile")
                self._lend(stream, rank, lending, region)
            return lending.region

        token = counter.expect(give)
        with self._lock:
            self._offered[stream] = token
        stream.put_frame(header, dump({"name": counter.address, "token": token}))

    def take(self, stream: Stream, rank: int, offer: Mapping[str, Any]) -> None:
        """A neighbour that this worker has dialled offers memory: come for it.

        Raises:
            StreamClosed: it cannot be had. On the next stream it is left alone: this side may not have it, and the other one use it.
            WireError: the offer is not in shape, or a second one.
        """
        name, token = offer.get("name"), offer.get("token")
        shaped = isinstance(name, str) and isinstance(token, str) and (name + token).isascii() and "\0" not in name
        if not shaped or stream in self._lent or isinstance(stream, NonBlockingStream):
            raise WireError(f"worker {rank} offers memory at {str(name)[:40]!r}, expected one offer to the one that dialled")
        if not self._lends or stream.is_remote or rank in self._barred:
            return
        try:
            lending = StageLending()
            region = Region.borrow(shared_memory.fetch(str(name), str(token), lending.region.fd), BYTES)
        except (OSError, WireError) as error:
            self._barred.add(rank)
            log.warning("worker %d: its memory is out of reach: %s", rank, one_line(error, 200))
            raise StreamClosed(f"worker {rank}: its memory is out of reach") from error
        with self._lock:
            self._lend(stream, rank, lending, region)

    def send(self, stream: Stream, header: Header, parts: Sequence[memoryview]) -> bool:
        """Send a payload, whose head has `part` bytes, by where it lies. False: its bytes have to be sent. Raises StreamClosed."""
        size, lending = sum(map(len, parts)), self._lent.get(stream)
        if lending is None or size < LEAST or (offset := lending.place(parts, size)) is None:
            return False
        with self._lock:
            self.placed += 1
        told = header._replace(request=header.part).lent(offset, size)
        if isinstance(stream, NonBlockingStream):
            sending = Sending([told])
            stream.put(lambda: sending)
        else:
            stream.write(told)
        return True

    def copied(self, stream: Stream, offset: int) -> None:
        """The neighbour has copied what lay at `offset`. Raises WireError if nothing does."""
        lending = self._lent.get(stream)
        if lending is None:
            raise WireError("COPIED on a stream for which no memory is lent")
        lending.copied(offset)

    def drop(self, stream: Stream) -> None:
        """The stream has ended; nobody reads of it any more."""
        with self._lock:
            token = self._offered.pop(stream, None)
            self._lent.pop(stream, None)
            stream.borrowed = None
        if token is not None and (counter := self._counter) is not None:
            counter.forget(token)

    @property
    def open_streams(self) -> int:
        """Streams for which memory is lent now."""
        return len(self._lent)

    def close(self) -> None:
        """No neighbour is waited for any more."""
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.close()

    def forget(self) -> None:
        """In a forked process: close the copies."""
        if self._counter is not None:
            self._counter.close_copy()

    def _lend(self, stream: Stream, rank: int, lending: StageLending, region: Region) -> None:
        stream.borrowed, self._lent[stream] = region, lending
        log.info("payloads of %d bytes and more from and to worker %d go over shared memory", LEAST, rank)


def head_of(header: Header) -> int:
    """Bytes of a payload's head."""
    return header.request if header.flags & Flag.LENT else header.part


AGAIN_SECONDS: Final = 0.1
"""Between two tries to reach a neighbour."""
MOST_BYTES: Final = 4 << 30
"""Of one payload."""
EXCHANGED: Final = (Kind.ACTIVATION, Kind.GRADIENT)


class Payload(NamedTuple):
    """What is given: the head of a structure, and the bytes of its tensors. What came is a structure again."""

    head: bytes
    parts: list[memoryview]


@dataclass(frozen=True)
class Neighbour:
    """As the coordinator told it."""

    start: int
    host: str
    port: int
    key: bytes


class StageConnections:
    """Of a worker that has a stage. `lends`: may it lend memory to neighbours of its host? `tell` sends numbers to the coordinator."""

    def __init__(self, state: SessionState, lends: bool, tell: Callable[[dict[str, Any]], None]) -> None:
        self.state, self.gauge = state, StageGauge(state.idle, tell)
        self.exchange: StageExchange[Any] | None = None
        """From when it is known at which step this worker joins."""
        self.ahead = 0
        """Steps that a worker may begin beyond the one at which it stands: of the job's way of training."""
        self._known: dict[int, Neighbour] = {}
        self._links: dict[int, tuple[tuple[int, int], Stream]] = {}
        """By rank: the stream there, and the incarnation at its end."""
        self._diallers: dict[int, threading.Thread] = {}
        self.sharing = StageSharing(state.place.index, lends)
        self._listener: socket.socket | None = None
        self._pool: StreamPool | None = None

    # -- the worker's side ------------------------------------------------------------------------

    def listen(self, host: str) -> int:
        """The port at which neighbours are waited for, on the address by which this process reaches shard 0. Raises StreamClosed."""
        if self._listener is None:
            try:
                self._listener = tcp.listening_socket(host, 0)
            except OSError as error:
                raise StreamClosed(str(error)) from error
            self.sharing.open()
            self._pool = StreamPool("stage", 1)
            self._pool.accept(
                self._listener, self._serve, 4 * len(self.state.place.config.stages.neighbours(self._rank)) + 8, GREETING_BYTES
            )
        return int(self._listener.getsockname()[1])

    def told(self, body: Mapping[str, Any]) -> None:
        """The coordinator tells of a neighbour. Raises WireError."""
        place, stages = self.state.place, self.state.place.config.stages
        try:
            rank, start, port = int(body["rank"]), int(body["start"]), int(body["port"])
            ends = {self._rank: place.number, rank: start}
            key = keys.masked(place.keys.own, bytes.fromhex(body["key"]), ends)
            if rank not in stages.neighbours(self._rank) or not 0 < start <= MOST_NUMBER:
                raise ValueError(f"worker {rank}, start {start}")
            told = Neighbour(start, str(body["host"]), port, key)
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"NEIGHBOUR of shard 0 is not in shape: {error!r}") from None
        with self.state.cond:
            self._exchange()
            before = self._known.get(rank)
            if before is not None and before.start > start:
                return
            self._known[rank] = told
            older = self._links.get(rank) if before is not None and before.start < start else None
            if rank > self._rank and rank not in self._diallers:
                self._diallers[rank] = thread = supervise.thread(lambda: self._dial(rank), f"stage-{rank}")
                thread.start()
        if older is not None:
            older[1].close()

    def begin(self, step: int, microbatches: int) -> None:
        """The script begins a step."""
        with self.state.cond:
            actions = self._exchange().begin(step, microbatches)
        self._carry_out(actions)

    def stand(self, step: int) -> None:
        """This worker stands at a step: all before are over."""
        with self.state.cond:
            actions = self._exchange().stand(step)
        self._carry_out(actions)

    def give(self, key: Key, value: Any) -> None:
        """Give a neighbour what was made of a micro-batch. Raises ValueError for what cannot be sent."""
        payload = Payload(*structures.encode_structure(value))
        with self.state.cond:
            actions = self._exchange().give(key, payload)
        self._carry_out(actions)

    def take(self, key: Key) -> Any:
        """What a neighbour made of a micro-batch, once it has come. Raises SessionEnd, and Refused where its script has ended before."""
        exchange = self._exchange()
        other = exchange.partner(key.micro, key.kind, gives=False)
        what = "activations" if key.kind is Kind.ACTIVATION else "gradients"
        stage = self.state.place.config.stages.of(other)
        named = f"{what} of micro-batch {key.micro} of step {key.step} from worker {other} (stage {stage})"
        with self.gauge.waits_for(other):
            self.state.wait(lambda: exchange.has(key) or exchange.ended.get(other, key.step + 1) <= key.step, named, part=OTHERS)
        with self.state.cond:
            if not exchange.has(key):
                raise Refused(
                    f"{named} will not come: its script has ended after {exchange.ended[other]} steps. All workers of a job of stages make "
                    "the same number of steps; end them by a number that all workers know, such as that of batches"
                )
            return exchange.take(key)

    def has(self, key: Key) -> bool:
        """Has it come?"""
        with self.state.cond:
            return self._exchange().has(key)

    def leave(self) -> None:
        """The script has ended."""
        with self.state.cond:
            actions = self._exchange().leave(self.state.clock)
        self._carry_out(actions)

    def close(self) -> None:
        """No neighbour is spoken to any more."""
        with self.state.cond:
            streams = [stream for _, stream in self._links.values()]
        for stream in streams:
            stream.close()
        if self._pool is not None and self._listener is not None:
            self._pool.close()
            self._listener.close()
            self.sharing.close()

    def join(self, seconds: float) -> None:
        """Wait for the threads that dial and that listen, which end soon after `close`."""
        deadline = time.monotonic() + seconds
        for thread in self._diallers.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._pool is not None:
            self._pool.join(max(0.0, deadline - time.monotonic()))

    def forget(self) -> None:
        """In a forked process: close the copies, so that a neighbour sees at once when this worker dies."""
        for _, stream in self._links.values():
            stream.sock.close()
        if self._listener is not None:
            self._listener.close()
        self.sharing.forget()

    # -- streams -----------------------------------------------------------------------------------

    @property
    def _rank(self) -> int:
        return self.state.place.index

    def _exchange(self) -> StageExchange[Any]:
        if self.exchange is None:
            stages = self.state.place.config.stages
            self.exchange = StageExchange(stages, self._rank, self.state.machine.clock, self.ahead)
        return self.exchange

    def _dial(self, rank: int) -> None:
        """Be linked to a neighbour of the stage behind, whatever process it is."""
        while not self.state.ended:
            with self.state.cond:
                told = self._known[rank]
            try:
                for stream in tcp.connect(told.host, told.port, DIAL_SECONDS):
                    try:
                        standing = greet(stream, self.state.place, rank, link=told.key)
                        if standing.attempt == told.start:
                            stream.run(self._speak(stream, rank, told.start))
                    finally:
                        stream.close()
            except (StreamClosed, TimeoutError) as error:
                log.debug("link to worker %d: %s", rank, error)
            except WireError as error:
                log.warning("link to worker %d: %s", rank, one_line(error, 1000))
            time.sleep(AGAIN_SECONDS)

    def _serve(self, stream: NonBlockingStream) -> Wants[None]:
        """Somebody has dialled."""
        place = self.state.place
        try:
            peer = yield from admit(stream, self._key, ShardIdentity(self._rank, place.number, self.state.machine.term), place.encryption)
            stream.known()
            yield from self._speak(stream, peer.index, peer.number)
        except (StreamClosed, TimeoutError, Unproven) as error:  # a neighbour may dial before this worker has heard of it
            log.debug("a stream to this worker from %s: %s", stream.peer, error)
        except WireError as error:
            log.warning("a stream to this worker from %s: %s", stream.peer, one_line(error, 1000))
        finally:
            stream.close()

    def _key(self, peer: Peer, run: bytes) -> bytes:
        """The key of who dials. Raises Unproven for who is no neighbour of the stage before."""
        with self.state.cond:
            told = self._known.get(peer.index)
        if run != self.state.run or peer.role != "worker" or told is None or told.start != peer.number or peer.index > self._rank:
            raise Unproven("no such process dials this worker")
        return told.key

    def _speak(self, stream: Stream, rank: int, start: int) -> Wants[None]:
        """Say where this worker stands, hear where the neighbour does, and take what it gives until the stream ends."""
        state, exchange = self.state, self._exchange()
        with state.cond:
            self._send(stream, self._stands(exchange.linked_to(rank)))
        header = yield from stream.next_header(HELLO_SECONDS)
        self._check(header, rank, start)
        if header.kind is not Kind.STANDS:
            raise WireError(f"the first frame of worker {rank} is {header.kind.name}, expected STANDS")
        if header.term != state.machine.term:
            raise StreamClosed(f"worker {rank} is in term {header.term}, this one in {state.machine.term}; one of them goes back soon")
        incarnation = (header.start, header.rewinds)
        with state.cond:
            older = self._links.get(rank)
            if older is not None and older[0] > incarnation:
                raise StreamClosed(f"worker {rank}: a newer process of it is here")
            self._links[rank] = incarnation, stream
            actions = exchange.met(rank, header.clock, header.part, bool(header.flags & Flag.ABSENT))
            state.cond.notify_all()
        if older is not None:
            older[1].close()
        try:
            self.sharing.offer(stream, state.header(Kind.LENDS), rank)
            self._carry_out(actions)
            while not state.ended:
                header = yield from stream.next_header(None)
                self._check(header, rank, start)
                if header.kind is Kind.STANDS:
                    with state.cond:
                        exchange.stands(rank, header.clock, bool(header.flags & Flag.ABSENT))
                        state.cond.notify_all()
                elif header.kind in EXCHANGED:
                    yield from self._came(stream, rank, header)
                elif header.kind is Kind.LENDS:
                    self.sharing.take(stream, rank, (yield from stream.json(header, MOST_OFFER)))
                elif header.kind is Kind.COPIED:
                    self.sharing.copied(stream, header.part)
                else:
                    raise WireError(f"{header.kind.name} is not what workers say to each other")
        finally:
            with state.cond:
                if self._links.get(rank) == (incarnation, stream):
                    del self._links[rank]
                    exchange.lost(rank)
            self.sharing.drop(stream)

    def _check(self, header: Header, rank: int, start: int) -> None:
        if header.run != self.state.run or header.worker != rank or header.start != start:
            raise WireError(f"{header.kind.name} does not carry the run, rank and start of worker {rank}")

    def _came(self, stream: Stream, rank: int, header: Header) -> Wants[None]:
        state, exchange, key = self.state, self._exchange(), Key(header.clock, header.block, header.kind)
        with state.cond:
            exchange.check(rank, key)
            wanted = exchange.wants(key)
        if not wanted:
            yield from stream.skip(header)
            self._copied(stream, header)
            return
        size = head_of(header)
        if size > min(MAX_JSON, header.length) or header.length > MOST_BYTES:
            raise WireError(f"{header.kind.name} of {header.length} bytes, {size} of them its head, is above the limit")
        if header.flags & Flag.LENT:
            stream.lent(header, header.part, header.length)  # before memory is taken for so many bytes
        try:
            head, body = memoryview(bytearray(size)), torch.empty(header.length - size, dtype=torch.uint8, device="cpu")
        except (RuntimeError, MemoryError) as error:
            raise StreamClosed(
                f"worker {rank}: no memory for {header.kind.name} of {header.length} bytes: {one_line(error, 200)}"
            ) from error
        place = memory.view(body)
        yield from stream.payload(header, [head, place])
        self._copied(stream, header)
        value = structures.decode_structure(head, place)
        with state.cond:
            exchange.came(rank, key, value)
            state.cond.notify_all()

    def _copied(self, stream: Stream, header: Header) -> None:
        """A payload is not read any more where it lay."""
        if header.flags & Flag.LENT:
            self._send(stream, self.state.header(Kind.COPIED, part=header.part))

    # -- out ---------------------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action[Any]]) -> None:
        for action in actions:
            match action:
                case AllBack():
                    self.state.handle(e.Said(Kind.STEP_LOST, {"rank": action.rank, "step": action.step}))
                case SayStands():
                    self._send_to(action.rank, self._stands(action), [])
                case Give():
                    key, payload = action.key, action.payload
                    header = self.state.header(key.kind, clock=key.step, block=key.micro, part=len(payload.head))
                    self._send_to(action.rank, header, [memoryview(payload.head), *payload.parts])

    def _stands(self, action: SayStands) -> Header:
        flags = Flag.ABSENT if action.left else Flag.NONE
        return self.state.header(Kind.STANDS, clock=action.step, part=action.since, flags=flags)

    def _send_to(self, rank: int, header: Header, parts: list[memoryview]) -> None:
        with self.state.cond:
            found = self._links.get(rank)
        if found is not None:
            self._send(found[1], header, parts)

    def _send(self, stream: Stream, header: Header, parts: list[memoryview] | None = None) -> None:
        """A stream that has ended is forgotten: what it did not bring is given again on the next one."""
        with contextlib.suppress(StreamClosed):
            if header.kind in EXCHANGED and self.sharing.send(stream, header, parts or []):
                return
            if isinstance(stream, NonBlockingStream):
                sending = Sending(stream.framed_parts(header, parts or []))
                stream.put(lambda: sending, large=True)
            else:
                stream.send_parts(header, parts or [])
