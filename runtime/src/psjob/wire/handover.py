"""Two processes of one host give each other the memory they lend, by a local socket that only the kernel knows.

One side sends the other the socket's name and a token of one use, on the stream that they have already. A shard sends them to a worker in
WELCOME, a worker of a stage to a neighbour that dialled it in LENDS. The name is not a file and holds 16 random bytes. A process
elsewhere cannot reach it, and one that lacks the token is hung up on.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable

from psjob.wire.frame import WireError
from psjob.wire.shared import Region
from psjob.wire.tcp import accept_forever

SECONDS = 5.0
LIMIT = 64
"""Handovers at one time."""
TOKEN_BYTES = 32
NAME, TOKEN = re.compile(r"psjob-[0-9a-f]{32}"), re.compile(rf"[0-9a-f]{{{TOKEN_BYTES}}}")
Give = Callable[[int], Region]
"""Takes over the other side's descriptor; returns the memory to lend, which stays open until it is sent. Raises WireError or OSError."""


class Counter:
    """The lending side's socket, and who may come to it."""

    def __init__(self, name: str) -> None:
        self.address = f"psjob-{secrets.token_hex(16)}"
        self._expected: dict[str, Give] = {}
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + self.address)
        self._socket.listen(LIMIT)
        accept_forever(self._socket, self._serve, LIMIT, name, Caller)

    def expect(self, give: Give) -> str:
        """A token for one handover to `give`."""
        token = secrets.token_hex(TOKEN_BYTES // 2)
        with self._lock:
            self._expected[token] = give
        return token

    def forget(self, token: str) -> None:
        with self._lock:
            self._expected.pop(token, None)

    def close(self) -> None:
        """Nobody is served any more. Closing twice is no error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # or the thread that accepts would take one more
        self._socket.close()

    def close_copy(self) -> None:
        """In a forked process: the socket stays its parent's."""
        self._socket.close()

    def _serve(self, caller: Caller) -> None:
        fds: list[int] = []
        try:
            raw, fds = _received(caller.sock, TOKEN_BYTES)
            if len(raw) != TOKEN_BYTES or len(fds) != 1:
                return
            with self._lock:
                give = self._expected.pop(raw.decode("ascii", "replace"), None)
            if give is None:
                return
            lent = give(fds.pop())
            socket.send_fds(caller.sock, [b"+"], [lent.fd])
        except (OSError, WireError, ValueError):
            pass  # the other side hears the end of the stream, and stays with TCP
        finally:
            for fd in fds:
                os.close(fd)


class Caller:
    """One connection to the counter."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(SECONDS)

    def close(self) -> None:
        self.sock.close()


def fetch(address: str, token: str, fd: int) -> int:
    """Lend `fd` to the process that listens at `address`; the descriptor that it lends. Raises OSError where it is out of reach.

    Or where the other side names what no counter is called: it could send this process to any program of the machine.
    """
    if not NAME.fullmatch(address) or not TOKEN.fullmatch(token):
        raise OSError(f"{address[:80]!r} is not where memory is handed over")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(SECONDS)
        sock.connect("\0" + address)
        socket.send_fds(sock, [token.encode("ascii")], [fd])
        raw, fds = _received(sock, 1)
        if raw != b"+" or len(fds) != 1:
            for got in fds:
                os.close(got)
            raise OSError("the other side did not take what was lent")
        return fds[0]


def _received(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """At most `size` bytes and one descriptor, which a program that this process becomes (a worker that begins again) does not keep."""
    raw, fds, _, _ = socket.recv_fds(sock, size, 1)  # which passes no flags on, MSG_CMSG_CLOEXEC neither
    for fd in fds:
        os.set_inheritable(fd, False)
    return raw, fds
