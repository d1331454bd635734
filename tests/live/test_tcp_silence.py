"""A transfer fails when no byte moves for its silence time, and never because it is large or the link slow."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from psjob.wire import reading, tcp
from psjob.wire.frame import Header, Kind
from psjob.wire.tcp import Stream, StreamClosed

SILENCE = 1.0
SMALL_BUFFER = 16 << 10


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Stream, Stream]]:
    """Two ends of a connection whose kernel buffers are small, so that a slow reader is felt by the writer."""
    for module in (tcp, reading):
        monkeypatch.setattr(module, "SILENCE_SECONDS", SILENCE)
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        server.bind(("127.0.0.1", 0))
        server.listen()
        dialled = socket.socket()
        dialled.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
        dialled.connect(server.getsockname())
        one, other = Stream(dialled), Stream(server.accept()[0])
    yield one, other
    one.close()
    other.close()


def test_a_slow_writer_is_read_to_the_end(ends: tuple[Stream, Stream]) -> None:
    one, other = ends
    payload = bytes(range(256)) * 40
    raw = Header(Kind.PARAM).sized(payload, True).pack() + payload

    def trickle() -> None:
        for at in range(0, len(raw), 1024):
            one.sock.sendall(raw[at : at + 1024])
            time.sleep(SILENCE / 4)

    writer = threading.Thread(target=trickle)
    began = time.monotonic()
    writer.start()
    target = bytearray(len(payload))
    other.recv_into(other.recv_header(5.0), memoryview(target))
    writer.join()
    assert time.monotonic() - began > 2 * SILENCE
    assert target == payload


def test_a_slow_reader_takes_all_that_is_sent(ends: tuple[Stream, Stream]) -> None:
    one, other = ends
    payload = bytes(range(256)) * 2048
    taken = bytearray()

    def sip() -> None:
        while part := other.sock.recv(16 << 10):
            taken.extend(part)
            time.sleep(SILENCE / 10)

    reader = threading.Thread(target=sip)
    reader.start()
    began = time.monotonic()
    one.send(Header(Kind.PUSH), payload)
    assert time.monotonic() - began > SILENCE
    one.close()
    reader.join()
    assert taken[-len(payload) :] == payload


def test_a_writer_that_stops_within_a_payload_is_given_up(ends: tuple[Stream, Stream]) -> None:
    one, other = ends
    one.sock.sendall(Header(Kind.PARAM).sized(bytes(100), False).pack() + bytes(60))
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="60 of 100 bytes"):
        other.recv_into(other.recv_header(5.0), memoryview(bytearray(100)))
    assert time.monotonic() - began >= SILENCE


def test_a_reader_that_stops_is_given_up(ends: tuple[Stream, Stream]) -> None:
    one, _ = ends
    began = time.monotonic()
    with pytest.raises(StreamClosed, match="took no byte"):
        one.send(Header(Kind.PUSH), bytes(1 << 20))
    assert time.monotonic() - began >= SILENCE
    assert one.closed
