"""A coordinator that starts again: what it tells before training is on, and how an old one finds its successor."""

from __future__ import annotations

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
from psjob.shard.status_server import status
from tests.live.live_shards import SECONDS, Shards, Worker, serving, together

EVERY_2 = CheckpointConfig(interval_seconds=3600.0, every_steps=2, keep=3, disabled=False, resume_from=None)


pytestmark = pytest.mark.usefixtures("last_words")


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
            for p in worker.model.parameters():
                p.grad = torch.ones_like(p)
            worker.optimizer.step()
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


def test_nobody_speaks_to_it_and_it_ends_once_a_higher_view_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CLAIM_SECONDS", 0.05)
    with serving(tmp_path, workers=1, checkpoint=EVERY_2) as shards:
        train_and_die(shards)
        assert not shards.codes
        claim.claim(shards.folder, 2, "ps-0-a2")
        wait(lambda: 0 in shards.codes, "the old coordinator lives on")
        assert shards.codes[0] == contract.EXIT_FENCED
