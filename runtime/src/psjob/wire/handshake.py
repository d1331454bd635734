"""How a stream begins: a pool takes those that dial a process, and the two ends prove to each other who they are.

The streams are spread over a pool of threads: as many as the process has cores, however many streams there are. The handshake is TLS
where it must be, then what `psjob.wire.auth` says.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from psjob.contract import SHARD_NAME, WORKER_NAME
from psjob.process.config import Encryption, ProcessContext
from psjob.wire import auth
from psjob.wire.auth import Peer, ShardIdentity, Tls
from psjob.wire.event_loop import NonBlockingStream, Sending
from psjob.wire.frame import HEADER_BYTES, Flag, Header, WireError, parse, run_digest
from psjob.wire.frame import MAGIC as FRAME
from psjob.wire.reading import HELLO_SECONDS, STRANGER_BYTES, STRANGER_SECONDS, ReadRequest, StreamClosed, StreamReading, Wants
from psjob.wire.tcp import Stream
from psjob.wire.unauthenticated import STRANGER_LETTERS, one_line

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
