"""Who is at the other end of a stream: both ends prove that they have the dialler's key, then every header carries a seal. Pure.

    dialler                                              acceptor, a shard
    GREETING   role, index, number, run, nonce      ->
                                                    <-   CHALLENGE  index, attempt, term, nonce, proof
    PROOF                                           ->

A proof is the HMAC-SHA256 (RFC 2104) of all that was said, with the dialler's key (`psjob.contract.keys`). Each direction then has a key
of its own, from the same transcript. A seal is a keyed BLAKE2b (RFC 7693) over a header and its number on the stream.
Of the payloads it covers what their header says: the length, and a crc where one was made.

If a stream is encrypted, all of this goes over TLS 1.3 (RFC 8446) by the standard library: who dials checks the shard's certificate
against the authority of the run. Bytes pass through memory, so that streams wait, count bytes and end as they do without it.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from psjob.contract import WIRE
from psjob.wire.frame import COVERED, TAG, TAG_BYTES, WireError

MAGIC: Final = b"PSJA"
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
_GREETING: Final = struct.Struct("<4sHBxII16s32s")
_CHALLENGE: Final = struct.Struct("<4sHxxIII32s")
GREETING_BYTES: Final = _GREETING.size
CHALLENGE_BYTES: Final = _CHALLENGE.size + PROOF_BYTES
_ROLES: Final = ("worker", "shard")
_COUNT: Final = struct.Struct("<Q")


@dataclass(frozen=True)
class Peer:
    """A process of the run: `number` is a worker's start or a shard's attempt."""

    role: str
    index: int
    number: int


@dataclass(frozen=True)
class ShardIdentity:
    """A shard as it says of itself when it is dialled."""

    index: int
    attempt: int
    term: int


class Unproven(WireError):
    """Who is at the other end does not have the key. The text tells nothing of the run."""


def greeting(peer: Peer, run: bytes, nonce: bytes) -> bytes:
    """What a dialler says first. `run`: 16 bytes, see `run_digest`."""
    return _GREETING.pack(MAGIC, WIRE, _ROLES.index(peer.role), peer.index, peer.number, run, nonce)


def read_greeting(raw: bytes) -> tuple[Peer, bytes]:
    """Who says to dial, and the run. Raises WireError for anything else."""
    magic, version, role, index, number, run, _nonce = _GREETING.unpack(raw)
    if magic != MAGIC:
        raise WireError(f"not an authenticated psjob peer: the first bytes are {magic!r}, expected {MAGIC!r}")
    if version != WIRE:
        raise WireError(f"protocol version {version}, this side speaks {WIRE}; run the same psjob version on both sides")
    if role >= len(_ROLES):
        raise WireError(f"role {role} is not known; 0 is a worker, 1 is a shard")
    return Peer(_ROLES[role], index, number), run


def challenge(key: bytes, greeting: bytes, standing: ShardIdentity, nonce: bytes) -> bytes:
    """What a shard answers to a greeting."""
    said = _CHALLENGE.pack(MAGIC, WIRE, standing.index, standing.attempt, standing.term, nonce)
    return said + _mac(key, b"shard", greeting + said)


def read_challenge(key: bytes, greeting: bytes, raw: bytes, index: int) -> ShardIdentity:
    """The shard that answered. Raises Unproven if it does not have the key, or is not shard `index`."""
    said, proof = raw[: _CHALLENGE.size], raw[_CHALLENGE.size :]
    magic, version, its, attempt, term, _nonce = _CHALLENGE.unpack(said)
    if magic != MAGIC or version != WIRE:
        raise WireError(f"protocol {magic!r} version {version}, this side speaks {MAGIC!r} version {WIRE}")
    if not hmac.compare_digest(proof, _mac(key, b"shard", greeting + said)):
        raise Unproven("the process that answers there does not have this run's key")
    if its != index:
        raise Unproven(f"number {its} answers where number {index} was dialled")
    return ShardIdentity(its, attempt, term)


def proof(key: bytes, transcript: bytes) -> bytes:
    """What a dialler says last. `transcript`: the greeting, then the challenge."""
    return _mac(key, b"dialler", transcript)


def check_proof(key: bytes, transcript: bytes, said: bytes) -> None:
    """Raises Unproven if the dialler does not have the key."""
    if not hmac.compare_digest(said, proof(key, transcript)):
        raise Unproven("the proof does not fit; this process has another key than its place in the run needs")


class Seal:
    """The seals of one direction, header by header."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(key=key, digest_size=TAG_BYTES)
        self._count = 0

    def on(self, raw: bytes) -> bytes:
        """A packed header with its seal, which is that of the next header."""
        return b"".join((raw[:COVERED], self._tag(raw), b"\0\0\0\0"))

    def check(self, raw: bytes | memoryview) -> None:
        """Raises WireError if `raw` does not carry the seal of the next header."""
        if not hmac.compare_digest(self._tag(raw), raw[TAG]):
            raise WireError("a header's seal does not fit: it was changed, left out, sent twice or written by a stranger")

    def _tag(self, raw: bytes | memoryview) -> bytes:
        seal = self._keyed.copy()
        seal.update(_COUNT.pack(self._count))
        seal.update(raw[:COVERED])
        self._count += 1
        return seal.digest()


