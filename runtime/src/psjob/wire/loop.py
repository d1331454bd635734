"""A thread that serves many streams by a poller.

It reads some of the streams, by generators that say what they want filled, and sends what is left over on
others. One stream's two sides belong to two threads, so that a large answer goes out while the next push comes in.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from psjob.process import supervise
from psjob.wire.lobby import Lobby
from psjob.wire.poller import BYTES, ROOM, Bell, Poller
from psjob.wire.pooled import Pooled, here
from psjob.wire.reading import Filling, Pause, StreamClosed, Wants

LOOK_SECONDS = 0.25
"""Between two looks at deadlines, where any stream has one."""
MOST_STIRRED = 32
"""Streams for which one thread sends at a time; those of more are sent by their own loops."""
Apart = Callable[[], None]
"""Goes on with a stream in a thread of its own, by calls that wait."""
Serve = Callable[[Pooled], Wants[Apart | None]]


class _Reader:
    """One stream as its loop reads it."""

    __slots__ = ("armed", "fd", "stream", "want", "wants")

    def __init__(self, stream: Pooled, wants: Wants[Apart | None]) -> None:
        self.stream, self.wants = stream, wants
        self.fd = stream.sock.fileno()
        self.want: Filling | Pause = Pause()
        self.armed = False
        """Does the poller tell of bytes that have come?"""


class Loop:
    """One thread. What is public may be called from any thread where it says so; all else belongs to the loop's own."""

    def __init__(self, name: str, done: Callable[[Pooled], None]) -> None:
        self.name, self._done = name, done
        self._thread = supervise.thread(self._run, name)
        self.stirred: dict[Pooled, None] = {}
        """Streams for which this thread has queued frames since it sent last."""
        self._poller = Poller()
        self._bell = Bell()
        self._poller.register(self._bell.fd, BYTES)
        self._inbox: deque[Callable[[], object]] = deque()
        self._rung = self._over = False
        self._readers: dict[int, _Reader] = {}
        self._of: dict[Pooled, _Reader] = {}
        self._timed: dict[_Reader, None] = {}
        """Those whose want has a deadline."""
        self._senders: dict[int, Pooled] = {}
        """By descriptor: who has frames left over."""
        self._listeners: dict[int, Callable[[], None]] = {}
        self._deaf: set[int] = set()
        """Listeners that are not heard, for want of descriptors."""
        self._behind: dict[_Reader, None] = {}
        """Those of which more can be decrypted; they go on when others have had their turn."""
        self._looked = 0.0
        self.lobby: Lobby | None = None
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

    def close(self) -> None:
        """End, and close every stream. From any thread."""
        self._over = True
        self.post(lambda: None)

    # -- streams ---------------------------------------------------------------------------------

    def listen(self, fd: int, accept: Callable[[], None]) -> None:
        """Call `accept` when somebody dials, or has spoken. Raises OSError where the system can watch no more."""
        self._poller.register(fd, BYTES)
        self._listeners[fd] = accept

    def unlisten(self, fd: int) -> None:
        """Forget a descriptor that was to be listened to; it is closed next."""
        del self._listeners[fd]
        self._deaf.discard(fd)
        self._poller.unregister(fd)

    def deaf(self, fd: int) -> None:
        """Hear no one who dials, until the next look. A listener that is closed meanwhile is no error."""
        with contextlib.suppress(OSError):
            self._poller.modify(fd, 0)
        self._deaf.add(fd)
        self._looked = time.monotonic()

    def read(self, stream: Pooled, wants: Wants[Apart | None]) -> None:
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

    def wake(self, stream: Pooled) -> None:
        """Go on with a stream that has paused, or was closed."""
        reader = self._of.get(stream)
        if reader is not None and (stream.closed or isinstance(reader.want, Pause)):
            self._resume(reader)

    def watch(self, stream: Pooled) -> None:
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

    def forget(self, stream: Pooled) -> None:
        """Close the descriptor of a stream that is closed and read no more."""
        fd = stream.sock.fileno()
        if fd < 0:
            return
        if self._senders.pop(fd, None) is not None:
            self._poller.unregister(fd)
        stream.release()
        self._done(stream)

    def send_stirred(self, but: Pooled | None = None) -> None:
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
            for fd, event in self._poller.poll(wait):
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
        if self.lobby is not None:
            self.lobby.look(math.inf)
        self._work()
        self._poller.close()

    @property
    def _has_dates(self) -> bool:
        return bool(self._timed or self._senders or self._deaf or self.lobby)

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

    def _send(self, streams: dict[Pooled, None]) -> None:
        if len(streams) > MOST_STIRRED:
            others: dict[Loop, list[Pooled]] = {}
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
        while isinstance(want, Filling):
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
        if stream.encrypted_behind and isinstance(want, Filling):
            self._behind[reader] = None
        self._arm(reader)

    def _resume(self, reader: _Reader, error: Exception | None = None) -> None:
        """Go on with a generator that has paused or has just begun, or end it with `error`."""
        if error is None and reader.stream.closed:
            error = StreamClosed(f"{reader.stream.peer}: closed")
        if self._next(reader, error):
            if isinstance(reader.want, Filling) and reader.stream.behind:
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
            supervise.broken(self.name, problem)
            self._end(reader)
        finally:
            if error is not None:  # its frames hold the stream and, from Python 3.12 on, this one, which holds the error
                error.__traceback__ = None
        return False

    def _arm(self, reader: _Reader) -> None:
        """Have the poller tell what is waited for."""
        want = reader.want
        reads = isinstance(want, Filling)
        if reads is not reader.armed:
            reader.armed = reads
            self._poller.modify(reader.fd, BYTES if reads else 0)
        if want.due != math.inf:
            self._timed[reader] = None
        elif reader in self._timed:
            del self._timed[reader]

    def _end(self, reader: _Reader, apart: Apart | None = None) -> None:
        """The generator has ended: send what is queued, close, or go on in a thread of its own."""
        stream = reader.stream
        del self._readers[reader.fd], self._of[stream]
        self._timed.pop(reader, None)
        self._behind.pop(reader, None)
        self._poller.unregister(reader.fd)
        if apart is not None:
            supervise.start(self._apart, "stream-apart", stream, apart)
        else:
            self._let_go(stream)

    def _let_go(self, stream: Pooled) -> None:
        stream.reader = None
        if stream.closed:
            stream.close()
        else:
            stream.finish()

    def _apart(self, stream: Pooled, go_on: Apart) -> None:
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
        if self.lobby is not None:
            self.lobby.look(now)
        for fd in self._deaf:
            with contextlib.suppress(OSError):  # the listener is closed
                self._poller.modify(fd, BYTES)
        self._deaf.clear()


def _pump(streams: list[Pooled]) -> None:
    for stream in streams:
        stream.pump()
