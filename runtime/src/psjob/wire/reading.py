"""The reading side of a stream: whole frames in, nothing copied that need not be.

A transfer fails when no byte moves for its silence time, never because it is large or the link slow.
"""

from __future__ import annotations

import functools
import math
import socket
import time
import zlib
from collections.abc import Sequence
from typing import Any

from psjob.wire.frame import HEADER_BYTES, MAX_JSON, ROW_KINDS, Flag, Header, Kind, WireError, continues, extra_header_bytes, load, parse
from psjob.wire.shared import Region, copy_out
from psjob.wire.sockets import SLICE_SECONDS, peer_name, timeval

HELLO_SECONDS = 5.0
"""A stranger has this long to say the header of a hello, and to go on where it pauses."""
SILENCE_SECONDS = 20.0
"""A transfer in which no byte moves for this long has failed; one that moves may take as long as it does."""
LEAST_RATE = 1024
"""Bytes a second at which a stranger's hello must come at least."""
PIECE = 64 << 10
"""Bytes by which a body is allocated whose length only its sender knows."""
AHEAD = 32 * HEADER_BYTES
"""Bytes that may be received with a header: where no payloads follow, many headers come by one call."""
WINDOW = 512
"""Places that one call receives into (the kernel takes 1024)."""


class StreamClosed(ConnectionError):
    """The peer closed, reset or stopped reading; connect again."""


