"""The streams that dial a process, spread over a pool of threads: as many as it has cores, however many streams there are."""

from __future__ import annotations

import errno
import os
import socket
import threading
from functools import partial

from psjob.wire.loop import Loop, Serve
from psjob.wire.pooled import Pooled, nothing
from psjob.wire.strangers import Strangers

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
        number = max(LEAST, threads or min(MOST, _cores()))
        self.loops = [Loop(f"{name}-streams-{at}", self._gone) for at in range(number)]
        self._lock = threading.Lock()
        self._reads: dict[Pooled, int] = {}
        """By stream, which loop reads it."""
        self._counts = [0] * number
        self._strangers: Strangers[Pooled] = Strangers(STRANGERS)
        for loop in self.loops:
            loop.start()

    def accept(self, listener: socket.socket, serve: Serve, limit: int) -> None:
        """Read what dials `listener` as `serve` wants it. Of those that `serve` knows, a newcomer above `limit` is closed; of all others
        there are STRANGERS at most."""
        listener.setblocking(False)
        loop, fd = self.loops[0], listener.fileno()

        def accept() -> None:
            for _ in range(ACCEPTS):
                try:
                    sock, _address = listener.accept()
                except BlockingIOError:
                    return
                except OSError as error:
                    if error.errno in FULL:
                        loop.deaf(fd)
                    return
                self._take(sock, serve, limit)
                if len(self._reads) >= limit + 2 * STRANGERS:  # those that had to go are still being closed
                    loop.deaf(fd)
                    return

        loop.post(partial(loop.listen, fd, accept))

    def close(self) -> None:
        """Close every stream; the threads end."""
        for loop in self.loops:
            loop.close()

    def _take(self, sock: socket.socket, serve: Serve, limit: int) -> None:
        with self._lock:
            if len(self._reads) - len(self._strangers) >= limit:
                sock.close()
                return
            at = min(range(len(self.loops)), key=lambda number: self._counts[number])
            try:
                stream = Pooled(sock)
            except OSError:
                sock.close()
                return
            self._reads[stream] = at
            self._counts[at] += 1
        stream.known = partial(self._strangers.drop, stream)
        victim = self._strangers.add(stream, stream.peer.rpartition(":")[0])
        if victim is not None:
            victim.close()
        stream.reader, stream.writer = self.loops[at], self.loops[(at + 1) % len(self.loops)]
        stream.reader.post(partial(stream.reader.read, stream, serve(stream)))

    def _gone(self, stream: Pooled) -> None:
        self._strangers.drop(stream)
        stream.known = nothing  # it holds the stream, which would wait for the collector
        with self._lock:
            at = self._reads.pop(stream, None)
            if at is not None:
                self._counts[at] -= 1


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
