"""The reading side of a stream: whole frames in, nothing copied that need not be.

A transfer fails when no byte moves for its silence time, never because it is large or the link slow.
"""

from __future__ import annotations

import functools
import math
import socket
import struct
import threading
import time
import zlib
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

from psjob.wire.auth import TLS_PIECE, Seal, Tls
from psjob.wire.frame import (
    HEADER_BYTES,
    MAX_BODY,
    MAX_JSON,
    MAX_VALUES,
    ROW_KINDS,
    Flag,
    Header,
    Kind,
    WireError,
    continues,
    extra_header_bytes,
    load,
    parse,
)
from psjob.wire.shared_memory import Region, copy_out

HELLO_SECONDS = 5.0
"""A stranger has this long to say the header of a hello, and to continue where it pauses."""
SILENCE_SECONDS = 20.0
"""A transfer in which no byte moves for this long has failed; one that moves may take as long as it does."""
LEAST_RATE = 1024
"""Bytes a second at which a stranger's hello must come at least."""
HELLO_WHOLE_SECONDS = 300.0
"""A hello takes no longer than that, however large it is: 64 MiB at 2 Mbit/s."""
PIECE = 64 << 10
"""Bytes by which a body is allocated whose length only its sender knows."""
AHEAD = 40 * HEADER_BYTES
"""Bytes that may be received with a header: where no payloads follow, many headers come by one call."""
WINDOW = 512
"""Places that one call receives into (the kernel takes 1024)."""
STRANGER_SECONDS = 1.0
"""Who dials has so long to prove who it is."""
STRANGER_BYTES = 4096
"""Most bytes, encrypted or not, that are taken from who has proven nothing."""
SLICE_SECONDS = 1.0
"""Longest wait of one call to the kernel, which does not tell when within the call its last byte moved."""
_thread = threading.local()
"""`place`: where encrypted bytes are received, until they are decrypted."""


class StreamClosed(ConnectionError):
    """The peer closed, reset or stopped reading; connect again."""


class ReadRequest:
    """Places of one stream that are filled with what comes, all of them or, where it is given, at least `least` bytes.

    `silence` bounds the time in which no byte comes, `whole` the time that all takes, in seconds.
    """

    __slots__ = ("_at", "_parts", "_silence", "_size", "_stream", "_whole", "_window", "began", "done", "least", "moved")

    def __init__(
        self, stream: StreamReading, parts: Sequence[memoryview], silence: float | None, whole: float | None = None, least: int = 0
    ) -> None:  # fmt: skip
        self._stream, self._parts, self._silence, self._whole = stream, parts, silence, whole
        self.least, self._size = least, least or sum(map(len, parts))
        self._window, self._at = list(parts[:WINDOW]), 0
        self.done = 0
        """Bytes that have come."""
        self.began = self.moved = time.monotonic()

    @property
    def idle(self) -> bool:
        """Is this the wait for a next frame, of which nothing need ever come?"""
        return self._silence is None and self._whole is None

    @property
    def left(self) -> int:
        """Bytes that have not come."""
        return self._size - self.done

    @property
    def due(self) -> float:
        """When it fails if nothing more comes."""
        silent = math.inf if self._silence is None else self.moved + self._silence
        return silent if self._whole is None else min(silent, self.began + self._whole)

    def receive(self, flags: int) -> bool:
        """Take what is there, by one call to the kernel at most. True: all of it has come. Raises StreamClosed."""
        stream, window, received = self._stream, self._window, self._stream.received
        try:
            count = stream.come(window, flags)
            if count == 0:
                came = f" after {self.done} of {self._size} bytes" if self.done else ""
                raise StreamClosed(f"{stream.peer}: closed by the peer{came}")
        except BlockingIOError:
            if stream.received != received:  # of a record that is not whole yet
                self.moved = time.monotonic()
            return False
        except ValueError as error:
            raise StreamClosed(f"{stream.peer}: {error}") from error
        except StreamClosed:
            raise
        except OSError as error:
            raise StreamClosed(f"{stream.peer}: {error}") from error
        self.done += count
        if self.done >= self._size:
            return True
        self.moved = time.monotonic()
        full = 0
        while full < len(window) and count >= len(window[full]):
            count -= len(window[full])
            full += 1
        self._at += full
        if full:
            self._window = window = [*window[full:], *self._parts[self._at + len(window) - full : self._at + WINDOW]]
        if count:
            window[0] = window[0][count:]
        return False

    def check(self, now: float) -> None:
        """Raise TimeoutError if it is due."""
        if self._whole is not None and now - self.began >= self._whole:
            raise TimeoutError(f"{self._stream.peer}: {self.done} of {self._size} bytes came in {self._whole:g} s")
        if self._silence is not None and now - self.moved >= self._silence:
            raise TimeoutError(f"{self._stream.peer}: {self.done} of {self._size} bytes came, then none for {self._silence:g} s")


