"""What an asker at the status port says: a request line and a few headers, which come soon or not at all."""

from __future__ import annotations

import io
import socket
import time
from http.client import HTTPException
from typing import Final

REQUEST_BYTES: Final = 4096
"""Most bytes of one request. The longest that anybody needs, with a proof, has a few hundred."""
REQUEST_SECONDS: Final = 2.0
"""From the first byte of a request to its last."""


class TooLong(HTTPException):
    """A request has more than REQUEST_BYTES."""


class Question(io.BufferedIOBase):
    """The requests of one connection, line by line. `idle` seconds may pass before the first byte of one."""

    def __init__(self, sock: socket.socket, idle: float) -> None:
        self._sock, self._idle = sock, idle
        self._held = b""
        self._taken = 0
        self._until: float | None = None

    def readable(self) -> bool:
        return True

    def begin(self) -> None:
        """The next request has its own bytes and its own time."""
        self._taken, self._until = 0, None

    def readline(self, size: int | None = -1, /) -> bytes:
        """The next line with its end; less at the end of the stream. Raises TooLong, TimeoutError and OSError."""
        while b"\n" not in self._held:
            room = REQUEST_BYTES - self._taken - len(self._held)
            if room <= 0:
                raise TooLong(f"a request has at most {REQUEST_BYTES} bytes")
            part = self._receive(room)
            if not part:
                break
            self._held += part
        at = self._held.find(b"\n") + 1 or len(self._held)
        line, self._held = self._held[:at], self._held[at:]
        self._taken += len(line)
        return line

    def _receive(self, most: int) -> bytes:
        if self._until is None and self._held:
            self._until = time.monotonic() + REQUEST_SECONDS
        left = self._idle if self._until is None else self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"a request has at most {REQUEST_SECONDS:g} s")
        self._sock.settimeout(left)
        try:
            part = self._sock.recv(most)
        finally:
            self._sock.settimeout(self._idle)  # what is answered has its own time
        if self._until is None:
            self._until = time.monotonic() + REQUEST_SECONDS
        return part
