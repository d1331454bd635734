"""What somebody between two ends of a stream sees: the parts of the handshake, then whole frames that it cannot change."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping

from psjob.contract import keys
from psjob.wire import auth
from psjob.wire.auth import Seal, Standing
from psjob.wire.frame import HEADER_BYTES, Header, parse
from tests.runkeys import RUN

DIALLER = (auth.GREETING_BYTES, auth.PROOF_BYTES)
"""Bytes of the parts that the dialling end says first."""
SHARD = (auth.CHALLENGE_BYTES,)
"""Those of the other one."""


def parts(sock: socket.socket, handshake: tuple[int, ...]) -> Iterator[tuple[Header | None, bytes]]:
    """Each part as it comes, with its header where it is a frame, until the stream ends. Raises OSError and WireError."""
    for size in handshake:
        yield None, exactly(sock, size)
    while raw := exactly(sock, HEADER_BYTES):
        header = parse(raw, sealed=True)
        yield header, raw + exactly(sock, header.length)


def exactly(sock: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer where the stream ends."""
    return sock.recv(size, socket.MSG_WAITALL) if size else b""


def shard_answers(sock: socket.socket, standing: Standing, run: Mapping[str, bytes] = RUN) -> tuple[Seal, Seal]:
    """The handshake as shard `standing` makes it with who dials: the dialler's seals, and the shard's."""
    greeting = exactly(sock, auth.GREETING_BYTES)
    peer, _ = auth.read_greeting(greeting)
    key = (
        keys.worker(run["workers"], peer.index, peer.number)
        if peer.role == "worker"
        else keys.shard(run["shards"], peer.index, peer.number)
    )
    challenge = auth.challenge(key, greeting, standing, bytes(auth.NONCE_BYTES))
    sock.sendall(challenge)
    proof = exactly(sock, auth.PROOF_BYTES)
    auth.check_proof(key, greeting + challenge, proof)
    return auth.seals(key, greeting + challenge + proof)
