"""A peer that takes nothing holds nobody up: what is said to it waits in a queue of its own, and no lock is held meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from psjob.rules.base import BlockState
from psjob.shard.session import MORE_STATES
from psjob.wire import tcp
from psjob.wire.auth import ShardIdentity
from psjob.wire.frame import Header, Kind, WireError
from tests.live.live_shards import eventually
from tests.relay import shard_answers
from tests.tensors.desk import Desk
from tests.tensors.lone_shard import LoneShard


def soon(act: Callable[[], object], seconds: float = 20.0) -> bool:
    """Whether `act` comes back; a send to a frozen peer fails after a minute."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def test_answers_to_a_frozen_coordinator_hold_nobody_up(tmp_path: Path) -> None:
    shard = LoneShard(tmp_path)
    listener = tcp.listen("127.0.0.1", 0)
    link = shard.server.control.link
    assert link is not None
    link._peer = type(link._peer)("127.0.0.1", listener.getsockname()[1], 0)
    link.start()
    link.dial(0.0)
    frozen = listener.accept()[0]
    shard_answers(frozen, ShardIdentity(0, 1, 1))
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
