"""A stranger at a status port: what it says is bounded in bytes and in time, and those who may ask are answered meanwhile."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

import pytest

from bench.peers.light_clients import status
from psjob import contract
from psjob.process.asking import ask
from psjob.shard.status_server import CONNECTIONS, REQUEST_BYTES
from tests.live.live_shards import eventually
from tests.live.shard_processes import Processes, processes
from tests.runkeys import RUN

LINES = 20
MEMORY_KIB = 16 << 10


def started(run: Processes) -> int:
    """The status port of a shard that answers."""
    assert eventually(lambda: run.get(0, contract.STARTED_PATH)[0] == 200, 60)
    return int(run.config["shards"][0]["statusPort"])


def heard(port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    """All that comes back until the end."""
    raw = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock, contextlib.suppress(ConnectionError):
        for part in parts:
            sock.sendall(part)
            time.sleep(pause)
        while part := sock.recv(4096):
            raw += part
    return raw


def trickled(port: int, words: bytes, pause: float) -> int:
    """How many bytes were sent, one by one, before the other side hung up without a word."""
    with socket.create_connection(("127.0.0.1", port), timeout=pause) as sock, contextlib.suppress(ConnectionError):
        for sent, byte in enumerate(words):
            sock.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                assert sock.recv(1) == b""
                return sent
    return sent


def test_long_requests_cost_little_memory(tmp_path: Path) -> None:
    line = b"X-A: " + b"a" * 65000 + b"\r\n"
    with processes(tmp_path, forked=True, shards=1) as run, contextlib.ExitStack() as held:
        shard = run.start(0)
        port = started(run)
        (before,) = status(shard.pid, ("VmRSS",))
        socks = [held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)) for _ in range(CONNECTIONS)]
        for part in (b"GET /healthz HTTP/1.1\r\n", *[line] * LINES):
            for sock in socks:
                with contextlib.suppress(OSError):  # hung up on
                    sock.sendall(part)
        time.sleep(0.3)
        assert status(shard.pid, ("VmRSS",))[0] - before <= MEMORY_KIB
        assert ask("127.0.0.1", port, RUN["questions"])["run"] == "run-1"


@pytest.mark.parametrize("first", [b"", b"GET /healthz HTTP/1.1\r\n"])
def test_a_request_of_too_many_bytes_is_refused(tmp_path: Path, first: bytes) -> None:
    with processes(tmp_path, forked=True, shards=1) as run:
        run.start(0)
        port = started(run)
        head = b"GET /healthz HTTP/1.1\r\nX-A: "
        most = head + b"a" * (REQUEST_BYTES - len(head) - 4) + b"\r\n\r\n"
        assert heard(port, most).startswith(b"HTTP/1.1 200")
        assert heard(port, (first + b"X-A: ").ljust(REQUEST_BYTES, b"a")).split()[1] == b"431"
        assert b"alive" not in heard(port, most[:-4] + b"a\r\n\r\n")


def test_a_slow_request_is_hung_up_on(tmp_path: Path) -> None:
    """Each byte comes in time, and all of them do not. Requests that are whole may follow each other for longer."""
    with processes(tmp_path, forked=True, shards=1) as run:
        run.start(0)
        port = started(run)
        assert trickled(port, b"GET /healthz HTTP/1.1\r\nX-A: ".ljust(100, b"a"), pause=0.2) < 100
        question = f"GET {contract.CHALLENGE_PATH} HTTP/1.1\r\n\r\n".encode()
        raw = heard(port, *[question] * 4, f"GET {contract.HEALTH_PATH} HTTP/1.1\r\n\r\n".encode(), pause=0.8)
        assert raw.count(b"HTTP/1.1 200") == 5