def seals(key: bytes, transcript: bytes) -> tuple[Seal, Seal]:
    """(those of the dialler, those of the shard), of a stream with that transcript, the proof included."""
    return Seal(_mac(key, b"sealed by the dialler", transcript)), Seal(_mac(key, b"sealed by the shard", transcript))


def _mac(key: bytes, what: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, b"psjob " + what + b"\0" + transcript, "sha256")


TLS_RECORD: Final = 0x16
"""The first byte of who dials with TLS: a record of the handshake."""
TLS_PIECE: Final = 64 << 10
"""Bytes that are encrypted, or received, at a time."""


class Tls:
    """One encrypted connection. One thread may read while another writes."""

    def __init__(self, context: ssl.SSLContext, shard: str | None) -> None:
        """`shard`: the name of who is dialled; None where this end is the shard."""
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._came, self._goes, server_side=shard is None, server_hostname=shard)
        self._lock = threading.Lock()  # an SSL object serves one thread at a time
        self.behind = False
        """May something that has come be read?"""

    def shake(self, came: bytes | memoryview) -> tuple[bytes, bool]:
        """Continue with the handshake: (what is to be sent, whether it is over). Raises Unproven if the other end is not who it must be."""
        self._came.write(came)
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            return self._goes.read(), False
        except ssl.SSLCertVerificationError as error:
            name = self._ssl.server_hostname
            raise Unproven(f"the certificate of the process that answers there is not that of {name}: {error.verify_message}") from None
        except ssl.SSLError as error:
            raise Unproven(f"no TLS 1.3 with the process that is there: {error.reason or error}") from None
        self.behind = True
        return self._goes.read(), True

    def feed(self, came: memoryview) -> None:
        """Take encrypted bytes that have come."""
        with self._lock:
            self._came.write(came)
            self.behind = True

    def read(self, places: Sequence[memoryview]) -> int:
        """Decrypt into `places`; how many bytes, 0 where no record is whole. Raises OSError if one was changed, or TLS was ended."""
        done = 0
        with self._lock:
            for place in places:
                at = 0
                while at < len(place):
                    try:
                        count: int = self._ssl.read(len(place) - at, place[at:])  # type: ignore[assignment]
                    except ssl.SSLWantReadError:
                        self.behind = False
                        return done
                    if not count:
                        raise ConnectionResetError("the peer ended TLS")
                    at += count
                    done += count
        return done

    def encrypt(self, parts: Sequence[bytes | bytearray | memoryview]) -> bytes:
        """What is to be sent for `parts`. Raises ssl.SSLError, an OSError."""
        with self._lock:
            for part in parts:
                if len(part):
                    self._ssl.write(part)
            return self._goes.read()


def first_piece(parts: Sequence[bytes | bytearray | memoryview]) -> tuple[list[memoryview], list[memoryview]]:
    """(the first PIECE bytes of `parts`, the rest)."""
    first: list[memoryview] = []
    room = TLS_PIECE
    for at, part in enumerate(parts):
        view = memoryview(part)
        if len(view) > room:
            return [*first, view[:room]], [view[room:], *(memoryview(later) for later in parts[at + 1 :])]
        first.append(view)
        room -= len(view)
    return first, []
