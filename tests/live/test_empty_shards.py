"""A model of one block on two shards: the second one holds nothing, and the job is as any other."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from psjob.checkpoint import manifest
from tests.live.live_shards import NEVER, Died, Shards, Worker, all_well, serving, together

pytestmark = pytest.mark.usefixtures("last_words")
EVERY_2 = replace(NEVER, every_steps=2)
STEPS = 64


def counting(shards: Shards, rank: int) -> Worker:
    model = nn.Linear(10, 3)
    for p in model.parameters():
        nn.init.zeros_(p)
    return Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=1.0))


def train(worker: Worker, killed_in: Shards | None = None) -> None:
    """To the end, or until a checkpoint is committed. A cut lies ahead of who is not waited for: nobody stands still for one."""
    for step in range(worker.session.clock, STEPS):
        worker.edge(step)
        if killed_in is not None:
            if committed(killed_in) >= 2:
                for one in killed_in.guests:
                    one.die()
                raise Died
            time.sleep(0.02)
        for p in worker.model.parameters():
            p.grad = torch.full_like(p, -1.0)
        worker.optimizer.step()


def committed(shards: Shards) -> int:
    newest, _ = manifest.newest(shards.folder, "first")
    return -1 if newest is None else newest.step


@pytest.mark.parametrize("mode", ["sync", "async", "bounded"])
def test_a_shard_without_a_block_takes_part_in_checkpoints_and_restores(tmp_path: Path, mode: str) -> None:
    with serving(tmp_path, shards=2, run="first", mode=mode, checkpoint=EVERY_2) as shards:
        raised = together([counting(shards, rank) for rank in range(2)], lambda worker: train(worker, shards))
        assert all(isinstance(error, Died) for error in raised), raised
        made, problems = manifest.newest(shards.folder, "first")
        assert made is not None and made.step >= 2 and not problems and set(made.assignment) == {0}
    with serving(tmp_path, shards=2, run="second", mode=mode, checkpoint=replace(EVERY_2, resume_from=str(shards.folder))) as again:
        workers = [counting(again, rank) for rank in range(2)]
        all_well(workers, train)
        assert again.wait_ended() == [0, 0]
        last, problems = manifest.newest(again.folder, "second")
    assert last is not None and last.final and not problems
    ended = {float(p.detach().flatten()[0]) for worker in workers for p in worker.model.parameters()}
    assert ended == {float(STEPS)} if mode == "sync" else max(ended) == 2.0 * STEPS
