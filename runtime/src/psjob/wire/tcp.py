"""TCP streams: whole frames in, whole frames out, nothing copied that need not be.

Every read and write has a deadline. `Stream.send` may be called from several threads; reading belongs to one thread.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from psjob.process import supervise
from psjob.wire.frame import HEADER_BYTES, MAX_JSON, ROW_KINDS, Flag, Header, Kind, WireError, dump, extra_header_bytes, load, parse
from psjob.wire.shared import Region, copy_out

HELLO_SECONDS = 5.0
"""A stranger has this long to say a whole hello."""
TCP_NOTSENT_LOWAT = 25
UNSENT_BYTES = 128 << 10
SEND_SECONDS = 60.0
"""A peer that takes no byte for this long counts as gone."""


AHEAD = 32 * HEADER_BYTES
"""Bytes that may be received with a header: where no payloads follow, many headers come by one call."""
WINDOW = 512
"""Places that one call receives into (the kernel takes 1024)."""


class StreamClosed(ConnectionError):
    """The peer closed, reset or stopped reading; connect again."""


class Stream:
    """One connection. Frames are never interleaved: a send lock guards the writing side."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.peer = _peer_name(sock)
        self.sums = not _one_host(sock)
        self.borrowed: Region | None = None
        """Memory that the peer lends: where payloads lie that do not follow their header."""
        self.closed = False
        self.unsent: bytes | memoryview = b""
        """The rest of a frame that was begun by `offer`; whatever is written next goes after it."""
        self._send_lock = threading.Lock()
        self._ahead = memoryview(bytearray(AHEAD))
        self._begin = self._end = 0
        """Between them lies in `_ahead` what was received and is not read yet."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keepalive(sock)
        if not self.sums:
            _unpaced(sock)
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(SEND_SECONDS))
        self._receive_seconds = 0.0

    def hold_little(self) -> None:
        """Let the kernel take only what it can soon send, so that what is decided later but needed sooner is not behind it.

        Raises StreamClosed.
        """
        try:
            self.sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        except OSError as error:
            raise StreamClosed(f"{self.peer}: {error}") from error

    def send(self, header: Header, payload: bytes | memoryview = b"") -> None:
        """Write one frame, with the payload's length and, where it leaves this host, its checksum. Raises StreamClosed."""
        raw = header.sized(payload, self.sums).pack()
        self.write(*((raw + bytes(payload),) if len(payload) <= 16384 else (raw, payload)))

    def send_parts(self, header: Header, parts: Sequence[memoryview]) -> None:
        """As `send`, of a payload that lies in several places."""
        crc = 0
        for part in parts if self.sums else ():
            crc = zlib.crc32(part, crc)
        self.write(header._replace(length=sum(map(len, parts)), crc=crc).pack(), *parts)

    def send_lent(self, header: Header, offset: int, length: int) -> None:
        """Write a frame whose payload lies in the memory that this side lends. Raises StreamClosed."""
        self.write(header.lent(offset, length).pack())

    def write(self, *raw: bytes | memoryview) -> None:
        """Write whole frames, whose bytes lie in these places. Raises StreamClosed."""
        with self._send_lock:
            try:
                rest, self.unsent = self.unsent, b""
                for part in (rest, *raw) if rest else raw:
                    self.sock.sendall(part)
            except (OSError, ValueError) as error:
                self.close()
                raise StreamClosed(f"{self.peer}: {error}") from error

    def flush(self) -> None:
        """Write what an `offer` has left. Raises StreamClosed."""
        self.write()

    def offer(self, raw: bytes) -> bool:
        """As `write`, but without any waiting; False: nothing was written. What the kernel did not take is `unsent` then.

        Raises StreamClosed.
        """
        if not self._send_lock.acquire(blocking=False):
            return False
        try:
            if self.unsent:
                return False
            self.unsent = raw[self.sock.send(raw, socket.MSG_DONTWAIT) :]
            return True
        except BlockingIOError:
            return False
        except (OSError, ValueError) as error:
            self.close()
            raise StreamClosed(f"{self.peer}: {error}") from error
        finally:
            self._send_lock.release()

    def send_json(self, header: Header, body: Any) -> None:
        raw = dump(body)
        self.send(header, raw)

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
            self._fill([memoryview(bytearray(extra))], HELLO_SECONDS)
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
        self._fill(parts, SEND_SECONDS)
        if header.crc and functools.reduce(lambda crc, part: zlib.crc32(part, crc), parts, 0) != header.crc:
            raise WireError(f"{header.kind.name} of {of} is damaged: its checksum does not match")

    def lent(self, header: Header, offset: int, length: int) -> Any:
        """Bytes of a LENT frame where they lie, a ctypes array. Raises WireError where they are not in what the peer lends."""
        if self.borrowed is None:
            raise WireError(f"{header.kind.name} of block {header.block} lies in lent memory, and none was handed over")
        return self.borrowed.buffer(offset, length)

    def recv_body(self, header: Header, limit: int = MAX_JSON) -> bytearray:
        """Read a payload of at most `limit` bytes; the limit is checked before anything is allocated."""
        if header.length > limit:
            raise WireError(f"{header.kind.name} of {header.length} bytes is above the limit of {limit}")
        body = bytearray(header.length)
        self.recv_into(header, memoryview(body))
        return body

    def recv_json(self, header: Header) -> dict[str, Any]:
        return load(self.recv_body(header))

    def drain(self, header: Header) -> None:
        """Read a payload and forget it (a duplicate, or a frame that was refused). The caller has checked its length."""
        left = 0 if header.flags & Flag.LENT else header.length
        scratch = memoryview(bytearray(min(left, 1 << 20)))
        while left:
            part = scratch[: min(left, len(scratch))]
            self._fill([part], SEND_SECONDS)
            left -= len(part)

    def gone(self) -> bool:
        """Whether the peer has closed already, so far as can be told without waiting and once all that it sent is read."""
        try:
            return self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self.closed = True
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.sock.close()

    def _receive_ahead(self, seconds: float | None) -> None:
        """Receive a header, and what has come after it."""
        held = self._end - self._begin
        self._ahead[:held] = self._ahead[self._begin : self._end]
        self._begin = self._end = held
        came = self._fill([self._ahead[held:]], seconds, HEADER_BYTES - held)
        self._begin, self._end = 0, held + came

    def _take(self, parts: Sequence[memoryview]) -> int:
        """Bring to `parts` what was received ahead; how many bytes that are."""
        begin = self._begin
        for part in parts:
            size = min(len(part), self._end - self._begin)
            part[:size] = self._ahead[self._begin : self._begin + size]
            self._begin += size
        return self._begin - begin

    def _fill(self, parts: Sequence[memoryview], seconds: float | None, least: int = 0) -> int:
        """Receive all of `parts`, or where it is given at least so many bytes; how many came. Raises StreamClosed, TimeoutError."""
        deadline = None if seconds is None else time.monotonic() + seconds
        size, done, at = least or sum(map(len, parts)), 0, 0
        window = list(parts[:WINDOW])
        while done < size:
            try:
                count = self._take(window) if self._begin < self._end else 0
                if not count:
                    self._receive_within(None if deadline is None else deadline - time.monotonic())
                    count = self.sock.recvmsg_into(window, 0, 0 if least else socket.MSG_WAITALL)[0]
            except BlockingIOError:
                raise TimeoutError(f"{self.peer}: {done} of {size} bytes came in {seconds} s") from None
            except (OSError, ValueError) as error:
                raise StreamClosed(f"{self.peer}: {error}") from error
            if count == 0:
                raise StreamClosed(f"{self.peer}: closed by the peer" + (f" after {done} of {size} bytes" if done else ""))
            done += count
            if deadline is not None and done < size and time.monotonic() > deadline:
                raise TimeoutError(f"{self.peer}: {done} of {size} bytes came in {seconds} s")
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
        wanted = 0.0 if seconds is None else max(0.001, round(seconds, 1))
        if wanted != self._receive_seconds:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(wanted))
            self._receive_seconds = wanted


