"""The streams that dial a process, spread over a pool of threads: as many as it has cores, however many streams there are."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from psjob.process import system
from psjob.wire.event_loop import EventLoop, NonBlockingStream, Serve, nothing
from psjob.wire.unauthenticated import HandshakeQueue, UnauthenticatedPeers

ACCEPTS = 64
"""Streams taken at a time, before others are read."""
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
LEAST, MOST = 2, 8
"""Threads of a pool."""
STRANGERS = 256
"""Streams that have not proven yet whose they are."""


class StreamPool:
    """`threads` None: as many as there are cores, within LEAST and MOST. Its threads run until `close`."""

    def __init__(self, name: str, threads: int | None = None) -> None:
        number = max(LEAST, threads or min(MOST, system.cores()))
        self.loops = [EventLoop(f"{name}-streams-{at}", self._gone) for at in range(number)]
        self._lock = threading.Lock()
        self._reads: dict[NonBlockingStream, int] = {}
        """By stream, which loop reads it."""
        self._counts = [0] * number
        self._strangers: UnauthenticatedPeers[socket.socket | NonBlockingStream] = UnauthenticatedPeers(STRANGERS)
        self._handshakes = self.loops[0].handshakes = HandshakeQueue(self.loops[0].listen, self.loops[0].unlisten, self._strangers.drop)
        for loop in self.loops:
            loop.start()

    def accept(self, listener: socket.socket, serve: Serve, limit: int, first: int = 1) -> None:
        """Read what dials `listener` as `serve` wants it, from when its `first` bytes have come. Of those that `serve` knows, a newcomer
        above `limit` is closed; of all others there are STRANGERS at most."""
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, first)  # of those who dial it, too
        loop, fd = self.loops[0], listener.fileno()
        enter = partial(self._take, serve)

        def accept() -> None:
            for _ in range(ACCEPTS):
                try:
                    sock, address = listener.accept()
                except BlockingIOError:
                    return
                except OSError as error:
                    if error.errno in FULL:
                        loop.pause_accept(fd)
                    return
                if self._known() < limit:
                    self._meet(sock, str(address[0]), enter)
                else:
                    sock.close()
                if len(self._reads) >= limit + 2 * STRANGERS:  # those that had to go are still being closed
                    loop.pause_accept(fd)
                    return

        def hear() -> None:
            try:
                loop.listen(listener.fileno(), accept)
            except (OSError, ValueError):
                if listener.fileno() >= 0:  # else it was closed meanwhile
                    raise

        loop.post(hear)

    def close(self) -> None:
        """Close every stream; the threads end."""
        for loop in self.loops:
            loop.close()

    def join(self, seconds: float) -> None:
        """Wait for the threads, which end soon after `close`."""
        deadline = time.monotonic() + seconds
        for loop in self.loops:
            loop.join(max(0.0, deadline - time.monotonic()))

    def _known(self) -> int:
        """Streams whose peers have proven who they are."""
        return len(self._reads) + len(self._handshakes) - len(self._strangers)

    def _meet(self, sock: socket.socket, host: str, enter: Callable[[socket.socket, float], None]) -> None:
        """Somebody has dialled, whom nobody knows: it has a place, and who has had one for longest may have to go."""
        try:
            self._handshakes.add(sock, enter)
        except OSError:
            sock.close()
            return
        victim = self._strangers.add(sock, host)
        if isinstance(victim, NonBlockingStream):
            victim.close()
        elif victim is not None:
            self._handshakes.close(victim)

    def _take(self, serve: Serve, sock: socket.socket, since: float) -> None:
        """It has spoken: read on, in its place."""
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            stream = NonBlockingStream(sock, since)
        except OSError:
            self._strangers.drop(sock)
            sock.close()
            return
        with self._lock:
            at = min(range(len(self.loops)), key=lambda number: self._counts[number])
            self._reads[stream] = at
            self._counts[at] += 1
        self._strangers.rename(sock, stream)
        stream.known = partial(self._strangers.drop, stream)
        stream.reader, stream.writer = self.loops[at], self.loops[(at + 1) % len(self.loops)]
        stream.reader.post(partial(stream.reader.read, stream, serve(stream)))

    def _gone(self, stream: NonBlockingStream) -> None:
        self._strangers.drop(stream)
        stream.known = nothing  # it holds the stream, which would wait for the collector
        with self._lock:
            at = self._reads.pop(stream, None)
            if at is not None:
                self._counts[at] -= 1
