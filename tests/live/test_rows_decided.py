"""Rows of tables in modes in which the coordinator decides: the same pushes count in every table as in every block."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from psjob.modes import Batch
from tests.live.decided import BACKUP, SOFTSYNC, batches, held_back
from tests.live.embeddings import DIM, ROWS, Clicks, loss_of, offloaded
from tests.live.live_shards import Shards, Worker, all_well, serving
from tests.soaking import rotating

pytestmark = pytest.mark.usefixtures("last_words")
__all__ = ["batches"]


def sgd(shards: Shards, rank: int) -> Worker:
    model = offloaded()
    return Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=0.1))


def table(shards: Shards, number: int) -> torch.Tensor:
    """All rows of a table, from every shard; 0 where there is none."""
    rows = torch.zeros(ROWS, DIM)
    for server in shards.servers:
        held = server.store.row_cells[number].table.export()
        rows[held["ids"]] = held["weights"]
    return rows


@pytest.mark.parametrize("way", [pytest.param({}, id="shared"), rotating({"transport": "tcp"}, id="tcp")])
def test_backup_takes_the_same_pushes_in_tables_as_in_blocks(tmp_path: Path, batches: list[Batch], way: dict[str, Any]) -> None:
    def act(worker: Worker) -> None:
        for step in range(15):
            time.sleep(0.004 * (1 + 3 * (worker.rank == 2)))
            worker.optimizer.zero_grad()
            loss_of(worker.model, step, worker.rank).backward()
            held_back(worker, batches)
            worker.optimizer.step()

    with serving(tmp_path, workers=3, shards=2, **BACKUP, **way) as shards:
        all_well([sgd(shards, rank) for rank in range(3)], act)
        held = [table(shards, number) for number in range(2)]
    assert any(one.dropped for one in batches)
    alone = Clicks()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for one in (one for one in batches if one.kept):
        optimizer.zero_grad()
        for push in one.kept:
            (loss_of(alone, push.clock, push.worker) / len(one.kept)).backward()
        optimizer.step()
    torch.testing.assert_close(held[0], alone.user.weight.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(held[1][1:], alone.pages.weight.detach()[1:], rtol=0, atol=1e-5)


def test_softsync_weighs_rows_as_blocks(tmp_path: Path, batches: list[Batch]) -> None:
    """Every gradient is 1 of every row: each row falls by the sum of all weights."""
    with serving(tmp_path, workers=3, shards=2, **SOFTSYNC) as shards:

        def ones(worker: Worker) -> None:
            for _ in range(10):
                time.sleep(0.004 * (1 + 3 * (worker.rank == 2)))
                worker.optimizer.zero_grad()
                (worker.model.user(torch.arange(ROWS)).sum() + 0 * worker.model.head.bias.sum()).backward()
                held_back(worker, batches)
                worker.optimizer.step()

        workers = [sgd(shards, rank) for rank in range(3)]
        before = Clicks().user.weight.detach()
        all_well(workers, ones)
        held = table(shards, 0)
    fallen = 0.1 * sum(share for one in batches for share in one.weights or ())
    assert any(share < 1 / 3 for one in batches for share in one.weights or ()), "nobody lagged"
    torch.testing.assert_close(before - held, torch.full((ROWS, DIM), fallen), rtol=0, atol=1e-4)
