"""Who answers at a shard's address, and has proven nothing, writes no line of its own into a worker's log."""

from __future__ import annotations

import socket
import threading

import pytest

from psjob.process.config import Config, Place, ShardAddress
from psjob.wire import tcp
from psjob.wire.auth import GREETING_BYTES, Unproven
from psjob.wire.frame import Header, Kind, dump
from psjob.wire.handshake import greet
from psjob.wire.unauthenticated import STRANGER_LETTERS, one_line
from tests.live.live_shards import NEVER
from tests.runkeys import handed

EVIL = "no\n2026-11-26 psjob: all is well\x1b[2J\x1b]0;owned\x07\u202e\u2028\r" + "x" * 5000


def test_the_refusal_of_an_impostor_is_one_printable_line() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = int(listener.getsockname()[1])

    def answer() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(GREETING_BYTES)
            raw = dump({"code": "protocol", "error": EVIL[:3000]})
            sock.sendall(Header(Kind.ERROR).sized(raw).pack() + raw)
            sock.recv(1)

    threading.Thread(target=answer, daemon=True).start()
    config = Config("job", "run-1", "0" * 64, "sync", 5, None, 1, (ShardAddress("127.0.0.1", port, 0),), NEVER, "AllWorkers", 10.0, 60.0)
    place = Place("worker", 0, "run-1", 1, 0, 0, "worker-0", config, None, None, 0, "", handed("worker", 0, 1))
    (stream,) = tcp.connect("127.0.0.1", port, 5.0)
    try:
        with pytest.raises(Unproven) as caught:
            greet(stream, place, 0)
    finally:
        stream.close()
        listener.close()
    text = str(caught.value)
    assert text.isprintable() and text.startswith("it refuses this process: no 2026") and len(text) <= STRANGER_LETTERS + 30


def test_one_line() -> None:
    said = one_line(EVIL, 100)
    assert said.isprintable() and len(said) == 100 and said.startswith("no 2026-11-26 psjob: all is well [2J")
    assert one_line(None, 10) == "None" and one_line("a sentence: ü", 50) == "a sentence: ü"
