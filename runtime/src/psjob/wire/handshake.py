"""How a stream begins: a pool takes those that dial a process, and the two ends prove to each other who they are.

The streams are spread over a pool of threads: as many as the process has cores, however many streams there are. The handshake is TLS
where it must be, then what `psjob.wire.auth` says.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from psjob.contract import SHARD_NAME, WORKER_NAME
from psjob.process.config import Encryption, ProcessContext
from psjob.wire import auth
from psjob.wire.auth import Peer, ShardIdentity, Tls
from psjob.wire.event_loop import EventLoop, NonBlockingStream, Sending, Serve, nothing
from psjob.wire.frame import HEADER_BYTES, Flag, Header, WireError, parse, run_digest
from psjob.wire.frame import MAGIC as FRAME
from psjob.wire.reading import HELLO_SECONDS, STRANGER_BYTES, STRANGER_SECONDS, ReadRequest, StreamClosed, StreamReading, Wants
from psjob.wire.tcp import Stream
from psjob.wire.unauthenticated import STRANGER_LETTERS, HandshakeQueue, UnauthenticatedPeers, one_line

ACCEPTS = 64
"""Streams taken at a time, before others are read."""
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
LEAST, MOST = 2, 8
"""Threads of a pool."""
STRANGERS = 256
"""Streams that have not proven yet whose they are."""


class StreamPool:
    """`threads` None: as many as there are cores, within LEAST and MOST. Its threads run until `close`."""

    def __init__(self, name: str, threads: int | None = None) -> None:
        number = max(LEAST, threads or min(MOST, _cores()))
        self.loops = [EventLoop(f"{name}-streams-{at}", self._gone) for at in range(number)]
        self._lock = threading.Lock()
        self._reads: dict[NonBlockingStream, int] = {}
        """By stream, which loop reads it."""
        self._counts = [0] * number
        self._strangers: UnauthenticatedPeers[socket.socket | NonBlockingStream] = UnauthenticatedPeers(STRANGERS)
        self._handshakes = self.loops[0].handshakes = HandshakeQueue(self.loops[0].listen, self.loops[0].unlisten, self._strangers.drop)
        for loop in self.loops:
            loop.start()

    def accept(self, listener: socket.socket, serve: Serve, limit: int, first: int = 1) -> None:
        """Read what dials `listener` as `serve` wants it, from when its `first` bytes have come. Of those that `serve` knows, a newcomer
        above `limit` is closed; of all others there are STRANGERS at most."""
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, first)  # of those who dial it, too
        loop, fd = self.loops[0], listener.fileno()
        enter = partial(self._take, serve)

        def accept() -> None:
            for _ in range(ACCEPTS):
                try:
                    sock, address = listener.accept()
                except BlockingIOError:
                    return
                except OSError as error:
                    if error.errno in FULL:
                        loop.pause_accept(fd)
                    return
                if self._known() < limit:
                    self._meet(sock, str(address[0]), enter)
                else:
                    sock.close()
                if len(self._reads) >= limit + 2 * STRANGERS:  # those that had to go are still being closed
                    loop.pause_accept(fd)
                    return

        def hear() -> None:
            try:
                loop.listen(listener.fileno(), accept)
            except (OSError, ValueError):
                if listener.fileno() >= 0:  # else it was closed meanwhile
                    raise

        loop.post(hear)

    def close(self) -> None:
        """Close every stream; the threads end."""
        for loop in self.loops:
            loop.close()

    def join(self, seconds: float) -> None:
        """Wait for the threads, which end soon after `close`."""
        deadline = time.monotonic() + seconds
        for loop in self.loops:
            loop.join(max(0.0, deadline - time.monotonic()))

    def _known(self) -> int:
        """Streams whose peers have proven who they are."""
        return len(self._reads) + len(self._handshakes) - len(self._strangers)

    def _meet(self, sock: socket.socket, host: str, enter: Callable[[socket.socket, float], None]) -> None:
        """Somebody has dialled, whom nobody knows: it has a place, and who has had one for longest may have to go."""
        try:
            self._handshakes.add(sock, enter)
        except OSError:
            sock.close()
            return
        victim = self._strangers.add(sock, host)
        if isinstance(victim, NonBlockingStream):
            victim.close()
        elif victim is not None:
            self._handshakes.close(victim)

    def _take(self, serve: Serve, sock: socket.socket, since: float) -> None:
        """It has spoken: read on, in its place."""
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            stream = NonBlockingStream(sock, since)
        except OSError:
            self._strangers.drop(sock)
            sock.close()
            return
        with self._lock:
            at = min(range(len(self.loops)), key=lambda number: self._counts[number])
            self._reads[stream] = at
            self._counts[at] += 1
        self._strangers.rename(sock, stream)
        stream.known = partial(self._strangers.drop, stream)
        stream.reader, stream.writer = self.loops[at], self.loops[(at + 1) % len(self.loops)]
        stream.reader.post(partial(stream.reader.read, stream, serve(stream)))

    def _gone(self, stream: NonBlockingStream) -> None:
        self._strangers.drop(stream)
        stream.known = nothing  # it holds the stream, which would wait for the collector
        with self._lock:
            at = self._reads.pop(stream, None)
            if at is not None:
                self._counts[at] -= 1


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


SENTENCE_BYTES = 4096
"""Most bytes of a refusal that come from somebody who has proven nothing."""
KeyOf = Callable[[Peer, bytes], bytes]
"""The key of who dials, of that run. Raises WireError if no such process may."""


def greet(stream: Stream, here: ProcessContext, index: int, seconds: float = HELLO_SECONDS, link: bytes | None = None) -> ShardIdentity:
    """Prove to shard `index` that this process dials, and hear who answers. `link`: to worker `index`, with the key of that link.

    Raises StreamClosed, TimeoutError, WireError if it is not it, and Refused where this process was handed no key.
    """
    key, context = link or here.keys.own, here.encryption.dials
    if context is not None and _needed(here.encryption, stream):
        name = (SHARD_NAME if link is None else WORKER_NAME).format(index=index)
        stream.run(_dialled(stream, Tls(context, name), seconds))
    greeting = auth.greeting(Peer(here.role, here.index, here.number), run_digest(here.run), secrets.token_bytes(auth.NONCE_BYTES))
    stream.write(greeting)
    said = stream.run(_challenge(stream, seconds))
    standing = auth.read_challenge(key, greeting, said, index)
    proof = auth.proof(key, greeting + said)
    stream.write(proof)
    mine, theirs = auth.seals(key, greeting + said + proof)
    stream.seal(mine, theirs)
    return standing


def admit(stream: NonBlockingStream, key_of: KeyOf, standing: ShardIdentity, encryption: Encryption) -> Wants[Peer]:
    """Who dials, once it has proven it. Raises StreamClosed, TimeoutError, WireError."""
    until = stream.since + STRANGER_SECONDS
    greeting = yield from _read(stream, auth.GREETING_BYTES, _left(until))
    if encryption.accepts is not None and greeting[0] == auth.TLS_RECORD:
        yield from _accepted(stream, Tls(encryption.accepts, None), greeting, until)
        greeting = yield from _read(stream, auth.GREETING_BYTES, _left(until))
    elif _needed(encryption, stream):
        raise auth.Unproven("streams to this process are encrypted (training.encryption), and this one is not")
    peer, run = auth.read_greeting(greeting)
    key = key_of(peer, run)
    said = auth.challenge(key, greeting, standing, secrets.token_bytes(auth.NONCE_BYTES))
    sending = Sending([said])
    stream.put(lambda: sending)
    proof = yield from _read(stream, auth.PROOF_BYTES, _left(until))
    auth.check_proof(key, greeting + said, proof)
    theirs, mine = auth.seals(key, greeting + said + proof)
    stream.seal(mine, theirs)
    return peer


def _needed(encryption: Encryption, stream: Stream) -> bool:
    """Must this stream be encrypted?"""
    return encryption.word == "tls" or (encryption.word == "auto" and stream.is_remote)


def _dialled(stream: Stream, session: Tls, seconds: float) -> Wants[None]:
    """The handshake of TLS by who dials. Raises WireError if no such shard answers."""
    until = time.monotonic() + seconds
    came: bytes | memoryview = b""
    while True:
        said, over = session.shake(came)
        if said:
            stream.write(said)
        if over:
            break
        came = yield from _some(stream, STRANGER_BYTES - stream.received, until)
    stream.secure(session)


def _accepted(stream: NonBlockingStream, session: Tls, first: bytes, until: float) -> Wants[None]:
    """The handshake of TLS by a shard. `first`: what has come already."""
    came: bytes | memoryview = first
    while True:
        try:
            said, over = session.shake(came)
        except WireError as error:
            raise StreamClosed(f"{stream.peer}: {error}") from None
        if over:  # the dialler had the last word: all that was said to it has been sent
            break
        if said:
            stream.put(lambda sending=Sending([said]): sending)  # type: ignore[misc]
        came = yield from _some(stream, STRANGER_BYTES - stream.received, until)
    stream.secure(session)


def _some(stream: StreamReading, most: int, until: float) -> Wants[memoryview]:
    """What comes next, of `most` bytes. Raises WireError if none may."""
    if most <= 0:
        raise auth.Unproven(f"{STRANGER_BYTES} bytes came without a proof of this run's key")
    place = memoryview(bytearray(most))
    filling = ReadRequest(stream, [place], None, _left(until), least=1)
    yield filling
    return place[: filling.done]


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _challenge(stream: Stream, seconds: float) -> Wants[bytes]:
    """A shard's challenge. Its refusal, which is a frame, raises WireError."""
    first = yield from _read(stream, len(FRAME), seconds)
    if first != FRAME:
        return first + (yield from _read(stream, auth.CHALLENGE_BYTES - len(first), seconds))
    raw = first + (yield from _read(stream, HEADER_BYTES - len(first), seconds))
    raise auth.Unproven((yield from _refusal(stream, parse(raw))))


def _refusal(stream: Stream, header: Header) -> Wants[str]:
    body = yield from stream.hello(header._replace(flags=Flag.NONE, length=min(header.length, SENTENCE_BYTES)))
    return f"it refuses this process: {one_line(body.get('error'), STRANGER_LETTERS)}"


def _read(stream: StreamReading, size: int, seconds: float) -> Wants[bytes]:
    place = bytearray(size)
    yield ReadRequest(stream, [memoryview(place)], None, seconds)
    return bytes(place)
