"""Connections of those who have no key of a run: by the thousand at once, a byte a second, and never read."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from psjob.wire import auth
from psjob.wire.auth import Peer
from psjob.wire.frame import run_digest

GREETING = auth.greeting(Peer("worker", 0, 1), run_digest("run-1"), bytes(32))
"""All that a stranger may say: whoever says more is closed."""


def client_hello() -> bytes:
    """The first words of TLS, to which an encrypted shard answers with its certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    said = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), said).do_handshake()
    return said.read()


@contextmanager
def trickling(address: tuple[str, int], count: int) -> Iterator[None]:
    """So many connections at a time, each of which says a byte of a greeting a second; one that was closed is made again."""
    over = threading.Event()

    def act() -> None:
        socks: list[tuple[socket.socket, int]] = []
        while not over.wait(1.0):
            left = []
            for sock, at in socks:
                try:
                    sock.send(GREETING[at : at + 1], socket.MSG_DONTWAIT)
                    left.append((sock, at + 1))
                except OSError:
                    sock.close()
            socks = left + [(socket.create_connection(address, timeout=30), 0) for _ in range(count - len(left))]
        for sock, _ in socks:
            sock.close()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)


def flood(address: tuple[str, int], count: int, words: bytes = GREETING) -> int:
    """So many connections at once, every other one with `words`, which a stranger can say; how many the shard has closed."""
    socks = []
    for number in range(count):
        sock = socket.create_connection(address, timeout=30)
        sock.setblocking(False)
        if number % 2:
            sock.send(words)
        socks.append(sock)
    gone = sum(closed(sock) for sock in socks)
    for sock in socks:
        sock.close()
    return gone


def closed(sock: socket.socket) -> bool:
    """Whether the other side has closed it."""
    try:
        while sock.recv(65536):
            pass
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True
