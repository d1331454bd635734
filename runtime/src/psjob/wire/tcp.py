"""TCP streams: whole frames in, whole frames out, nothing copied that need not be.

Every transfer fails when nothing moves for its silence time, never because it is large or the link slow. `Stream.send` may be
called from several threads; reading belongs to one thread.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import functools
import select
import socket
import struct
import sys
import termios
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from psjob.wire.auth import Seal, Tls, first_piece
from psjob.wire.frame import MAX_JSON, Header, dump, frames
from psjob.wire.reading import HELLO_SECONDS as HELLO_SECONDS
from psjob.wire.reading import SILENCE_SECONDS, SLICE_SECONDS, StreamReading, timeval
from psjob.wire.reading import StreamClosed as StreamClosed

TCP_NOTSENT_LOWAT = 25
UNSENT_BYTES = 128 << 10
AGAIN_SECONDS = 0.02
BACKLOG = 4096
"""Connections that the kernel holds until they are accepted."""
JOINED = 16 << 10
"""Frames of so many bytes together are sent as one piece of memory."""
MSG_MORE = getattr(socket, "MSG_MORE", 0)
_LAST_ACK = 56
"""If tcpi_last_ack_recv (uint32, milliseconds) lies in struct tcp_info of linux/tcp.h."""
Buffer = bytes | bytearray | memoryview
Part = Header | Buffer
"""A header, which is packed and sealed when its turn to be sent has come, or bytes that stand."""


class Stream(StreamReading):
    """One connection. Frames are never interleaved: a send lock guards the writing side."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.is_remote = not one_host(sock)
        """Are the two ends on two hosts?"""
        self.sums = self.is_remote
        """Do payloads carry a checksum?"""
        self.closed = False
        self._sealing: Seal | None = None
        self._send_lock = threading.Lock()
        self._written = 0
        self._riders: deque[list[Part]] = deque()
        self._poll: select.poll | None = None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keepalive(sock)
        if not self.is_remote:
            unpaced(sock)
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(SLICE_SECONDS))

    def hold_little(self) -> None:
        """Let the kernel take only what it can soon send, so that what is decided later but needed sooner is not behind it.

        Raises StreamClosed.
        """
        try:
            self.sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        except OSError as error:
            raise StreamClosed(f"{self.peer}: {error}") from error

    def seal(self, mine: Seal, theirs: Seal) -> None:
        """From here on every header carries a seal, and each that comes must."""
        with self._send_lock:
            self._sealing, self.opening = mine, theirs

    def secure(self, tls: Tls) -> None:
        """From here on everything is encrypted, both ways; that finds a changed byte too, so payloads need no checksum."""
        with self._send_lock:
            self.tls, self.sums = tls, False

    def framed(self, header: Header, payload: Buffer = b"") -> list[Part]:
        """One frame, with the payload's length and, where it leaves this host, its checksum."""
        view = payload if isinstance(payload, bytes | memoryview) else memoryview(payload)
        sized = header.sized(view, self.sums)
        return [sized, view] if len(view) else [sized]

    def framed_parts(self, header: Header, parts: Sequence[memoryview]) -> list[Part]:
        """As `framed`, of a payload that lies in several places."""
        crc = functools.reduce(lambda crc, part: zlib.crc32(part, crc), parts, 0) if self.sums else 0
        return [header._replace(length=sum(map(len, parts)), crc=crc), *parts]

    def framed_control(self, header: Header, raw: bytes) -> list[Part]:
        """As `framed`, of a control body that `dump` has made: several frames where it is above MAX_JSON."""
        if len(raw) <= MAX_JSON:
            return self.framed(header, raw)
        return [part for head, piece in frames(header, raw) for part in self.framed(head, piece)]

    def send(self, header: Header, payload: bytes | memoryview = b"", rides: bool = False) -> None:
        """Write one frame, with the payload's length and, where it leaves this host, its checksum. Raises StreamClosed.

        `rides`: the kernel may hold it back for what is written next, for 200 ms at most, so that both wake the peer once.
        """
        self.write(*self.framed(header, payload), flags=MSG_MORE if rides else 0)

    def send_parts(self, header: Header, parts: Sequence[memoryview]) -> None:
        """As `send`, of a payload that lies in several places."""
        self.write(*self.framed_parts(header, parts))

    def send_lent(self, header: Header, offset: int, length: int) -> None:
        """Write a frame whose payload lies in the memory that this side lends. Raises StreamClosed."""
        self.write(header.lent(offset, length))

    def ride(self, header: Header, raw: bytes) -> None:
        """Let a control body of one frame go with what is written next: who tells it waits for nobody's bytes."""
        self._riders.append(self.framed(header, raw))

    def write(self, *frames: Part, flags: int = 0) -> None:
        """Write whole frames: headers, and what follows them. Raises StreamClosed."""
        with self._send_lock:
            while self._riders:
                frames = (*self._riders.popleft(), *frames)
            raw = self._packed(frames)
            parts: Sequence[Buffer] = (b"".join(raw),) if len(raw) > 1 and sum(map(len, raw)) <= JOINED else raw
            try:
                if self.tls is None:
                    for part in parts:
                        self._send_all(part, flags)
                else:
                    while parts:
                        piece, parts = first_piece(parts)
                        self._send_all(self.tls.encrypt(piece), flags)
            except (OSError, ValueError) as error:
                self.close()
                raise StreamClosed(f"{self.peer}: {error}") from error

    def _packed(self, parts: Sequence[Part]) -> list[Buffer]:
        """The bytes of frames, in the order in which they are sent from here on; the lock is held."""
        seal = self._sealing
        if seal is None:
            return [part.pack() if isinstance(part, Header) else part for part in parts]
        return [seal.on(part.pack()) if isinstance(part, Header) else part for part in parts]

    def _send_all(self, part: Buffer, flags: int) -> None:
        """Raises OSError, also if the peer takes no byte for SILENCE_SECONDS."""
        size, done, moved = len(part), 0, 0.0
        while done < size:
            try:
                count = self.sock.send(memoryview(part)[done:] if done else part, flags)
                done += count
                self._written += count
            except BlockingIOError:
                now = time.monotonic()
                moved = moved or now - SLICE_SECONDS
                if now - moved >= SILENCE_SECONDS:
                    raise TimeoutError(f"the peer took no byte for {SILENCE_SECONDS:.0f} s; {done} of {size} were sent") from None
            else:
                moved = 0.0

    def send_json(self, header: Header, body: Any) -> None:
        """Write a control body. Raises StreamClosed, and WireError where it is above MAX_BODY."""
        self.send_control(header, dump(body))

    def send_control(self, header: Header, raw: bytes) -> None:
        """As `send_json`, of a body that `dump` has made: in several frames where it is above MAX_JSON."""
        self.write(*self.framed_control(header, raw))

    @property
    def sent(self) -> int:
        """Bytes that the kernel has taken, encrypted or not."""
        return self._written

    def moved(self) -> int:
        """Bytes that have come, and those of what was written that the peer's system has confirmed: it changes while the peer is there."""
        count = array.array("i", [0])
        if sys.platform.startswith("linux"):
            try:
                fcntl.ioctl(self.sock.fileno(), termios.TIOCOUTQ, count)
            except (OSError, ValueError):
                return self.received
        return self.received + self._written - count[0]

    def unheard(self) -> float:
        """Seconds since the peer's system last confirmed anything; with `keepalive` it is asked to where nothing is sent.

        A peer that stands still continues confirming: its system does that. 0 where this system does not tell.
        """
        if not sys.platform.startswith("linux"):
            return 0.0
        try:
            info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK + 4)
        except (OSError, ValueError):
            return 0.0
        return float(struct.unpack_from("@I", info, _LAST_ACK)[0]) / 1000 if len(info) >= _LAST_ACK + 4 else 0.0

    def readable(self, seconds: float) -> bool:
        """Whether there is something to read within `seconds`, the end included. Raises StreamClosed if this side has closed."""
        if self.ahead():
            return True
        try:
            if self._poll is None:
                self._poll = select.poll()
                self._poll.register(self.sock, select.POLLIN)
        except (OSError, ValueError) as error:
            raise StreamClosed(f"{self.peer}: closed before it was read") from error
        if self.closed:  # by another thread: its descriptor may be somebody else's by now
            raise StreamClosed(f"{self.peer}: closed")
        return bool(self._poll.poll(int(1000 * seconds)))

    def gone(self) -> bool:
        """Whether the peer has closed already, so far as is known without waiting and once all that it sent is read."""
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