def addresses(host: str, port: int) -> Iterator[tuple[socket.AddressFamily, Any]]:
    """Every address of a name; none when it is not known yet, which a caller retries."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return
    seen = set()
    for family, _kind, _proto, _name, address in found:
        if address not in seen:
            seen.add(address)
            yield family, address


def connect(host: str, port: int, seconds: float) -> Iterator[Stream]:
    """An open stream for each address of `host` that answers within `seconds`; refused and unreachable ones are passed over."""
    for family, address in addresses(host, port):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.settimeout(seconds)
        try:
            sock.connect(address)
            if sock.getsockname() == sock.getpeername():  # a loopback client can meet its own ephemeral port
                raise OSError("connected to itself")
        except OSError:
            sock.close()
            continue
        yield Stream(sock)


def again(stream: Stream, seconds: float) -> Stream:
    """Another stream to the very peer of `stream`, within `seconds`. Raises StreamClosed."""
    sock = socket.socket(stream.sock.family, socket.SOCK_STREAM)
    sock.settimeout(seconds)
    try:
        sock.connect(stream.sock.getpeername())
    except OSError as error:
        sock.close()
        raise StreamClosed(f"{stream.peer}: {error}") from error
    return Stream(sock)


def listen(bind: str | None, port: int) -> socket.socket:
    """A listening socket on `bind`, or on every address. Raises OSError naming the address."""
    try:
        if bind:
            sock = socket.create_server((bind, port), backlog=256)
        else:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            sock = socket.create_server(("", port), family=family, backlog=256, dualstack_ipv6=dual)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {bind or '*'}:{port}: {error.strerror or error}") from error
    return sock


def accept_forever(
    server: socket.socket, handle: Callable[[Any], None], limit: int, name: str, wrap: Callable[[socket.socket], Any] = Stream
) -> threading.Thread:
    """Accept in a thread of its own and give each stream to `handle` in another; above `limit` streams a newcomer is closed."""
    slots = threading.BoundedSemaphore(limit)

    def serve(stream: Any) -> None:
        try:
            handle(stream)
        finally:
            stream.close()
            slots.release()

    def loop() -> None:
        while True:
            try:
                sock, _address = server.accept()
            except OSError:
                if server.fileno() < 0:
                    return
                time.sleep(0.05)
                continue
            if not slots.acquire(blocking=False):
                sock.close()
                continue
            try:
                supervise.start(serve, f"{name}-stream", wrap(sock))
            except (OSError, RuntimeError):
                sock.close()
                slots.release()

    return supervise.start(loop, f"{name}-accept")


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def _peer_name(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "peer"
    return f"{host}:{port}"


def _one_host(sock: socket.socket) -> bool:
    """Both ends have one address: what is sent never leaves this machine's memory."""
    try:
        return bool(sock.getpeername()[0] == sock.getsockname()[0])
    except OSError:
        return False


def _unpaced(sock: socket.socket) -> None:
    """Nothing can be congested between two ends of one host, where a paced algorithm (BBR) sends at two thirds of what memory gives."""
    with contextlib.suppress(OSError, AttributeError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _keepalive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 45_000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
