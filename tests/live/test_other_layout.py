"""A run that goes on from a checkpoint whose parameters were cut in other blocks than this version would cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from psjob.checkpoint import manifest
from psjob.layout import blocks
from tests.live.live_shards import NEVER, Shards, Worker, all_well, eventually, serving, together
from tests.soaking import rotating

pytestmark = pytest.mark.usefixtures("last_words")
EVERY_2 = replace(NEVER, every_steps=2)
STEPS = 8
OLDER_BYTES = 512
"""What a block has at most in the layout of the checkpoint."""


class Killed(Exception):
    """The worker's process is gone."""


def worker_of(shards: Shards, rank: int, overlap: bool) -> Worker:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
    return Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), overlap=overlap)


def committed(shards: Shards) -> int:
    newest, _ = manifest.newest(shards.folder, "first")
    return -1 if newest is None else newest.step


def train(worker: Worker, killed_in: Shards | None = None) -> None:
    for step in range(worker.session.clock, STEPS):
        worker.edge(step)
        if step == STEPS - 2 and killed_in is not None:
            eventually(lambda: committed(killed_in) >= 2)
            worker.die()
            raise Killed
        worker.optimizer.zero_grad()
        worker.model(torch.randn(8, 12, generator=torch.Generator().manual_seed(100 * step + worker.rank))).square().mean().backward()
        worker.optimizer.step()
        worker.job.wait()


@pytest.mark.parametrize(("transport", "overlap"), [("auto", False), rotating("tcp", False), ("tcp", True)])
def test_workers_take_the_blocks_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, overlap: bool) -> None:
    ends: list[list[torch.Tensor]] = []

    def to_the_end(worker: Worker) -> None:
        train(worker)
        if worker.rank == 0:
            ends.append([p.detach().clone() for p in worker.model.parameters()])

    with monkeypatch.context() as older:
        older.setattr(blocks, "_usual", lambda total: OLDER_BYTES)
        with serving(tmp_path, shards=2, run="whole", transport=transport) as shards:
            all_well([worker_of(shards, rank, overlap) for rank in range(2)], to_the_end)
        with serving(tmp_path, shards=2, run="first", checkpoint=EVERY_2, transport=transport) as shards:
            raised = together([worker_of(shards, rank, overlap) for rank in range(2)], lambda worker: train(worker, shards))
            assert all(isinstance(error, Killed) for error in raised), raised
            before, _ = manifest.newest(shards.folder, "first")
    assert before is not None and before.step >= 2
    with serving(
        tmp_path, shards=2, run="second", checkpoint=replace(EVERY_2, resume_from=str(shards.folder)), transport=transport
    ) as again:
        workers = [worker_of(again, rank, overlap) for rank in range(2)]
        assert workers[0].session.layout != before.layout
        all_well(workers, to_the_end)
        assert workers[0].session.layout == workers[1].session.layout == before.layout
        after, _ = manifest.newest(again.folder, "second")
    assert after is not None and after.layout == before.layout
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))
