"""The handshake of a stream as its two ends read and write it; see `psjob.wire.auth` for what is said."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from psjob.wire import auth
from psjob.wire.auth import Peer, Standing
from psjob.wire.frame import HEADER_BYTES, Flag, Header, parse, run_digest
from psjob.wire.frame import MAGIC as FRAME
from psjob.wire.pooled import Pooled, Sending
from psjob.wire.reading import HELLO_SECONDS, Filling, Reading, Wants
from psjob.wire.tcp import Stream

STRANGER_SECONDS = 1.0
"""Who dials has so long to prove who it is."""
SENTENCE_BYTES = 4096
"""Most bytes of a refusal that come from somebody who has proven nothing."""
KeyOf = Callable[[Peer, bytes], bytes]
"""The key of who dials, of that run. Raises WireError where no such process may."""


def greet(stream: Stream, peer: Peer, key: bytes, run: str, index: int, seconds: float = HELLO_SECONDS) -> Standing:
    """Prove to shard `index` who dials, and hear who answers. Raises StreamClosed, TimeoutError, and WireError where it is not it."""
    greeting = auth.greeting(peer, run_digest(run), secrets.token_bytes(auth.NONCE_BYTES))
    stream.write(greeting)
    said = stream.run(_challenge(stream, seconds))
    standing = auth.read_challenge(key, greeting, said, index)
    proof = auth.proof(key, greeting + said)
    stream.write(proof)
    mine, theirs = auth.seals(key, greeting + said + proof)
    stream.seal(mine, theirs)
    return standing


def admit(stream: Pooled, key_of: KeyOf, standing: Standing) -> Wants[Peer]:
    """Who dials, once it has proven it. Raises StreamClosed, TimeoutError, WireError."""
    until = time.monotonic() + STRANGER_SECONDS
    greeting = yield from _read(stream, auth.GREETING_BYTES, STRANGER_SECONDS)
    peer, run = auth.read_greeting(greeting)
    key = key_of(peer, run)
    said = auth.challenge(key, greeting, standing, secrets.token_bytes(auth.NONCE_BYTES))
    sending = Sending([said])
    stream.put(lambda: sending)
    proof = yield from _read(stream, auth.PROOF_BYTES, max(0.0, until - time.monotonic()))
    auth.check_proof(key, greeting + said, proof)
    theirs, mine = auth.seals(key, greeting + said + proof)
    stream.seal(mine, theirs)
    return peer


def _challenge(stream: Stream, seconds: float) -> Wants[bytes]:
    """A shard's challenge. Its refusal, which is a frame, raises WireError."""
    first = yield from _read(stream, len(FRAME), seconds)
    if first != FRAME:
        return first + (yield from _read(stream, auth.CHALLENGE_BYTES - len(first), seconds))
    raw = first + (yield from _read(stream, HEADER_BYTES - len(first), seconds))
    raise auth.Unproven((yield from _refusal(stream, parse(raw))))


def _refusal(stream: Stream, header: Header) -> Wants[str]:
    body = yield from stream.hello(header._replace(flags=Flag.NONE, length=min(header.length, SENTENCE_BYTES)))
    return f"it refuses this process: {str(body.get('error'))[:500]}"


def _read(stream: Reading, size: int, seconds: float) -> Wants[bytes]:
    place = bytearray(size)
    yield Filling(stream, [memoryview(place)], None, seconds)
    return bytes(place)
