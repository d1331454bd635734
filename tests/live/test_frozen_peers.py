"""A peer that takes nothing holds nobody up: what is said to it waits in a queue of its own, and no lock is held meanwhile."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from psjob.rules.base import BlockState
from psjob.shard.stateframes import MORE_STATES
from psjob.wire import tcp
from psjob.wire.frame import HEADER_BYTES, Header, Kind, WireError, parse
from psjob.wire.tcp import Stream
from tests.live.live_shards import eventually
from tests.unit.desk import Desk
from tests.unit.lone_shard import LoneShard

PIECE = bytes(1 << 16)


@pytest.fixture
def pair() -> Iterator[tuple[Stream, socket.socket]]:
    """A stream, and its peer's socket, which reads when the test does."""
    listener = tcp.listen("127.0.0.1", 0)
    near = socket.create_connection(listener.getsockname())
    far = listener.accept()[0]
    for sock in (near, far):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    stream = Stream(near)
    try:
        yield stream, far
    finally:
        stream.close()
        far.close()
        listener.close()


def soon(act: Callable[[], object], seconds: float = 20.0) -> bool:
    """Whether `act` comes back; a send to a frozen peer fails after a minute."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def test_an_offer_never_waits_and_its_rest_goes_first_when_the_peer_reads_again(pair: tuple[Stream, socket.socket]) -> None:
    stream, far = pair
    frame = Header(Kind.WAITING).pack()
    offered = 0

    def offer() -> None:
        nonlocal offered
        while stream.offer(frame):
            offered += 1

    assert soon(offer), "the peer takes nothing"
    assert offered > 10
    writes = threading.Thread(target=lambda: stream.write(Header(Kind.RELEASE).pack()), daemon=True)
    writes.start()
    raw = bytearray()
    while len(raw) < (offered + 1) * HEADER_BYTES:
        raw += far.recv(1 << 16)
    writes.join(20.0)
    frames = [parse(raw[at : at + HEADER_BYTES]).kind for at in range(0, len(raw), HEADER_BYTES)]
    assert frames == [Kind.WAITING] * offered + [Kind.RELEASE]


def test_answers_to_a_frozen_coordinator_hold_nobody_up(tmp_path: Path) -> None:
    shard = LoneShard(tmp_path)
    listener = tcp.listen("127.0.0.1", 0)
    link = shard.server.control.link
    assert link is not None
    link._peer = type(link._peer)("127.0.0.1", listener.getsockname()[1], 0)
    link.start()
    link.dial(0.0)
    frozen = listener.accept()[0]
    assert eventually(lambda: link._stream is not None)
    body = {"did": "arrived", "text": "x" * (1 << 18)}
    assert soon(lambda: [link.say(body) for _ in range(200)])
    frozen.close()
    listener.close()


def test_optimizer_state_is_copied_when_it_is_sent_and_not_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path)
    clerk = desk.begun()[0]
    copies: list[BlockState] = []
    copy = BlockState.copy

    def noted(self: BlockState) -> BlockState:
        copies.append(self)
        return copy(self)

    monkeypatch.setattr(BlockState, "copy", noted)
    block = next(iter(desk.servers[0].store.cells))
    most = len(desk.servers[0].store.cells) + MORE_STATES
    for request in range(most):
        clerk.states.asked(Header(Kind.STATE, block=block, request=request))
    assert copies == [], "the worker takes nothing"
    with pytest.raises(WireError, match=f"asked for the state of {most} blocks and taken none"):
        clerk.states.asked(Header(Kind.STATE, block=block))
