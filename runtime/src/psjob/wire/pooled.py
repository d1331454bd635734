"""A stream of a pool: it is read by a generator and written by a queue, and no thread ever waits for its peer.

What is queued says its bytes when its turn comes. A sender that finds nothing before it sends at once. What the kernel does not take is
sent by the stream's loop when there is room. Of a half-sent frame the stream holds the rest, so a slow reader holds one frame.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from psjob.wire.frame import Header
from psjob.wire.reading import SILENCE_SECONDS, Pause, Wants
from psjob.wire.tcp import JOINED, Buffer, Part, Stream
from psjob.wire.tls import pieces

if TYPE_CHECKING:
    from psjob.wire.loop import Loop
    from psjob.wire.tls import Tls

BATCH = 64 << 10
"""Bytes of frames that are sent by one call, where there are several."""
PLACES = 512
QUEUED = 1 << 16
"""Answers that wait until their peer reads; each takes about a kilobyte."""
BEHIND = 1024
"""Answers that wait until their peer reads; with so many, no more of its requests are read."""
LARGE = 64 << 10
"""An answer of so many bytes is sent by the loop that writes."""
log = logging.getLogger("psjob.wire")
here = threading.local()
"""Of a loop's thread: `loop`."""


class Sending(NamedTuple):
    """Whole frames, whose bytes stay as they are until `done` is called."""

    parts: Sequence[Part]
    done: Callable[[], None] | None = None


def nothing() -> None:
    """There is nobody to tell."""


Act = Callable[[], Sending | None]
"""Says what is to be sent when its turn has come; None: nothing."""


