"""A thread that serves many streams by a poller, and such a stream: no thread ever waits for its peer.

A stream is read by a generator that says what it wants filled, and written by a queue. Its two sides belong to two threads, so that a
large answer goes out while the next push comes in. What is queued says its bytes when its turn comes. A sender that finds nothing before
it sends at once. What the kernel does not take is sent by the stream's loop when there is room. Of a half-sent frame the stream holds the
rest, so a slow reader holds one frame.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from psjob.process import supervise
from psjob.process.system import Bell
from psjob.wire.auth import Tls, first_piece
from psjob.wire.frame import Header
from psjob.wire.reading import SILENCE_SECONDS, Pause, ReadRequest, StreamClosed, Wants
from psjob.wire.tcp import JOINED, Buffer, Part, Stream
from psjob.wire.unauthenticated import HandshakeQueue

LOOK_SECONDS = 0.25
"""Between two looks at deadlines, where any stream has one."""
MOST_STIRRED = 32
"""Streams for which one thread sends at a time; those of more are sent by their own loops."""
InOwnThread = Callable[[], None]
"""Continues with a stream in a thread of its own, by calls that wait."""


class _Reader:
    """One stream as its loop reads it."""

    __slots__ = ("armed", "fd", "stream", "want", "wants")

    def __init__(self, stream: NonBlockingStream, wants: Wants[InOwnThread | None]) -> None:
        self.stream, self.wants = stream, wants
        self.fd = stream.sock.fileno()
        self.want: ReadRequest | Pause = Pause()
        self.armed = False
        """Does the poller tell of bytes that have come?"""


class EventLoop:
    """One thread. What is public may be called from any thread where it says so; all else belongs to the loop's own."""

    def __init__(self, name: str, done: Callable[[NonBlockingStream], None]) -> None:
        self.name, self._done = name, done
        self._thread = supervise.thread(self._run, name)
        self.stirred: dict[NonBlockingStream, None] = {}
        """Streams for which this thread has queued frames since it sent last."""
        self._poller = Poller()
        self._bell = Bell()
        self._poller.register(self._bell.fd, BYTES)
        self._inbox: deque[Callable[[], object]] = deque()
        self._rung = self._over = False
        self.waits = False
        """Has it nothing to do but to wait for what comes?"""
        self.handed: deque[Callable[[], object]] = deque()
        """What other loops have given it to do and it has not done."""
        self._readers: dict[int, _Reader] = {}
        self._of: dict[NonBlockingStream, _Reader] = {}
        self._timed: dict[_Reader, None] = {}
        """Those whose want has a deadline."""
        self._senders: dict[int, NonBlockingStream] = {}
        """By descriptor: who has frames left over."""
        self._listeners: dict[int, Callable[[], None]] = {}
        self._paused_listeners: set[int] = set()
        """Listeners that do not accept until the next look, for want of descriptors."""
        self._behind: dict[_Reader, None] = {}
        """Those of which more can be decrypted; they continue when others have had their turn."""
        self._looked = 0.0
        self.handshakes: HandshakeQueue | None = None
        """Whom this thread listens to besides: it hangs up on who waits too long."""

    def __del__(self) -> None:
        self._bell.close()  # not before: some thread may be about to ring

    def start(self) -> None:
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait for the thread, which ends soon after `close`."""
        self._thread.join(seconds)

    def post(self, act: Callable[[], object]) -> None:
        """Let the loop's thread do `act` soon. From any thread."""
        self._inbox.append(act)
        if not self._rung and getattr(here, "loop", None) is not self:
            self._rung = True
            self._bell.ring()

    def do_handed(self) -> None:
        """Do what another loop has given first."""
        try:
            self.handed[0]()
        finally:
            self.handed.popleft()

    def close(self) -> None:
        """End, and close every stream. From any thread."""
        self._over = True
        self.post(lambda: None)

    # -- streams ---------------------------------------------------------------------------------

    def listen(self, fd: int, accept: Callable[[], None]) -> None:
        """Call `accept` when somebody dials, or has spoken. Raises OSError if the system can watch no more."""
        self._poller.register(fd, BYTES)
        self._listeners[fd] = accept

    def unlisten(self, fd: int) -> None:
        """Forget a descriptor that was to be listened to; it is closed next."""
        del self._listeners[fd]
        self._paused_listeners.discard(fd)
        self._poller.unregister(fd)

    def pause_accept(self, fd: int) -> None:
        """Accept nobody until the next look. A listener that is closed meanwhile is no error."""
        with contextlib.suppress(OSError):
            self._poller.modify(fd, 0)
        self._paused_listeners.add(fd)
        self._looked = time.monotonic()

    def read(self, stream: NonBlockingStream, wants: Wants[InOwnThread | None]) -> None:
        """Begin to read a stream."""
        reader = _Reader(stream, wants)
        try:
            self._poller.register(reader.fd, 0)
        except (OSError, ValueError):
            wants.close()
            self._let_go(stream)
            return
        self._readers[reader.fd] = self._of[stream] = reader
        self._resume(reader)

    def wake(self, stream: NonBlockingStream) -> None:
        """Continue with a stream that has paused, or was closed."""
        reader = self._of.get(stream)
        if reader is not None and (stream.closed or isinstance(reader.want, Pause)):
            self._resume(reader)

    def watch(self, stream: NonBlockingStream) -> None:
        """A stream has frames left over: send them when there is room."""
        fd = stream.sock.fileno()
        if stream.closed or fd in self._senders or stream.resume():
            return
        try:
            self._poller.register(fd, ROOM)
        except (OSError, ValueError):
            stream.close()
            return
        self._senders[fd] = stream

    def forget(self, stream: NonBlockingStream) -> None:
        """Close the descriptor of a stream that is closed and read no more."""
        fd = stream.sock.fileno()
        if fd < 0:
            return
        if self._senders.pop(fd, None) is not None:
            self._poller.unregister(fd)
        stream.release()
        self._done(stream)

    def send_stirred(self, but: NonBlockingStream | None = None) -> None:
        """Send what this thread has queued, except for one stream."""
        stirred, self.stirred = self.stirred, {}
        if but is not None and stirred.pop(but, self) is None:
            self.stirred[but] = None
        if stirred:
            self._send(stirred)

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        here.loop = self
        while not self._over:
            if self._inbox or self.stirred or self._behind:
                wait = 0.0
            else:
                wait = LOOK_SECONDS if self._has_dates else -1.0
            self.waits = wait != 0.0
            found = self._poller.poll(wait)
            self.waits = False
            for fd, event in found:
                self._met(fd, event)
            if self._behind:
                behind, self._behind = self._behind, {}
                for reader in behind:
                    if self._of.get(reader.stream) is reader:
                        self._receive(reader)
            self._work()
            if self._has_dates:
                now = time.monotonic()
                if now - self._looked >= LOOK_SECONDS:
                    self._looked = now
                    self._look(now)
                    self._work()
        for reader in list(self._readers.values()):
            reader.stream.close()
            self._resume(reader)
        if self.handshakes is not None:
            self.handshakes.look(math.inf)
        self._work()
        self._poller.close()

    @property
    def _has_dates(self) -> bool:
        return bool(self._timed or self._senders or self._paused_listeners or self.handshakes)

    def _met(self, fd: int, event: int) -> None:
        reader = self._readers.get(fd)
        if reader is not None:
            if reader.armed:
                self._receive(reader)
            else:  # reset while nothing was read of it
                self._resume(reader, StreamClosed(f"{reader.stream.peer}: closed by the peer"))
        elif fd in self._senders:
            stream = self._senders[fd]
            if stream.closed or stream.resume():
                del self._senders[fd]
                self._poller.unregister(fd)
        elif fd in self._listeners:
            self._listeners[fd]()
        elif fd == self._bell.fd:
            self._bell.hear()
            self._rung = False

    def _work(self) -> None:
        """Do what was posted, and send what was queued."""
        while self._inbox or self.stirred:
            for _ in range(len(self._inbox)):
                self._inbox.popleft()()
            if self.stirred:
                self.send_stirred()

    def _send(self, streams: dict[NonBlockingStream, None]) -> None:
        if len(streams) > MOST_STIRRED:
            others: dict[EventLoop, list[NonBlockingStream]] = {}
            mine = []
            for stream in streams:
                writer = stream.writer
                if writer is None or writer is self:
                    mine.append(stream)
                else:
                    others.setdefault(writer, []).append(stream)
            for writer, theirs in others.items():
                writer.post(partial(_pump, theirs))
            _pump(mine)
        else:
            for stream in streams:
                stream.pump()

    def _receive(self, reader: _Reader) -> None:
        """Take what has come, until the next frame is waited for."""
        stream, want = reader.stream, reader.want
        while isinstance(want, ReadRequest):
            if stream.closed:
                self._resume(reader, StreamClosed(f"{stream.peer}: closed"))
                return
            try:
                if not want.receive(socket.MSG_DONTWAIT):
                    break
            except StreamClosed as error:
                self._resume(reader, error)
                return
            if not self._next(reader):
                return
            want = reader.want
            if isinstance(want, Pause) or want.idle:  # what has come meanwhile is told again
                break
        if stream.encrypted_behind and isinstance(want, ReadRequest):
            self._behind[reader] = None
        self._arm(reader)

    def _resume(self, reader: _Reader, error: Exception | None = None) -> None:
        """Continue with a generator that has paused or has just begun, or end it with `error`."""
        if error is None and reader.stream.closed:
            error = StreamClosed(f"{reader.stream.peer}: closed")
        if self._next(reader, error):
            if isinstance(reader.want, ReadRequest) and reader.stream.behind:
                self._receive(reader)
            else:
                self._arm(reader)

    def _next(self, reader: _Reader, error: Exception | None = None) -> bool:
        """Let the generator say what it wants next; False: it has ended."""
        try:
            reader.want = next(reader.wants) if error is None else reader.wants.throw(error)
            return True
        except StopIteration as end:
            self._end(reader, end.value)
        except StreamClosed:
            self._end(reader)
        except Exception as problem:
            supervise.thread_broken(self.name, problem)
            self._end(reader)
        finally:
            if error is not None:  # its frames hold the stream and, from Python 3.12 on, this one, which holds the error
                error.__traceback__ = None
        return False

    def _arm(self, reader: _Reader) -> None:
        """Have the poller tell what is waited for."""
        want = reader.want
        reads = isinstance(want, ReadRequest)
        if reads is not reader.armed:
            reader.armed = reads
            self._poller.modify(reader.fd, BYTES if reads else 0)
        if isinstance(want, ReadRequest):
            reader.stream.await_bytes(want.left)
        if want.due != math.inf:
            self._timed[reader] = None
        elif reader in self._timed:
            del self._timed[reader]

    def _end(self, reader: _Reader, apart: InOwnThread | None = None) -> None:
        """The generator has ended: send what is queued, close, or continue in a thread of its own."""
        stream = reader.stream
        del self._readers[reader.fd], self._of[stream]
        self._timed.pop(reader, None)
        self._behind.pop(reader, None)
        self._poller.unregister(reader.fd)
        if apart is not None:
            supervise.start_thread(self._apart, "stream-apart", stream, apart)
        else:
            self._let_go(stream)

    def _let_go(self, stream: NonBlockingStream) -> None:
        stream.reader = None
        if stream.closed:
            stream.close()
        else:
            stream.finish()

    def _apart(self, stream: NonBlockingStream, go_on: InOwnThread) -> None:
        stream.reader = None
        try:
            go_on()
        finally:
            stream.resume()
            stream.close()

    def _look(self, now: float) -> None:
        """What is due has one more chance: this thread may have been busy."""
        for reader in [reader for reader in self._timed if reader.want.due <= now]:
            want = reader.want
            if isinstance(want, Pause):
                self._resume(reader)
                continue
            self._receive(reader)
            if reader.want is want and self._of.get(reader.stream) is reader:
                try:
                    want.check(now)
                except TimeoutError as error:
                    self._resume(reader, error)
        for stream in list(self._senders.values()):
            if stream.overdue(now):
                stream.close()
        if self.handshakes is not None:
            self.handshakes.look(now)
        for fd in self._paused_listeners:
            with contextlib.suppress(OSError):  # the listener is closed
                self._poller.modify(fd, BYTES)
        self._paused_listeners.clear()


