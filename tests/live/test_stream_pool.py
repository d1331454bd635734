"""The pool of threads for streams: what is wanted is filled, what is queued goes out in order, and no stream waits for another.

- Payloads over real sockets: into one place or many, whole or in crumbs.
- A transfer fails when no byte moves for its silence time, and never because it is large or the link slow.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from psjob.process import supervise
from psjob.wire import event_loop, reading, tcp, unauthenticated
from psjob.wire.event_loop import EventLoop, NonBlockingStream, Sending
from psjob.wire.frame import Header, Kind, WireError
from psjob.wire.reading import AHEAD, WINDOW, Pause, ReadRequest, Wants
from psjob.wire.stream_pool import STRANGERS, StreamPool
from psjob.wire.tcp import Stream, StreamClosed
from tests.live.live_shards import SECONDS, eventually

Serve = Callable[[NonBlockingStream], Wants[Any]]
LARGE = 8 << 20


@pytest.fixture(params=["epoll", "poll"])
def dial(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stream]]:
    """Dials a pool of two threads that serves streams as it is told; also as on a system without epoll and eventfd."""
    if request.param == "poll":
        monkeypatch.delattr(select, "epoll")
        monkeypatch.delattr(os, "eventfd")
    pool = StreamPool("test", 2)
    listeners: list[socket.socket] = []
    dialled: list[Stream] = []

    def connect(serve: Serve | None = None, limit: int = 100, first: int = 1) -> Stream:
        if serve is not None:
            listeners.append(tcp.listening_socket("127.0.0.1", 0))
            pool.accept(listeners[-1], serve, limit, first)
        dialled.append(Stream(socket.create_connection(listeners[-1].getsockname(), timeout=20.0)))
        return dialled[-1]

    yield connect
    for stream in dialled:
        stream.close()
    pool.close()
    for listener in listeners:
        listener.close()
    pool.join(SECONDS)


def echo(stream: NonBlockingStream) -> Wants[None]:
    """Give back every payload."""
    while True:
        header = yield from stream.next_header(None)
        body = bytearray(header.length)
        yield from stream.payload(header, [memoryview(body)])
        stream.put_frame(header, bytes(body))


def known_echo(stream: NonBlockingStream) -> Wants[None]:
    """The same of a peer that has proven who it is."""
    stream.known()
    yield from echo(stream)


def test_every_payload_comes_back_whole_and_in_order(dial: Callable[..., Stream]) -> None:
    streams = [dial(echo), *(dial() for _ in range(9))]
    sizes = [0, 1, 5000, 300_000, 0, 70_000, 3]

    def talk(stream: Stream) -> None:
        for number, size in enumerate(sizes):
            stream.send(Header(Kind.PUSH, block=number), bytes([number]) * size)

    senders = [threading.Thread(target=talk, args=(stream,)) for stream in streams]
    for sender in senders:
        sender.start()
    for stream in streams:
        for number, size in enumerate(sizes):
            header = stream.recv_header(20.0)
            assert header.block == number and stream.recv_body(header) == bytes([number]) * size
    for sender in senders:
        sender.join()


def test_a_peer_that_stops_within_a_frame_or_reads_nothing_holds_nobody_up(dial: Callable[..., Stream]) -> None:
    half, deaf = dial(echo), dial()
    half.sock.sendall(Header(Kind.PUSH, length=100).pack() + bytes(60))
    deaf.send(Header(Kind.PUSH), bytes(LARGE))
    for _ in range(4):
        other = dial()
        other.send(Header(Kind.PUSH), b"x" * 1000)
        assert other.recv_body(other.recv_header(20.0)) == b"x" * 1000
    half.sock.sendall(bytes(40))
    assert half.recv_body(half.recv_header(20.0)) == bytes(100)
    header = deaf.recv_header(20.0)
    assert deaf.recv_body(header, LARGE) == bytes(LARGE)


def test_a_silent_peer_is_given_up(dial: Callable[..., Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reading, event_loop):
        monkeypatch.setattr(module, "SILENCE_SECONDS", 1.0)
    why: list[BaseException] = []
    streams: list[NonBlockingStream] = []

    def serve(stream: NonBlockingStream) -> Wants[None]:
        streams.append(stream)
        try:
            yield from echo(stream)
        except (TimeoutError, StreamClosed) as error:
            why.append(error)

    half = dial(serve)
    half.sock.sendall(Header(Kind.PUSH, length=100).pack() + bytes(60))
    assert eventually(lambda: [type(error) for error in why] == [TimeoutError]) and "60 of 100 bytes" in str(why[0])
    deaf = dial()
    deaf.send(Header(Kind.PUSH), bytes(LARGE))
    assert eventually(lambda: len(why) == 2 and isinstance(why[1], StreamClosed)), "it takes nothing of its answer"
    assert eventually(lambda: all(stream.sock.fileno() < 0 for stream in streams)), "descriptors are given back"


def test_what_was_queued_goes_out_before_the_end(dial: Callable[..., Stream]) -> None:
    def serve(stream: NonBlockingStream) -> Wants[None]:
        yield from stream.next_header(None)
        for number in range(200):
            stream.put_frame(Header(Kind.PARAM, block=number), bytes(50_000))

    stream = dial(serve)
    stream.send(Header(Kind.PULL))
    for number in range(200):
        header = stream.recv_header(20.0)
        assert header.block == number and len(stream.recv_body(header)) == 50_000
    with pytest.raises(StreamClosed):
        stream.recv_header(20.0)


def test_a_paused_stream_is_not_read_until_it_is_woken(dial: Callable[..., Stream]) -> None:
    paused: list[NonBlockingStream] = []
    goes_on = threading.Event()

    def serve(stream: NonBlockingStream) -> Wants[None]:
        header = yield from stream.next_header(None)
        paused.append(stream)
        while not goes_on.is_set():
            yield Pause()
        stream.put_frame(header)
        yield from echo(stream)

    stream = dial(serve)
    stream.write(Header(Kind.PUSH, block=1).pack() + Header(Kind.PUSH, block=2).pack())
    assert eventually(lambda: bool(paused), 20.0)
    paused[0].wake()
    goes_on.set()
    paused[0].wake()
    assert [stream.recv_header(20.0).block for _ in range(2)] == [1, 2]
    paused[0].close()
    with pytest.raises(StreamClosed):
        stream.recv_header(20.0)
    assert eventually(lambda: paused[0].sock.fileno() < 0, 20.0)


def test_any_thread_may_put_and_a_turn_is_made_as_late_as_it_can_be(dial: Callable[..., Stream]) -> None:
    streams: list[NonBlockingStream] = []
    value = 0

    def serve(stream: NonBlockingStream) -> Wants[None]:
        streams.append(stream)
        yield from echo(stream)

    stream = dial(serve)
    stream.send(Header(Kind.PUSH))
    assert stream.recv_header(20.0).kind is Kind.PUSH
    streams[0].put_frame(Header(Kind.PARAM), bytes(LARGE))  # more than the system takes
    streams[0].put(lambda: Sending(streams[0].framed(Header(Kind.PARAM, block=value))))
    value = 7
    assert stream.recv_body(stream.recv_header(20.0), LARGE) == bytes(LARGE)
    assert stream.recv_header(20.0).block == 7


def test_no_more_is_read_of_a_peer_that_reads_nothing_until_it_does(dial: Callable[..., Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "BEHIND", 16)
    waited: list[int] = []

    def serve(stream: NonBlockingStream) -> Wants[None]:
        while True:
            if stream.full:
                yield from stream.emptied()
            header = yield from stream.next_header(None)
            stream.put_frame(header, bytes(50_000))
            waited.append(len(stream._queue))

    stream = dial(serve)
    sender = threading.Thread(target=lambda: [stream.send(Header(Kind.PULL, block=number)) for number in range(2000)], daemon=True)
    sender.start()
    held = -1

    def stands() -> bool:
        """It has not been read of for a while."""
        nonlocal held
        before, held = held, len(waited)
        time.sleep(0.2)
        return 16 <= before == held == len(waited)

    assert eventually(stands) and held < 2000
    for number in range(2000):
        header = stream.recv_header(20.0)
        assert header.block == number and len(stream.recv_body(header)) == 50_000
    sender.join(20.0)
    assert max(waited) <= 16 and not sender.is_alive()


def test_a_newcomer_above_the_limit_is_closed(dial: Callable[..., Stream]) -> None:
    first = dial(known_echo, 1)
    first.send(Header(Kind.PUSH), b"a")
    assert first.recv_body(first.recv_header(20.0)) == b"a"
    second = dial()
    with pytest.raises(StreamClosed):
        second.recv_header(20.0)
    first.close()
    assert eventually(lambda: answered(dial()), 20.0), "its place is free again"


def test_a_listener_that_is_closed_before_its_turn_breaks_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool's thread is busy meanwhile; then it serves the next listener."""
    broken: list[str] = []
    monkeypatch.setattr(supervise, "_end", broken.append)
    pool, free = StreamPool("test", 1), threading.Event()
    pool.loops[0].post(lambda: free.wait(20.0))
    with contextlib.closing(tcp.listening_socket("127.0.0.1", 0)) as gone:
        pool.accept(gone, echo, 8)
    with contextlib.closing(tcp.listening_socket("127.0.0.1", 0)) as listener:
        pool.accept(listener, echo, 8)
        free.set()
        with contextlib.closing(Stream(socket.create_connection(listener.getsockname(), timeout=20.0))) as stream:
            stream.send(Header(Kind.PUSH), b"a")
            assert stream.recv_body(stream.recv_header(20.0)) == b"a"
        pool.close()
    pool.join(SECONDS)
    assert not broken


