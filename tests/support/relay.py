"""Somebody between two ends of a stream: what it hears, the parts of the handshake in it, and whole frames whose change is found."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping

from psjob.contract import keys
from psjob.wire import auth
from psjob.wire.auth import Seal, ShardIdentity
from psjob.wire.frame import HEADER_BYTES, Header, WireError, parse
from tests.support.runkeys import RUN

DIALLER = (auth.GREETING_BYTES, auth.PROOF_BYTES)
"""Bytes of the parts that the dialling end says first."""
SHARD = (auth.CHALLENGE_BYTES,)
"""Those of the other one."""


def chunks(sock: socket.socket) -> Iterator[bytes]:
    """What comes, as it comes."""
    return iter(lambda: sock.recv(1 << 16), b"")


Passes = Callable[[socket.socket], Iterator[bytes]]


class Relay:
    """A road to a port of this host: `there` says what continues of what diallers send, `back` of what they are sent."""

    def __init__(self, port: int, there: Passes = chunks, back: Passes = chunks) -> None:
        self._to, self._there, self._back = port, there, back
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Nobody else gets through."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._to))
            for source, target, passes in ((near, far, self._there), (far, near, self._back)):
                threading.Thread(target=_carry, args=(source, target, passes), daemon=True).start()


def _carry(source: socket.socket, target: socket.socket, passes: Passes) -> None:
    with contextlib.suppress(OSError, WireError):
        for part in passes(source):
            target.sendall(part)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


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


def shard_answers(sock: socket.socket, standing: ShardIdentity, run: Mapping[str, bytes] = RUN) -> tuple[Seal, Seal]:
    """The handshake as shard `standing` makes it with who dials: the dialler's seals, and the shard's."""
    greeting = exactly(sock, auth.GREETING_BYTES)
    peer, _ = auth.read_greeting(greeting)
    key = (
        keys.worker_key(run["workers"], peer.index, peer.number)
        if peer.role == "worker"
        else keys.shard_key(run["shards"], peer.index, peer.number)
    )
    challenge = auth.challenge(key, greeting, standing, bytes(auth.NONCE_BYTES))
    sock.sendall(challenge)
    proof = exactly(sock, auth.PROOF_BYTES)
    auth.check_proof(key, greeting + challenge, proof)
    return auth.seals(key, greeting + challenge + proof)