def _pump(streams: list[NonBlockingStream]) -> None:
    for stream in streams:
        stream.pump()


BATCH = 64 << 10
"""Bytes of frames that are sent by one call, where there are several."""
PLACES = 512
MOST_HANDED = 2
"""Given to another loop at a time, so that it finds the next one when it is through with one: to wake it takes as long as some updates."""
QUEUED = 1 << 16
"""Answers that wait until their peer reads; each takes about a kilobyte."""
BEHIND = 1024
"""Answers that wait until their peer reads; with so many, no more of its requests are read."""
TOGETHER = 512 << 10
"""Bytes of a large frame that a thread is woken for at most. The kernel takes no more than half of what it may hold of a stream."""
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


class NonBlockingStream(Stream):
    """`put` may be called from any thread. Belongs to two loops once its pool has taken it: one reads, another sends what is left over."""

    def __init__(self, sock: socket.socket, since: float | None = None) -> None:
        super().__init__(sock)
        self.since = time.monotonic() if since is None else since
        """When its peer has dialled."""
        self.reader: EventLoop | None = None
        self.writer: EventLoop | None = None
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
        self._together = 1
        """SO_RCVLOWAT of the socket, which was 1 when this was made."""

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
        loop: EventLoop | None = getattr(here, "loop", None)
        if loop is not None and loop.stirred:
            loop.send_stirred(but=self)

    def hand_over(self, act: Callable[[], object]) -> bool:
        """Let the loop that writes do `act`, if it does nothing else and has little of this kind to do; False: nobody does it."""
        loop = self.writer
        if loop is None or getattr(here, "loop", None) is loop or not (loop.waits or 0 < len(loop.handed) < MOST_HANDED):
            return False
        loop.waits = False
        loop.handed.append(act)
        loop.post(loop.do_handed)
        return True

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
            self.writer.post(partial(self.writer.forget, self))

    def wake(self) -> None:
        """Let the generator go on that has paused, or end where the stream is closed."""
        reader = self.reader
        if reader is not None:
            reader.post(partial(reader.wake, self))

    def release(self) -> None:
        """Give the descriptor back; the loops know it no longer."""
        with self._send_lock:
            self.sock.close()
            self._queue.clear()
            self._rest, self._encrypted, self._done = [], memoryview(b""), []

    # -- for the loops -----------------------------------------------------------------------------

    def await_bytes(self, left: int) -> None:
        """So many bytes are waited for: where they are many, the poller tells of some of them together, or of an end of the stream."""
        together = min(left, TOGETHER) if left > LARGE and self.tls is None else 1
        if together != self._together:
            with contextlib.suppress(OSError):  # reset: to read tells
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, together)
                self._together = together

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
            self.writer.post(partial(self.writer.watch, self))

    def _stir(self, large: bool) -> None:
        loop: EventLoop | None = getattr(here, "loop", None)
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
                piece, left = first_piece(left)
                self._encrypted = memoryview(tls.encrypt(piece))
                continue  # it may be empty
            try:
                count = self.sock.send(self._encrypted, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            self._written += count
            self._encrypted = self._encrypted[count:]
        return [memoryview(part) for part in left]


Serve = Callable[[NonBlockingStream], Wants[InOwnThread | None]]
"""How a stream that dialled is read."""


def _after(parts: Sequence[Buffer], sent: int) -> list[memoryview]:
    """What of `parts` lies behind the first `sent` bytes."""
    left = []
    for part in parts:
        if sent < len(part):
            left.append(memoryview(part)[sent:])
        sent = max(0, sent - len(part))
    return left


BYTES, ROOM = select.POLLIN, select.POLLOUT
"""The bits of epoll are the same."""


class Poller:
    """Belongs to one thread. An end of the other side is reported for every descriptor, also for one that waits for nothing (0)."""

    def __init__(self) -> None:
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._poll = select.poll()
        waits = self._epoll or self._poll
        self.modify, self.unregister, self._register = waits.modify, waits.unregister, waits.register

    def register(self, fd: int, wanted: int) -> None:
        """Raises ValueError for a descriptor that is closed, OSError where the system can watch no more."""
        if fd < 0:
            raise ValueError("a closed descriptor cannot be watched")
        self._register(fd, wanted)

    def poll(self, seconds: float) -> list[tuple[int, int]]:
        """(descriptor, bits) of those that have something to tell; waits for the first, as long as it takes where `seconds` is negative."""
        if self._epoll is not None:
            return self._epoll.poll(seconds)
        return self._poll.poll(None if seconds < 0 else 1000 * seconds)

    def close(self) -> None:
        """Nothing is watched any more."""
        if self._epoll is not None:
            self._epoll.close()
