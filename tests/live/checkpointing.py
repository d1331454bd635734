"""Workers whose every push adds 1 to every weight, so that a checkpoint's weights tell how many pushes it has."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch
from torch import nn

from psjob.process.config import CheckpointConfig
from tests.live.live_shards import Shards, Worker, until_checkpoints
from tests.live.training import push_filled

OFTEN = CheckpointConfig(interval_seconds=0.02, every_steps=None, keep=1000, disabled=False, resume_from=None)


def counting(shards: Shards, rank: int) -> Worker:
    """A worker whose model begins at 0, with SGD of rate 1."""
    model = nn.Linear(40, 40)
    for p in model.parameters():
        nn.init.zeros_(p)
    return Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=1.0))


def steps(count: int, seed: int, breaks: float = 0.0, cut_by: Shards | None = None) -> Callable[[Worker], None]:
    """Adds 1 per step, asks for each next batch as `ps.shard` does, and now and then breaks a stream.

    With `cut_by` at least three checkpoints are taken meanwhile, by these shards.
    """

    def act(worker: Worker) -> None:
        chance = random.Random(seed + worker.rank)
        for step in range(count):
            if cut_by is not None:
                until_checkpoints(worker, cut_by, 4 * step // count)
            worker.edge(step)
            if chance.random() < breaks:
                worker.session.links[chance.randrange(len(worker.session.links))].close()
            time.sleep(0.004 * chance.random())
            push_filled(worker, -1.0)

    return act
