"""A link of so many bytes a second on this machine: a proxy between two TCP peers, with a token bucket for each direction."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

CHUNK = 32 << 10
BUFFER = 128 << 10
"""What the proxy's own sockets may hold of a direction, bytes."""


class Bucket:
    """`rate` bytes a second for all that take from it; what was not taken for a while is worth at most `burst` bytes."""

    def __init__(self, rate: float, burst: float = CHUNK) -> None:
        self.rate, self.burst = rate, burst
        self._free_at = time.perf_counter()
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Come back when `count` more bytes are through."""
        with self._lock:
            now = time.perf_counter()
            self._free_at = max(self._free_at, now - self.burst / self.rate) + count / self.rate
            wait = self._free_at - now
        if wait > 0:
            time.sleep(wait)


class SlowLink:
    """Listens on `port` of `host` and passes on to `target`: through `up` what a client sends, through `down` what it gets.

    `apart`: both ends see an address that is not their own, as if they were on two hosts.
    """

    def __init__(self, target: tuple[str, int], up: Bucket, down: Bucket, apart: bool = False) -> None:
        self._target, self._up, self._down = target, up, down
        self.host = "127.0.0.2" if apart else "127.0.0.1"
        self._from = "127.0.0.3" if apart else ""
        self._listener = socket.socket()
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            self._listener.setsockopt(socket.SOL_SOCKET, option, BUFFER)
        self._listener.bind((self.host, 0))
        self._listener.listen(64)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name=f"slow-{self.port}", daemon=True).start()

    def close(self) -> None:
        """Take no more connections; those that are open stay."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # a close alone leaves the thread in its accept
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket()
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                server.setsockopt(socket.SOL_SOCKET, option, BUFFER)
            try:
                server.bind((self._from, 0))
                server.connect(self._target)
            except OSError:
                client.close()
                server.close()
                continue
            for source, sink, bucket in ((client, server, self._up), (server, client, self._down)):
                sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=_pass_on, args=(source, sink, bucket), daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket, bucket: Bucket) -> None:
    """Until either end closes; then both are closed."""
    chunk = memoryview(bytearray(CHUNK))
    with contextlib.suppress(OSError):
        while count := source.recv_into(chunk):
            bucket.take(count)
            sink.sendall(chunk[:count])
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