def test_nothing_is_made_of_a_stream_before_its_first_words_have_come(dial: Callable[..., Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unauthenticated, "STRANGER_SECONDS", 2.0)
    served: list[float] = []

    def serve(stream: NonBlockingStream) -> Wants[None]:
        served.append(time.monotonic() - stream.since)
        yield from known_echo(stream)

    words = Header(Kind.PUSH).pack()
    silent, gone, slow = dial(serve, first=len(words)), dial(), dial()
    gone.close()
    for half in (words[:-40], words[-40:]):
        assert not served
        slow.write(half)
        time.sleep(0.3)
    assert slow.recv_header(20.0).kind is Kind.PUSH and len(served) == 1
    assert served[0] >= 0.1, "its time has run since it dialled"
    with pytest.raises(StreamClosed):
        silent.recv_header(20.0)
    last = dial()
    last.write(words[:-1])
    with pytest.raises(StreamClosed):
        last.recv_header(20.0)
    assert len(served) == 1, "all that it said were less words than it must say"


def test_the_oldest_that_has_not_spoken_has_to_go(dial: Callable[..., Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unauthenticated, "STRANGER_SECONDS", 60.0)
    words = Header(Kind.PUSH).pack()
    first = dial(echo, first=len(words))
    speaks = dial()
    speaks.write(words)
    assert speaks.recv_header(20.0).kind is Kind.PUSH
    silent = [dial() for _ in range(STRANGERS - 2)]
    last = dial()
    with pytest.raises(StreamClosed):
        first.recv_header(20.0)
    for stream in (silent[0], silent[-1], last, speaks):
        stream.write(words)
        assert stream.recv_header(20.0).kind is Kind.PUSH


def answered(stream: Stream) -> bool:
    try:
        stream.send(Header(Kind.PUSH), b"b")
        return stream.recv_body(stream.recv_header(20.0)) == b"b"
    except StreamClosed:
        return False


def test_who_hangs_up_between_a_poll_and_the_look_at_deadlines_ends_its_stream_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialler = socket.create_connection(listener.getsockname())
        sock, _ = listener.accept()
    gone: list[NonBlockingStream] = []
    loop = EventLoop("test", gone.append)
    stream = NonBlockingStream(sock)
    stream.reader = stream.writer = loop

    def wants() -> Wants[None]:
        yield ReadRequest(stream, [memoryview(bytearray(96))], None, 0.0)

    loop.read(stream, wants())
    dialler.close()
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    assert eventually(lambda: bool(poll.poll(0)))
    loop._look(time.monotonic())
    loop._work()
    assert gone == [stream]


def test_what_another_thread_leaves_over_is_not_pumped_over() -> None:
    """The other thread comes between this one's look whether something is left over and its taking the lock."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reader = socket.create_connection(listener.getsockname())
        sock, _ = listener.accept()
    stream = NonBlockingStream(sock)
    done: list[str] = []
    first, second = b"A" * (64 << 20), b"B" * 1000
    stream._queue.append(lambda: Sending([first], lambda: done.append("A")))
    lock = stream._send_lock

    class Late:
        """The lock, taken for the first time when another thread has pumped meanwhile."""

        def acquire(self, blocking: bool = True) -> bool:
            stream._send_lock = lock
            with lock:
                stream._pump()
            assert not done, "the kernel took 64 MiB at once"
            stream._queue.append(lambda: Sending([second], lambda: done.append("B")))
            return lock.acquire(blocking)

        def release(self) -> None:
            lock.release()

    stream._send_lock = Late()  # type: ignore[assignment]
    stream.pump()
    assert done == [], "the first is still under way"
    came = bytearray()
    reader.setblocking(False)
    deadline = time.monotonic() + 20
    while len(came) < len(first) + len(second) and time.monotonic() < deadline:
        stream.resume()
        with contextlib.suppress(BlockingIOError):
            came += reader.recv(1 << 20)
    assert bytes(came) == first + second and done == ["A", "B"]
    stream.release()
    reader.close()


def test_a_stream_that_has_ended_leaves_nothing_for_the_collector(dial: Callable[..., Stream]) -> None:
    """A shard has it run seldom, and of a stranger who begins TLS there are 45 KiB."""
    seen: list[weakref.ref[NonBlockingStream]] = []

    def serve(stream: NonBlockingStream) -> Wants[None]:
        seen.append(weakref.ref(stream))
        with contextlib.suppress(StreamClosed, TimeoutError):
            yield from stream.next_header(1.0)

    gc.disable()
    try:
        stream = dial(serve)
        stream.sock.sendall(b"a part of a header")
        assert eventually(lambda: bool(seen))
        stream.close()
        assert eventually(lambda: seen[0]() is None)
    finally:
        gc.enable()


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


def test_large_bytes_that_come_slower_than_a_thread_is_woken_for_are_no_silence(dial: Callable[..., Stream]) -> None:
    place, filled = bytearray(event_loop.LARGE + 40_000), threading.Event()

    def serve(stream: NonBlockingStream) -> Wants[None]:
        yield ReadRequest(stream, [memoryview(place)], 4 * event_loop.LOOK_SECONDS)
        filled.set()

    stream, payload = dial(serve), random.Random(5).randbytes(len(place))
    for begin in range(0, len(payload), 10_000):
        stream.sock.sendall(payload[begin : begin + 10_000])
        time.sleep(event_loop.LOOK_SECONDS)
    assert filled.wait(SECONDS)
    assert place == payload


def test_a_loop_that_waits_is_handed_a_few_things_and_one_with_other_work_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with ours, theirs:
        stream, loop = NonBlockingStream(ours), EventLoop("test", lambda _stream: None)
        stream.writer = loop
        assert not stream.hand_over(list), "it has not begun"
        loop.start()
        assert eventually(lambda: loop.waits)
        goes, done = threading.Event(), list[tuple[int, threading.Thread]]()

        def note(number: int) -> None:
            goes.wait(SECONDS)
            done.append((number, threading.current_thread()))

        for number in range(event_loop.MOST_HANDED):
            assert stream.hand_over(partial(note, number))
        assert not stream.hand_over(list), "it has enough to do"
        goes.set()
        assert eventually(lambda: loop.waits and not loop.handed)
        assert [number for number, _ in done] == list(range(event_loop.MOST_HANDED))
        assert threading.current_thread() not in {thread for _, thread in done}
        goes.clear()
        loop.post(lambda: goes.wait(SECONDS))
        assert eventually(lambda: not loop.waits)
        assert not stream.hand_over(list), "it does something else"
        goes.set()
        loop.close()
        loop.join(SECONDS)