class Pooled(Stream):
    """`put` may be called from any thread. Belongs to two loops once its pool has taken it: one reads, another sends what is left over."""

    def __init__(self, sock: socket.socket, since: float | None = None) -> None:
        super().__init__(sock)
        self.since = time.monotonic() if since is None else since
        """When its peer has dialled."""
        self.reader: Loop | None = None
        self.writer: Loop | None = None
        self.known: Callable[[], object] = nothing
        """To be called once it has been proven whose stream this is."""
        self.written = 0.0
        """When the peer took a byte last, of what is left over."""
        self._queue: deque[Act | None] = deque()
        """None: close."""
        self._rest: list[memoryview] = []
        """What is left over, not encrypted yet."""
        self._encrypted = memoryview(b"")
        """What is left over before that, of an encrypted stream."""
        self._done: list[Callable[[], None]] = []
        self._pauses = False
        """Does the generator wait until the peer has read?"""

    @property
    def full(self) -> bool:
        """Do so many answers wait for the peer that no more of its requests should be read?"""
        return len(self._queue) >= BEHIND

    def emptied(self) -> Wants[None]:
        """Wait until the peer has read of its answers, or is given up."""
        while not self.closed:
            self._pauses = True  # first: who sends looks at it last
            if not self.full:
                break
            yield Pause()
        self._pauses = False

    def put(self, act: Act, large: bool = False) -> None:
        """Send what `act` says, after all that was put before. `large`: the loop that writes does it, beside the one that reads."""
        if len(self._queue) >= QUEUED:
            if not self.closed:
                log.warning("closed a stream of %s: %d answers wait for it, and it does not read them", self.peer, len(self._queue))
                self.close()
            return
        self._queue.append(act)
        self._stir(large)

    def put_frame(self, header: Header, payload: bytes = b"") -> None:
        """Send a frame that stands."""
        sending = Sending(self.framed(header, payload))
        self.put(lambda: sending)

    def put_control(self, header: Header, raw: bytes) -> None:
        """Send a control body that `dump` has made: in several frames where it is above MAX_JSON."""
        sending = Sending(self.framed_control(header, raw))
        self.put(lambda: sending)

    def pass_on(self) -> None:
        """Send what was put to other streams, before the next frame of this one is handled: its own answers go out together."""
        loop: Loop | None = getattr(here, "loop", None)
        if loop is not None and loop.stirred:
            loop.send_stirred(but=self)

    def finish(self) -> None:
        """Close after all that was put before."""
        self._queue.append(None)
        self._stir(False)

    def close(self) -> None:
        """Nothing more is read or sent. The descriptor is closed when both loops have let go of it."""
        if not self.closed:
            self.closed = True
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
        self.wake()
        if self.reader is None and self.writer is not None:
            self.writer.post(functools.partial(self.writer.forget, self))

    def wake(self) -> None:
        """Let the generator go on that has paused, or end where the stream is closed."""
        reader = self.reader
        if reader is not None:
            reader.post(functools.partial(reader.wake, self))

    def release(self) -> None:
        """Give the descriptor back; the loops know it no longer."""
        with self._send_lock:
            self.sock.close()
            self._queue.clear()
            self._rest, self._encrypted, self._done = [], memoryview(b""), []

    # -- for the loops -----------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what the peer takes without waiting."""
        while self._queue and not self._left and self._send_lock.acquire(blocking=False):  # whoever has the lock looks again after
            try:
                if not self._left:  # somebody may have left something over since it was looked at
                    self._pump()
            finally:
                self._send_lock.release()

    def resume(self) -> bool:
        """There is room again: send what was left over, then what was put since. True: nothing is left over."""
        with self._send_lock:
            parts, self._rest = self._rest, []
            done, self._done = self._done, []
            through = self.closed or not (parts or self._encrypted) or self._send(parts, done, again=True)
        if through:
            self.pump()
        return not self._left

    def overdue(self, now: float) -> bool:
        """Has the peer taken no byte of what is left over for too long?"""
        return self._left and now - self.written >= SILENCE_SECONDS

    @property
    def _left(self) -> bool:
        """Is something left over?"""
        return bool(self._rest or self._encrypted)

    def _pump(self) -> None:
        """Make frames of what is queued, and send them; the lock is held."""
        parts: list[Buffer] = []
        done: list[Callable[[], None]] = []
        size = 0
        while self._queue:
            act = self._queue[0]
            if act is None and parts:
                break
            self._queue.popleft()
            if self.closed:
                continue
            if act is None:
                self.close()
                continue
            sending = act()
            if sending is None:
                continue
            packed = self._packed(sending.parts)
            parts += packed
            size += sum(map(len, packed))
            if sending.done is not None:
                done.append(sending.done)
            if size >= BATCH or done:
                break
        if self._pauses and len(self._queue) <= BEHIND // 2:
            self._pauses = False
            self.wake()
        if parts and not self.closed and not self._send(parts, done) and self.writer is not None:
            self.writer.post(functools.partial(self.writer.watch, self))

    def _stir(self, large: bool) -> None:
        loop: Loop | None = getattr(here, "loop", None)
        if loop is not None and not (large and loop is not self.writer):
            loop.stirred[self] = None
        elif self.writer is not None:
            self.writer.post(self.pump)

    def _send(self, parts: Sequence[Buffer], done: list[Callable[[], None]], again: bool = False) -> bool:
        """False: a part is left over. A stream that breaks is closed."""
        written = self._written
        try:
            self._rest = self._sent(parts) if self.tls is None else self._sent_encrypted(self.tls, parts)
        except (OSError, ValueError):
            self._encrypted = memoryview(b"")
            self.close()
            return True
        if not self._left:
            for act in done:
                act()
            return True
        if self._written != written or not again:
            self.written = time.monotonic()
        self._done = done
        return False

    def _sent(self, parts: Sequence[Buffer]) -> list[memoryview]:
        """What the kernel does not take, of what it is offered once. Raises OSError."""
        size = sum(map(len, parts))
        try:
            if size <= JOINED:
                whole = parts[0] if len(parts) == 1 else b"".join(parts)
                parts = (whole,)
                sent = self.sock.send(whole, socket.MSG_DONTWAIT)
            else:
                sent = self.sock.sendmsg(parts[:PLACES], (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        self._written += sent
        return [] if sent == size else _after(parts, sent)

    def _sent_encrypted(self, tls: Tls, parts: Sequence[Buffer]) -> list[memoryview]:
        """As `_sent`, piece by piece as long as the kernel takes them; of a piece that it takes in part the rest stays in `_encrypted`."""
        left: Sequence[Buffer] = (b"".join(parts),) if len(parts) > 1 and sum(map(len, parts)) <= JOINED else parts
        while left or self._encrypted:
            if not self._encrypted:
                piece, left = pieces(left)
                self._encrypted = memoryview(tls.encrypt(piece))
                continue  # it may be empty
            try:
                count = self.sock.send(self._encrypted, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            self._written += count
            self._encrypted = self._encrypted[count:]
        return [memoryview(part) for part in left]


def _after(parts: Sequence[Buffer], sent: int) -> list[memoryview]:
    """What of `parts` lies behind the first `sent` bytes."""
    left = []
    for part in parts:
        if sent < len(part):
            left.append(memoryview(part)[sent:])
        sent = max(0, sent - len(part))
    return left
