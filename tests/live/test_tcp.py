"""Payloads over real sockets: into one place or many, whole or in crumbs.

- A transfer fails when no byte moves for its silence time, and never because it is large or the link slow.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from psjob.wire import reading, tcp
from psjob.wire.frame import Header, Kind, WireError
from psjob.wire.reading import AHEAD, WINDOW
from psjob.wire.tcp import Stream, StreamClosed


@pytest.fixture
def ends() -> Iterator[tuple[Stream, Stream]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = Stream(socket.create_connection(server.getsockname()))
        other = Stream(server.accept()[0])
    yield one, other
    one.close()
    other.close()


def test_a_port_that_a_process_on_its_way_out_still_holds_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            tcp.listening_socket("127.0.0.1", port)
        threading.Timer(0.2, held.close).start()
        tcp.listening_socket("127.0.0.1", port, patience=10.0).close()


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("sizes", [[0], [70000], [1, 2, 3, 0, 5], [7] * (3 * WINDOW + 1), [1] * 40 + [300_000] + [11] * WINDOW])
def test_a_payload_lands_in_its_places(ends: tuple[Stream, Stream], sizes: list[int], sums: bool) -> None:
    one, other = ends
    one.sums = sums
    payload = random.Random(1).randbytes(sum(sizes))
    threading.Thread(target=one.send, args=(Header(Kind.PARAM), payload), daemon=True).start()
    header = other.recv_header(5.0)
    parts = [memoryview(bytearray(size)) for size in sizes]
    other.recv_parts(header, parts)
    assert b"".join(parts) == payload


def test_frames_that_come_together_are_read_one_by_one(ends: tuple[Stream, Stream]) -> None:
    one, other = ends
    sizes = [0, 5, 0, 0, 3 * AHEAD, 1, *[0] * 100]
    frames = [Header(Kind.PARAM, block=number).sized(bytes([number] * size)) for number, size in enumerate(sizes)]
    one.write(b"".join(frame.pack() + bytes([number] * frame.length) for number, frame in enumerate(frames)))
    ahead = 0
    for number, frame in enumerate(frames):
        header = other.recv_header(5.0)
        assert header == frame and other.recv_body(header) == bytes([number] * frame.length)
        ahead += other.ahead()
    assert ahead > 90 and not other.ahead()


@pytest.mark.parametrize("what", ["nothing", "a frame", "the end"])
def test_a_frame_that_rides_arrives_whatever_follows(ends: tuple[Stream, Stream], what: str) -> None:
    """The kernel holds it back for a moment at most, and sends it when the stream is closed."""
    one, other = ends
    one.send(Header(Kind.RECORD, clock=1), b"first", rides=True)
    if what == "a frame":
        one.send(Header(Kind.RECORD, clock=2), b"second")
    elif what == "the end":
        one.close()
    header = other.recv_header(5.0)
    assert (header.clock, bytes(other.recv_body(header))) == (1, b"first")
    if what == "a frame":
        header = other.recv_header(5.0)
        assert (header.clock, bytes(other.recv_body(header))) == (2, b"second")


def test_a_payload_in_crumbs_lands_too(ends: tuple[Stream, Stream]) -> None:
    one, other = ends
    chance = random.Random(2)
    payload = chance.randbytes(5000)
    raw = Header(Kind.PARAM).sized(payload, True).pack() + payload

    def crumbs() -> None:
        at = 0
        while at < len(raw):
            step = chance.randint(1, 400)
            one.sock.sendall(raw[at : at + step])
            at += step
            time.sleep(0.0005)

    threading.Thread(target=crumbs, daemon=True).start()
    parts = [memoryview(bytearray(50)) for _ in range(100)]
    other.recv_parts(other.recv_header(5.0), parts)
    assert b"".join(parts) == payload


def test_a_damaged_or_wrong_payload_is_refused(ends: tuple[Stream, Stream]) -> None:
    one, other = ends
    raw = bytearray(Header(Kind.PARAM, block=3).sized(b"abcdef", True).pack() + b"abcdeX")
    one.sock.sendall(raw)
    header = other.recv_header(5.0)
    with pytest.raises(WireError, match="block 3 has 6 bytes, expected 7"):
        other.recv_parts(header, [memoryview(bytearray(3)), memoryview(bytearray(4))])
    with pytest.raises(WireError, match="block 3 is damaged"):
        other.recv_parts(header, [memoryview(bytearray(2)), memoryview(bytearray(4))])


def test_a_stream_that_ends_within_a_payload_is_closed(ends: tuple[Stream, Stream]) -> None:
    one, other = ends
    one.sock.sendall(Header(Kind.PARAM).sized(bytes(100), False).pack() + bytes(60))
    one.close()
    with pytest.raises(StreamClosed, match="closed by the peer after 60 of 100 bytes"):
        other.recv_parts(other.recv_header(5.0), [memoryview(bytearray(50)), memoryview(bytearray(50))])


SILENCE = 1.0
SMALL_BUFFER = 16 << 10


@pytest.fixture
def ends_silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Stream, Stream]]:
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


def test_a_slow_writer_is_read_to_the_end(ends_silence: tuple[Stream, Stream]) -> None:
    one, other = ends_silence
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


def test_a_slow_reader_takes_all_that_is_sent(ends_silence: tuple[Stream, Stream]) -> None:
    one, other = ends_silence
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


def test_a_writer_that_stops_within_a_payload_is_given_up(ends_silence: tuple[Stream, Stream]) -> None:
    one, other = ends_silence
    one.sock.sendall(Header(Kind.PARAM).sized(bytes(100), False).pack() + bytes(60))
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="60 of 100 bytes"):
        other.recv_into(other.recv_header(5.0), memoryview(bytearray(100)))
    assert time.monotonic() - began >= SILENCE


def test_a_reader_that_stops_is_given_up(ends_silence: tuple[Stream, Stream]) -> None:
    one, _ = ends_silence
    began = time.monotonic()
    with pytest.raises(StreamClosed, match="took no byte"):
        one.send(Header(Kind.PUSH), bytes(1 << 20))
    assert time.monotonic() - began >= SILENCE
    assert one.closed
