"""Who comes in: each stream proves whose it is, also before this process has imported torch; then it goes to the server.

A new shard 0 is known to its workers the moment it listens. In a mode where all rewind together, a worker of an older term
hears of it at once and restarts while this shard still imports and restores. All others wait at the acceptor.

While torch is imported, which takes seconds, a shard tells the coordinator that it comes back with a new term. The others can rewind
their workers meanwhile. It is only a hint: if it is lost, the real hello says the same later.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, NamedTuple

from psjob.contract import keys
from psjob.modes import of as mode_of
from psjob.process.config import ProcessContext
from psjob.protocol.streams import MOST_STREAMS
from psjob.shard.worker_fields import known
from psjob.wire import tcp
from psjob.wire.auth import Peer, ShardIdentity, Unproven
from psjob.wire.event_loop import InOwnThread, NonBlockingStream
from psjob.wire.frame import MAX_BODY, MAX_JSON, MAX_VALUES, Flag, Header, Kind, WireError, dump, run_digest
from psjob.wire.handshake import admit, greet
from psjob.wire.reading import HELLO_SECONDS, Pause, StreamClosed, Wants


def hello_body(
    index: int, attempt: int, term: int, serving: bool, restore_id: int, mode: str = "", carried: int | None = 0, early: bool = False
) -> dict[str, Any]:  # fmt: skip
    """A shard's hello. `mode` is the one that it serves. `early`: it only announces its term while it still starts.

    `carried` is the last order that it carried out, where the coordinator decides; None: one broke off.
    """
    return {"role": "shard", "index": index, "attempt": attempt, "term": term, "serving": serving, "restore_id": restore_id,
            "mode": mode, "carried": carried, "early": early}  # fmt: skip


SECONDS = 0.5


def announce(here: ProcessContext) -> None:
    """Say hello early to shard 0; whatever goes wrong is left to the real hello."""
    if here.index == 0 or here.number == 1:
        return
    peer = here.config.shards[0]
    header = Header(Kind.HELLO, run=run_digest(here.run), term=here.term, attempt=here.number, worker=-1 - here.index)
    try:
        for stream in tcp.connect(peer.host, peer.port, SECONDS):
            greet(stream, here, 0, SECONDS)
            stream.send_json(header, hello_body(here.index, here.number, here.term, False, 0, early=True))
            stream.close()
            return
    except (OSError, WireError):
        return


SPARE = 2
"""Streams beyond those of a link that a process may begin at a time: ones that broke."""


class HelloRoom(NamedTuple):
    """What a hello may have at most."""

    bytes: int = MAX_BODY
    values: int = MAX_VALUES


ONE_FRAME = HelloRoom(MAX_JSON, MAX_JSON)
Meet = Callable[[NonBlockingStream, Header, dict[str, Any]], Wants[None] | InOwnThread]


class Acceptor:
    """Reads the hello of each stream, then hands it to `meet` once `open` was called. `refused` counts bad ones."""

    def __init__(self, here: ProcessContext) -> None:
        self.here = here
        self.run = run_digest(here.run)
        self.refused: Callable[[NonBlockingStream, Exception], None] = self._answer_error
        self._together = mode_of(here.config).rewinds_together
        self._room: Callable[[], HelloRoom] = HelloRoom
        self._meet: Meet | None = None
        self._waiting: dict[NonBlockingStream, None] = {}
        self._lock = threading.Lock()
        self._begun: dict[Peer, dict[NonBlockingStream, None]] = {}
        """Streams of a process that are not served yet, the oldest first."""
        self._large: dict[Peer, NonBlockingStream] = {}
        """Of these the one whose hello has more than one frame."""

    def open(self, meet: Meet, refused: Callable[[NonBlockingStream, Exception], None], room: Callable[[], HelloRoom]) -> None:
        """From now on streams go to `meet`. `room`: what a hello may have by now."""
        self.refused, self._room = refused, room
        self._meet = meet
        for stream in list(self._waiting):
            stream.wake()

    def serve(self, stream: NonBlockingStream) -> Wants[InOwnThread | None]:
        """One stream, from its handshake to its end. A stranger or a broken rule gets one ERROR and is closed."""
        try:
            peer = yield from admit(
                stream, self._key, ShardIdentity(self.here.index, self.here.number, self.here.term), self.here.encryption
            )
            stream.known()
            with self._beginning(peer, stream):
                header, hello = yield from self._hello(peer, stream)
                if self._meet is None and self._must_rewind(hello):
                    stream.put_frame(Header(Kind.REWIND, run=self.run, term=self.here.term, attempt=self.here.number))
                    return None
                meet = yield from self._opened(stream)
            served = meet(stream, header, hello)
            if not isinstance(served, Generator):
                return partial(self._go_on, stream, served)
            yield from served
        except (WireError, TimeoutError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            self._end(stream, error)
        except StreamClosed:
            pass
        return None

    @contextlib.contextmanager
    def _beginning(self, peer: Peer, stream: NonBlockingStream) -> Iterator[None]:
        """A process begins a stream. One that begins many keeps its newest: else its key would shut all others out."""
        with self._lock:
            begun = self._begun.setdefault(peer, {})
            begun[stream] = None
            oldest = next(iter(begun)) if len(begun) > (self.here.config.streams or MOST_STREAMS) + SPARE else None
            if oldest is not None:
                del begun[oldest]  # it comes to its end later; the next one has to close another
        if oldest is not None:
            oldest.close()
        try:
            yield
        finally:
            with self._lock:
                begun.pop(stream, None)
                if not begun and self._begun.get(peer) is begun:
                    del self._begun[peer]
                if self._large.get(peer) is stream:
                    del self._large[peer]

    def _hello(self, peer: Peer, stream: NonBlockingStream) -> Wants[tuple[Header, dict[str, Any]]]:
        """The hello of a process. Workers tell shard 0 of their model; all other hellos are one frame. Of long ones the newest is kept."""
        header = yield from stream.next_header(HELLO_SECONDS)
        if header.kind is not Kind.HELLO or header.run != self.run:
            raise WireError(f"the first frame is {header.kind.name}, expected HELLO of this run")
        if header.flags & Flag.MORE:
            with self._lock:
                older, self._large[peer] = self._large.get(peer), stream
            if older is not None:
                older.close()
        long = peer.role == "worker" and self.here.index == 0
        room = self._room() if long else ONE_FRAME
        hello = yield from stream.hello(header, room.values, room.bytes)
        if peer.role == "worker":
            hello = known(Kind.HELLO, hello)
        _check(peer, header, hello)
        return header, hello

    def _key(self, peer: Peer, run: bytes) -> bytes:
        """What `peer` proves itself with. Raises Unproven for who is none of those that dial this shard."""
        here, own = self.here, self.here.keys
        if run != self.run:
            raise Unproven("this process is of another run than the shard that listens here")
        if peer.role == "worker" and peer.index < here.config.workers:
            return keys.worker_key(own.workers, peer.index, peer.number)
        if peer.role == "shard" and here.index == 0 and 0 < peer.index < len(here.config.shards):
            return keys.shard_key(own.shards, peer.index, peer.number)
        raise Unproven(f"{peer.role} {peer.index} is not served by shard {here.index}")

    def _opened(self, stream: NonBlockingStream) -> Wants[Meet]:
        self._waiting[stream] = None
        try:
            while self._meet is None:
                yield Pause()
            return self._meet
        finally:
            del self._waiting[stream]

    def _go_on(self, stream: NonBlockingStream, apart: InOwnThread) -> None:
        try:
            apart()
        except (WireError, TimeoutError, ValueError, KeyError, TypeError, OverflowError) as error:
            self._end(stream, error)
        except StreamClosed:
            pass

    def _end(self, stream: NonBlockingStream, error: Exception) -> None:
        shaped = isinstance(error, WireError | TimeoutError)
        self.refused(stream, error if shaped else WireError(f"a frame's body is not in shape: {error!r}"))

    def _must_rewind(self, hello: dict[str, Any]) -> bool:
        older = int(hello.get("term", 0)) < self.here.term
        return hello.get("role") == "worker" and self._together and not hello.get("fresh") and older

    def _answer_error(self, stream: NonBlockingStream, error: Exception) -> None:
        raw = dump({"code": "protocol", "error": str(error)[:500]})
        stream.put_frame(Header(Kind.ERROR, run=self.run, term=self.here.term, attempt=self.here.number), raw)


def _check(peer: Peer, header: Header, hello: dict[str, Any]) -> None:
    """Raises WireError if a hello is not of the process that has proven itself on its stream."""
    if peer.role == "worker":
        said = Peer(str(hello.get("role")), header.worker, header.start)
    else:
        said = Peer(str(hello.get("role")), hello["index"], hello["attempt"])
    if said != peer:
        raise WireError(f"the hello is of {str(said)[:200]}, its stream of {peer}")


MOST_LINES = 60
QUIET_SECONDS = 60.0


class LogRateLimiter:
    """At most MOST_LINES in SECONDS. May be called from any thread."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}
        """When the hosts of the last minute had their line; oldest first."""
        self._lock = threading.Lock()
        self._untold = 0

    def told(self, host: str, now: float) -> int | None:
        """May a refusal of `host` have a line? With it, how many have had none since the last one; None: it has none."""
        with self._lock:
            while self._told and now - next(iter(self._told.values())) >= QUIET_SECONDS:
                del self._told[next(iter(self._told))]
            if host in self._told or len(self._told) >= MOST_LINES:
                self._untold += 1
                return None
            self._told[host] = now
            untold, self._untold = self._untold, 0
            return untold
