"""A coordinator that starts again: what it tells before training is on, and how an old one finds its successor.

- A peer that takes nothing holds nobody up: what is said to it waits in a queue of its own, and no lock is held meanwhile.
- A worker's process that comes with an older number than one that was there: it ends, and says which number it met.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from psjob import contract
from psjob.checkpoint import claim
from psjob.process.config import CheckpointConfig
from psjob.protocol.coordinator import machine
from psjob.rules.base import BlockState
from psjob.shard.session import MORE_STATES
from psjob.shard.status_server import status
from psjob.wire import tcp
from psjob.wire.auth import ShardIdentity
from psjob.wire.frame import Header, Kind, WireError
from tests.live.live_shards import SECONDS, Shards, Worker, aside, eventually, serving, together
from tests.live.training import push_filled
from tests.support.relay import shard_answers
from tests.tensors.desk import Desk
from tests.tensors.lone_shard import LoneShard

pytestmark = pytest.mark.usefixtures("last_words")


EVERY_2 = CheckpointConfig(interval_seconds=3600.0, every_steps=2, keep=3, disabled=False, resume_from=None)


class Killed(Exception):
    """The script ends here without leaving."""


def train_and_die(shards: Shards) -> None:
    """One worker, until a checkpoint beyond step 0 is committed; then it is gone."""
    model = nn.Linear(40, 40)
    worker = Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=1.0))

    def act(worker: Worker) -> None:
        deadline = time.monotonic() + SECONDS / 2
        for step in range(10_000):
            worker.edge(step)
            if len(list(shards.folder.glob("manifest-*.json"))) > 1 or time.monotonic() > deadline:
                break
            push_filled(worker, 1.0)
        for link in worker.session.links:
            link.close()
        raise Killed

    (raised,) = together([worker], act)
    assert isinstance(raised, Killed), raised


def wait(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS / 2
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_it_tells_the_step_and_checkpoint_it_found_from_the_first_word_on(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, checkpoint=EVERY_2) as shards:
        train_and_die(shards)
    newest = sorted(shards.folder.glob("manifest-*.json"))[-1]
    with serving(tmp_path, workers=1, checkpoint=EVERY_2) as again:
        wait(lambda: "coordinator" in status(again.servers[0]), "no word of the coordinator")
        said = status(again.servers[0])["coordinator"]
    assert said["step"] == said["checkpoint"]["step"] > 0
    assert said["checkpoint"]["path"] == newest.name


def test_nobody_speaks_to_it_and_it_ends_once_a_higher_term_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CLAIM_SECONDS", 0.05)
    with serving(tmp_path, workers=1, checkpoint=EVERY_2) as shards:
        train_and_die(shards)
        assert not shards.codes
        claim.claim_term(shards.folder, 2, "shard-0-a2")
        wait(lambda: 0 in shards.codes, "the old coordinator lives on")
        assert shards.codes[0] == contract.EXIT_FENCED


def soon(act: Callable[[], object], seconds: float = 20.0) -> bool:
    """Whether `act` comes back; a send to a frozen peer fails after a minute."""
    thread = aside(act)
    thread.join(seconds)
    return not thread.is_alive()


def test_answers_to_a_frozen_coordinator_hold_nobody_up(tmp_path: Path) -> None:
    shard = LoneShard(tmp_path)
    listener = tcp.listening_socket("127.0.0.1", 0)
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


def worker(shards: object, start: int) -> Worker:
    model = torch.nn.Linear(2, 1)
    return Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=0.1), start=start)  # type: ignore[arg-type]


@pytest.mark.parametrize("shards", [1, 2])
def test_an_older_process_says_which_start_it_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    said = tmp_path / "termination-log"
    monkeypatch.setenv(contract.ENV_TERMINATION_LOG, str(said))
    with serving(tmp_path, workers=1, shards=shards) as served:
        newer = worker(served, 5)
        newer.attach()
        newer.die()
        with pytest.raises(SystemExit) as ended:
            worker(served, 2).attach()
    assert ended.value.code == contract.EXIT_FENCED
    message = json.loads(said.read_text())
    assert message["fenced"] == {"start": 5} and "a newer process of this rank is here" in message["ending"]
    assert message.keys() <= contract.ENDING_KEYS