class Reading:
    """What is read of a connection, in one thread."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.peer = peer_name(sock)
        self.borrowed: Region | None = None
        """Memory that the peer lends: where payloads lie that do not follow their header."""
        self._ahead = memoryview(bytearray(AHEAD))
        self._begin = self._end = 0
        """Between them lies in `_ahead` what was received and is not read yet."""
        self._receive_seconds = 0.0
        self.received = 0
        """Bytes that have come."""

    def ahead(self) -> bool:
        """Has the next header been received already?"""
        return self._end - self._begin >= HEADER_BYTES

    def recv_header(self, seconds: float | None) -> Header:
        """The next header; `seconds` bounds the wait for its whole arrival, None waits as long as the stream lives.

        Raises: StreamClosed, TimeoutError (nothing or too little came), WireError.
        """
        if not self.ahead():
            self._receive_ahead(seconds)
        view = self._ahead[self._begin : self._begin + HEADER_BYTES]
        header, extra = parse(view), extra_header_bytes(view)
        self._begin += HEADER_BYTES
        if extra:
            self._fill([memoryview(bytearray(extra))], None, HELLO_SECONDS)
        return header

    def peek_header(self, seconds: float) -> Header | None:
        """The next header without taking it, or None when none came in `seconds`. Raises WireError."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                self._receive_within(deadline - time.monotonic())
                raw = self.sock.recv(HEADER_BYTES, socket.MSG_PEEK)
            except OSError:
                return None
            if len(raw) == HEADER_BYTES:
                return parse(raw)
            if not raw:
                return None
            time.sleep(0.01)
        return None

    def recv_into(self, header: Header, target: memoryview) -> None:
        """Read the payload into `target`, whose size must be the header's length; checks the crc. Raises as recv_header."""
        self._payload(header, [target], f"block {header.block}")

    def recv_parts(self, header: Header, parts: Sequence[memoryview]) -> None:
        """As `recv_into`, into several places one after the other, whose sizes together must be the header's length."""
        self._payload(header, parts, f"table {header.table}" if header.kind in (*ROW_KINDS, Kind.ROWS) else f"block {header.block}")

    def _payload(self, header: Header, parts: Sequence[memoryview], of: str) -> None:
        size = sum(map(len, parts))
        if size != header.length:
            raise WireError(f"{header.kind.name} of {of} has {header.length} bytes, expected {size}")
        if header.flags & Flag.LENT:
            at = header.part
            for part in parts:
                copy_out(self.lent(header, at, len(part)), part)
                at += len(part)
            return
        self._fill(parts, SILENCE_SECONDS)
        if header.crc and functools.reduce(lambda crc, part: zlib.crc32(part, crc), parts, 0) != header.crc:
            raise WireError(f"{header.kind.name} of {of} is damaged: its checksum does not match")

    def lent(self, header: Header, offset: int, length: int) -> Any:
        """Bytes of a LENT frame where they lie, a ctypes array. Raises WireError where they are not in what the peer lends."""
        if self.borrowed is None:
            raise WireError(f"{header.kind.name} of block {header.block} lies in lent memory, and none was handed over")
        return self.borrowed.buffer(offset, length)

    def recv_body(self, header: Header, limit: int = MAX_JSON) -> bytearray:
        """Read a payload of at most `limit` bytes. It is allocated as it comes, at most PIECE bytes ahead of what was sent."""
        return self._body(header, limit, SILENCE_SECONDS, None)

    def recv_json(self, header: Header) -> dict[str, Any]:
        """Read a control body, of several frames where it has Flag.MORE. Raises as `recv_header`."""
        return self._json(header, SILENCE_SECONDS, None)

    def recv_hello(self, header: Header) -> dict[str, Any]:
        """As `recv_json`, from a peer that nothing is known of: it may pause for HELLO_SECONDS, and must send LEAST_RATE."""
        return self._json(header, HELLO_SECONDS, LEAST_RATE)

    def _json(self, header: Header, silence: float, rate: int | None) -> dict[str, Any]:
        body = self._body(header, MAX_JSON, silence, rate)
        while header.flags & Flag.MORE:
            before, header = header, self.recv_header(silence)
            continues(before, header, len(body))
            body += self._body(header, MAX_JSON, silence, rate)
        return load(body)

    def _body(self, header: Header, limit: int, silence: float, rate: int | None) -> bytearray:
        if header.length > limit:
            raise WireError(f"{header.kind.name} of {header.length} bytes is above the limit of {limit}")
        body = bytearray()
        while len(body) < header.length:
            piece = bytearray(min(PIECE, header.length - len(body)))
            self._fill([memoryview(piece)], silence, None if rate is None else silence + len(piece) / rate)
            body += piece
        if header.crc and zlib.crc32(body) != header.crc:
            raise WireError(f"{header.kind.name} of {header.length} bytes is damaged: its checksum does not match")
        return body

    def drain(self, header: Header) -> None:
        """Read a payload and forget it (a duplicate, or a frame that was refused). The caller has checked its length."""
        left = 0 if header.flags & Flag.LENT else header.length
        scratch = memoryview(bytearray(min(left, 1 << 20)))
        while left:
            part = scratch[: min(left, len(scratch))]
            self._fill([part], SILENCE_SECONDS)
            left -= len(part)

    def _receive_ahead(self, seconds: float | None) -> None:
        """Receive a header, and what has come after it."""
        held = self._end - self._begin
        self._ahead[:held] = self._ahead[self._begin : self._end]
        self._begin = self._end = held
        came = self._fill([self._ahead[held:]], None, seconds, HEADER_BYTES - held)
        self._begin, self._end = 0, held + came

    def _take(self, parts: Sequence[memoryview]) -> int:
        """Bring to `parts` what was received ahead; how many bytes that are."""
        begin = self._begin
        for part in parts:
            size = min(len(part), self._end - self._begin)
            part[:size] = self._ahead[self._begin : self._begin + size]
            self._begin += size
        return self._begin - begin

    def _fill(self, parts: Sequence[memoryview], silence: float | None, whole: float | None = None, least: int = 0) -> int:
        """Receive all of `parts`, or where it is given at least so many bytes; how many came. Raises StreamClosed, TimeoutError.

        `silence` bounds the time in which no byte comes, `whole` the time that all takes, in seconds.
        """
        began = moved = now = time.monotonic()
        size, done, at = least or sum(map(len, parts)), 0, 0
        window = list(parts[:WINDOW])
        while done < size:
            end = min(math.inf if silence is None else moved + silence, math.inf if whole is None else began + whole)
            try:
                count = self._take(window) if self._begin < self._end else 0
                if not count:
                    self._receive_within(None if end == math.inf else min(SLICE_SECONDS, end - now))
                    count = self.sock.recvmsg_into(window, 0, 0 if least else socket.MSG_WAITALL)[0]
                    if count == 0:
                        raise StreamClosed(f"{self.peer}: closed by the peer" + (f" after {done} of {size} bytes" if done else ""))
            except BlockingIOError:
                count = 0
            except ValueError as error:
                raise StreamClosed(f"{self.peer}: {error}") from error
            except OSError as error:
                raise error if isinstance(error, StreamClosed) else StreamClosed(f"{self.peer}: {error}") from error
            done += count
            self.received += count
            if done >= size:
                break
            now = time.monotonic()
            moved = now if count else moved
            if whole is not None and now - began >= whole:
                raise TimeoutError(f"{self.peer}: {done} of {size} bytes came in {whole:g} s")
            if silence is not None and now - moved >= silence:
                raise TimeoutError(f"{self.peer}: {done} of {size} bytes came, then none for {silence:g} s")
            full = 0
            while full < len(window) and count >= len(window[full]):
                count -= len(window[full])
                full += 1
            at += full
            window = [*window[full:], *parts[at + len(window) - full : at + WINDOW]]
            if count:
                window[0] = window[0][count:]
        return done

    def _receive_within(self, seconds: float | None) -> None:
        # Not settimeout(): it also changes the mode under a sendall() of another thread.
        wanted = 0.0 if seconds is None else max(0.01, round(seconds, 1))
        if wanted != self._receive_seconds:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(wanted))
            self._receive_seconds = wanted
