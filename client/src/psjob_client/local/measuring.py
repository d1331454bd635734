"""One of the processes that `psjob plan-topology --probe` measures between: sends to another one when it is told to.

Commands are JSON lines on standard input, each is answered by one on standard output; the process ends with its input. A peer's connection
begins with PING, whose bytes come back one by one, or SEND, whose bytes are counted and told when they end.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import struct
import sys
import threading
import time
from typing import Any

ADDRESS = "127.0.0.1"
PING, SEND = b"p", b"s"
CHUNK = 1 << 20
PATIENCE = 5.0
"""Seconds without a byte before a connection is given up."""
COUNT = struct.Struct("<Q")


def main() -> None:
    """Listen, tell the port, and do what standard input says until it ends."""
    listener = socket.create_server((ADDRESS, 0), backlog=64)
    threading.Thread(target=_serve, args=(listener,), daemon=True).start()
    _tell({"port": listener.getsockname()[1]})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            _tell(ping(command["port"], command["count"]) if command["do"] == "ping" else send(command["port"], command["seconds"]))
        except OSError as error:
            _tell({"error": str(error)})


def _tell(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def ping(port: int, count: int) -> dict[str, float]:
    """Seconds that one byte takes one way: half of the median round trip."""
    with _connected(port, PING) as peer:
        found = []
        for _ in range(count):
            begun = time.perf_counter()
            peer.sendall(b".")
            if not peer.recv(1):
                raise ConnectionResetError("the peer closed the connection")
            found.append(time.perf_counter() - begun)
    return {"seconds": statistics.median(found) / 2}


def send(port: int, seconds: float) -> dict[str, float]:
    """Bytes a second of as many as go out in `seconds`, until the peer has told that they are there."""
    chunk, sent = memoryview(bytearray(CHUNK)), 0
    with _connected(port, SEND) as peer:
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds:
            peer.sendall(chunk)
            sent += CHUNK
        peer.shutdown(socket.SHUT_WR)
        told = peer.recv(COUNT.size, socket.MSG_WAITALL)
        taken = time.perf_counter() - begun
    if len(told) < COUNT.size or COUNT.unpack(told)[0] != sent:
        raise ConnectionResetError("the peer did not get all bytes")
    return {"rate": sent / taken}


def _connected(port: int, kind: bytes) -> socket.socket:
    peer = socket.create_connection((ADDRESS, port), timeout=PATIENCE)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.sendall(kind)
    return peer


def _serve(listener: socket.socket) -> None:
    while True:
        peer, _ = listener.accept()
        threading.Thread(target=_answer, args=(peer,), daemon=True).start()


def _answer(peer: socket.socket) -> None:
    with peer, contextlib.suppress(OSError):
        peer.settimeout(PATIENCE)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        kind = peer.recv(1)
        if kind == PING:
            while byte := peer.recv(1):
                peer.sendall(byte)
        elif kind == SEND:
            chunk, count = bytearray(CHUNK), 0
            while got := peer.recv_into(chunk):
                count += got
            peer.sendall(COUNT.pack(count))


if __name__ == "__main__":
    main()
