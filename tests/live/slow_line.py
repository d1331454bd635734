"""A line between real sockets that lets so many bytes a second through, and that can break."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import replace

from psjob.process.config import Place
from tests.live.live_shards import Shards

BUFFER = 16 << 10
CHUNK = 2 << 10


class SlowLine:
    """Listens on `port` and carries every connection to `target`, at `rate` bytes a second each way, all connections together."""

    def __init__(self, target: tuple[str, int], rate: float) -> None:
        self.rate = rate
        self.carried = {"up": 0, "down": 0}
        self.connections = 0
        self._target = target
        self._free = {"up": 0.0, "down": 0.0}
        self._lock = threading.Lock()
        self._socks: list[socket.socket] = []
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.port = int(self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """Break every connection; new ones are carried."""
        with self._lock:
            socks, self._socks = self._socks, []
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End, with every thread."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(30)

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            far = socket.socket()
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
            for sock in (near, far):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                far.connect(self._target)
            except OSError:
                near.close()
                continue
            with self._lock:
                self.connections += 1
                self._socks += [near, far]
            for ends in ((near, far, "up"), (far, near, "down")):
                thread = threading.Thread(target=self._carry, args=ends, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _carry(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                with self._lock:
                    begin = max(self._free[way], time.monotonic())
                    self._free[way] = begin + len(data) / self.rate
                    self.carried[way] += len(data)
                time.sleep(max(0.0, self._free[way] - time.monotonic()))
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class Behind:
    """The shards, as a worker on the other end of a slow line finds them."""

    def __init__(self, shards: Shards, line: SlowLine) -> None:
        self._shards, self._line, self.guests = shards, line, shards.guests

    def place(self, rank: int, start: int = 1) -> Place:
        """As `Shards.place`."""
        place = self._shards.place(rank, start)
        shard = replace(place.config.shards[0], port=self._line.port)
        return replace(place, config=replace(place.config, shards=(shard,)))