def listening_socket(bind: str | None, port: int, patience: float = 0.0) -> socket.socket:
    """A listening socket on `bind`, or on every address; one in use is tried again for `patience` seconds. Raises OSError naming it."""
    until = time.monotonic() + patience
    while True:
        try:
            return _listening(bind, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= until:
                raise OSError(error.errno, f"cannot listen on {bind or '*'}:{port}: {error.strerror or error}") from error
            time.sleep(AGAIN_SECONDS)


def _listening(bind: str | None, port: int) -> socket.socket:
    if bind:
        return socket.create_server((bind, port), backlog=BACKLOG)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=dual)


def one_host(sock: socket.socket) -> bool:
    """Both ends have one address: what is sent never leaves this machine's memory."""
    try:
        return bool(sock.getpeername()[0] == sock.getsockname()[0])
    except OSError:
        return False


def unpaced(sock: socket.socket) -> None:
    """Nothing can be congested between two ends of one host, where a paced algorithm (BBR) sends at two thirds of what memory gives."""
    with contextlib.suppress(OSError, AttributeError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def keepalive(sock: socket.socket) -> None:
    """Let the kernel ask a silent peer for a confirmation, and end a connection whose other end has gone without a word."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 8), ("TCP_USER_TIMEOUT", 45_000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