class Pause:
    """Nothing is to be read before `seconds` have passed (None: ever), or somebody wakes the stream."""

    __slots__ = ("due",)

    def __init__(self, seconds: float | None = None) -> None:
        self.due = math.inf if seconds is None else time.monotonic() + seconds


T = TypeVar("T")
Wants = Generator[ReadRequest | Pause, None, T]
"""What reads a stream: it continues when what it wants is there. What drives it throws StreamClosed and TimeoutError into it."""


class StreamReading:
    """What is read of a connection, in one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.peer = peer_name(sock)
        self.borrowed: Region | None = None
        """Memory that the peer lends: where payloads lie that do not follow their header."""
        self.opening: Seal | None = None
        """What the headers that come are sealed with, once the handshake is over."""
        self.tls: Tls | None = None
        """What decrypts, where the stream is encrypted."""
        self._ahead = memoryview(bytearray(AHEAD))
        self._begin = self._end = 0
        """Between them lies in `_ahead` what was received and is not read yet."""
        self._receive_seconds = 0.0
        self.received = 0
        """Bytes that have come, encrypted or not."""

    @property
    def behind(self) -> bool:
        """Was something received already that is not read yet?"""
        return self._begin < self._end or self.encrypted_behind

    @property
    def encrypted_behind(self) -> bool:
        """Was something received already that may be decrypted? No poller tells of it."""
        return self.tls is not None and self.tls.behind

    def ahead(self) -> bool:
        """Has the next header been received already, or something that will be refused when it is read?"""
        if self.tls is not None and self.tls.behind and self._end - self._begin < HEADER_BYTES:
            held = self._hold()
            try:
                self._end += self.tls.read([self._ahead[held:]])
            except OSError:
                return True
        return self._end - self._begin >= HEADER_BYTES

    def recv_header(self, seconds: float | None) -> Header:
        """The next header; `seconds` bounds the wait for its whole arrival, None waits as long as the stream lives.

        Raises: StreamClosed, TimeoutError (nothing or too little came), WireError.
        """
        return self.run(self.next_header(seconds))

    def recv_into(self, header: Header, target: memoryview) -> None:
        """Read the payload into `target`, whose size must be the header's length; checks the crc. Raises as recv_header."""
        self.run(self.payload(header, [target]))

    def recv_parts(self, header: Header, parts: Sequence[memoryview]) -> None:
        """As `recv_into`, into several places one after the other, whose sizes together must be the header's length."""
        self.run(self.payload(header, parts))

    def recv_body(self, header: Header, limit: int = MAX_JSON) -> bytearray:
        """Read a payload of at most `limit` bytes. It is allocated as it comes, at most PIECE bytes ahead of what was sent."""
        return self.run(self.body(header, limit))

    def recv_json(self, header: Header) -> dict[str, Any]:
        """Read a control body, of several frames where it has Flag.MORE. Raises as `recv_header`."""
        return self.run(self.json(header))

    def drain(self, header: Header) -> None:
        """Read a payload and forget it (a duplicate, or a frame that was refused). The caller has checked its length."""
        self.run(self.skip(header))

    def run(self, wants: Wants[T]) -> T:
        """Read what `wants` asks for in the calling thread, which waits. Raises what it raises."""
        try:
            want = next(wants)
            while True:
                if isinstance(want, Pause):
                    raise RuntimeError("a thread that reads one stream has nothing to pause for")
                try:
                    self._fill(want)
                except (StreamClosed, TimeoutError) as error:
                    want = wants.throw(error)
                else:
                    want = next(wants)
        except StopIteration as end:
            value: T = end.value
            return value

    # -- the same, told by what they want filled ---------------------------------------------------

    def next_header(self, seconds: float | None) -> Wants[Header]:
        """As `recv_header`."""
        if self._end - self._begin < HEADER_BYTES:
            held = self._hold()
            self._begin = held
            filling = ReadRequest(self, [self._ahead[held:]], None, seconds, HEADER_BYTES - held)
            yield filling
            self._begin, self._end = 0, held + filling.done
        view = self._ahead[self._begin : self._begin + HEADER_BYTES]
        header, extra = parse(view, self.opening is not None), extra_header_bytes(view)
        if self.opening is not None:
            self.opening.check(view)
        self._begin += HEADER_BYTES
        if extra:
            yield ReadRequest(self, [memoryview(bytearray(extra))], None, HELLO_SECONDS)
        return header

    def payload(self, header: Header, parts: Sequence[memoryview]) -> Wants[None]:
        """As `recv_parts`."""
        size = sum(map(len, parts))
        if size != header.length:
            raise WireError(f"{header.kind.name} of {_place(header)} has {header.length} bytes, expected {size}")
        if header.flags & Flag.LENT:
            at = header.part
            for part in parts:
                copy_out(self.lent(header, at, len(part)), part)
                at += len(part)
            return
        if size:
            yield ReadRequest(self, parts, SILENCE_SECONDS)
        if header.crc and functools.reduce(lambda crc, part: zlib.crc32(part, crc), parts, 0) != header.crc:
            raise WireError(f"{header.kind.name} of {_place(header)} is damaged: its checksum does not match")

    def lent(self, header: Header, offset: int, length: int) -> Any:
        """Bytes of a LENT frame where they lie, a ctypes array. Raises WireError if they are not in what the peer lends."""
        if self.borrowed is None:
            raise WireError(f"{header.kind.name} of block {header.block} lies in lent memory, and none was handed over")
        return self.borrowed.buffer(offset, length)

    def body(self, header: Header, limit: int = MAX_JSON) -> Wants[bytearray]:
        """As `recv_body`."""
        return self._body(header, limit, SILENCE_SECONDS, None)

    def json(self, header: Header, most: int = MAX_BODY, values: int = MAX_VALUES) -> Wants[dict[str, Any]]:
        """As `recv_json`, of at most `most` bytes and so many values."""
        return self._json(header, SILENCE_SECONDS, None, most=most, values=values)

    def hello(self, header: Header, values: int = MAX_VALUES, most: int = MAX_BODY) -> Wants[dict[str, Any]]:
        """As `json`, from a peer that nothing is known of: it may pause for HELLO_SECONDS, must send LEAST_RATE and end in time.

        `values`: of the body at most; each takes much more time than the bytes of a text.
        """
        return self._json(header, HELLO_SECONDS, LEAST_RATE, time.monotonic() + HELLO_WHOLE_SECONDS, most, values)

    def skip(self, header: Header) -> Wants[None]:
        """As `drain`."""
        left = 0 if header.flags & Flag.LENT else header.length
        scratch = memoryview(bytearray(min(left, 1 << 20)))
        while left:
            part = scratch[: min(left, len(scratch))]
            yield ReadRequest(self, [part], SILENCE_SECONDS)
            left -= len(part)

    def _json(
        self, header: Header, silence: float, rate: int | None, until: float = math.inf, most: int = MAX_BODY, values: int = MAX_VALUES
    ) -> Wants[dict[str, Any]]:  # fmt: skip
        body = yield from self._body(header, min(MAX_JSON, most), silence, rate, until)
        while header.flags & Flag.MORE:
            before, header = header, (yield from self.next_header(silence))
            continues(before, header, len(body), most)
            body += yield from self._body(header, MAX_JSON, silence, rate, until)
        return load(body, values)

    def _body(self, header: Header, limit: int, silence: float, rate: int | None, until: float = math.inf) -> Wants[bytearray]:
        if header.length > limit:
            raise WireError(f"{header.kind.name} of {header.length} bytes is above the limit of {limit}")
        body = bytearray()
        while len(body) < header.length:
            piece = bytearray(min(PIECE, header.length - len(body)))
            whole = None if rate is None else max(0.0, min(silence + len(piece) / rate, until - time.monotonic()))
            yield ReadRequest(self, [memoryview(piece)], silence, whole)
            body += piece
        if header.crc and zlib.crc32(body) != header.crc:
            raise WireError(f"{header.kind.name} of {header.length} bytes is damaged: its checksum does not match")
        return body

    # -- inside ------------------------------------------------------------------------------------

    def come(self, parts: Sequence[memoryview], flags: int) -> int:
        """Bring to `parts` what was received ahead, or else what is there; 0: the peer has closed. Raises OSError.

        BlockingIOError: nothing came, or no whole record of what is encrypted.
        """
        if self._begin < self._end and (count := self.take(parts)):
            return count
        tls = self.tls
        if tls is None:
            count = self.sock.recvmsg_into(parts, 0, flags)[0]
            self.received += count
            return count
        if tls.behind and (count := tls.read(parts)):
            return count
        place = _place_of_thread()
        if self.opening is None:
            place = place[: max(0, STRANGER_BYTES - self.received)]
            if not place:
                raise ConnectionAbortedError(f"{STRANGER_BYTES} bytes came without a proof of this run's key")
        came = self.sock.recv_into(place, 0, flags & ~socket.MSG_WAITALL)
        if not came:
            return 0
        self.received += came
        tls.feed(place[:came])
        count = tls.read(parts)
        if not count:
            raise BlockingIOError
        return count

    def _hold(self) -> int:
        """Move what was received ahead to the front of its memory; how many bytes that are."""
        held = self._end - self._begin
        self._ahead[:held] = self._ahead[self._begin : self._end]
        self._begin, self._end = 0, held
        return held

    def take(self, parts: Sequence[memoryview]) -> int:
        """Bring to `parts` what was received ahead; how many bytes that are."""
        begin = self._begin
        for part in parts:
            size = min(len(part), self._end - self._begin)
            part[:size] = self._ahead[self._begin : self._begin + size]
            self._begin += size
        return self._begin - begin

    def _fill(self, want: ReadRequest) -> None:
        """Wait until `want` is filled. Raises StreamClosed, TimeoutError."""
        flags, now = 0 if want.least else socket.MSG_WAITALL, want.moved
        while True:
            if self._begin == self._end:
                due = want.due
                self._receive_within(None if due == math.inf else min(SLICE_SECONDS, due - now))
            if want.receive(flags):
                return
            now = time.monotonic()
            want.check(now)

    def _receive_within(self, seconds: float | None) -> None:
        # Not settimeout(): it also changes the mode under a sendall() of another thread.
        wanted = 0.0 if seconds is None else max(0.01, round(seconds, 1))
        if wanted != self._receive_seconds:
            try:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(wanted))
            except OSError as error:
                raise StreamClosed(f"{self.peer}: {error}") from error
            self._receive_seconds = wanted


def _place_of_thread() -> memoryview:
    place: memoryview | None = getattr(_thread, "place", None)
    if place is None:
        place = _thread.place = memoryview(bytearray(TLS_PIECE))
    return place


def _place(header: Header) -> str:
    return f"table {header.table}" if header.kind in (*ROW_KINDS, Kind.ROWS) else f"block {header.block}"


def timeval(seconds: float) -> bytes:
    """What SO_RCVTIMEO and SO_SNDTIMEO take."""
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def peer_name(sock: socket.socket) -> str:
    """The other end's `host:port`; `peer` where there is none."""
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "peer"
    return f"{host}:{port}"
