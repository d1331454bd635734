"""What a shard holds of a worker is bounded, and the bound never stops a job, in whichever orders the blocks come."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psjob.shard.pending import Gradient
from tests.live.live_shards import Worker, all_well, eventually, serving
from tests.support.covering import each_value
from tests.support.soaking import rotating

BLOCK = 4096
BLOCKS = 24


class Layers(nn.Module):
    """Each tensor is a group of its own, so a block of its own; `order` is that of the forward pass."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.order = order
        self.parts = nn.ModuleList([Part() for _ in range(BLOCKS)])

    def forward(self) -> torch.Tensor:
        total = torch.zeros(())
        for number in self.order:
            total = self.parts[number](total)
        return total


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(BLOCK // 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=1.0)


class Meter:
    """Bytes in the buffers of each worker at its shard: now, and at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now: Counter[int] = Counter()
        self.most: Counter[int] = Counter()
        lock, begin, free = threading.Lock(), Gradient.__init__, Gradient.free

        def begun(gradient: Any, pool: Any, size: int, block: Any) -> None:
            begin(gradient, pool, size, block)
            with lock:
                self.now[id(pool)] += block.nbytes
                self.most[id(pool)] = max(self.most[id(pool)], self.now[id(pool)])

        def freed(gradient: Any) -> None:
            with lock:
                self.now[id(gradient._pool)] -= gradient.flat.numel() * 4
            free(gradient)

        monkeypatch.setattr(Gradient, "__init__", begun)
        monkeypatch.setattr(Gradient, "free", freed)


@pytest.mark.parametrize(("blocks", "overlap"), each_value([1, 3, 8], [False, True]))
def test_four_workers_at_once_stay_within_their_credit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, overlap: bool) -> None:
    """One is late, so the others push all that they may; early data has half of a worker's share."""
    meter, limit = Meter(monkeypatch), blocks * BLOCK * (1 + overlap)
    with serving(tmp_path, workers=4, shards=1, gradients=4 * blocks * BLOCK * (1 + overlap), transport="tcp") as shards:
        models = [Layers(list(range(BLOCKS))) for _ in range(4)]
        workers = [Worker(shards, rank, model, sgd(model), overlap=overlap) for rank, model in enumerate(models)]

        def act(worker: Worker) -> None:
            for step in range(4):
                worker.optimizer.zero_grad()
                if worker.rank == 3 and step == 1:
                    assert eventually(lambda: list(meter.most.values()).count(limit) >= 3), "the others did not use their credit"
                worker.model().backward()
                if overlap:
                    time.sleep(0.02)
                worker.optimizer.step()

        all_well(workers, act)
    assert len(meter.most) == 4 and max(meter.most.values()) == limit
    assert not any(meter.now.values())
    assert all(torch.equal(p, torch.full_like(p, -4.0)) for model in models for p in model.parameters())


@pytest.mark.parametrize("blocks", [1, rotating(2), 10, rotating(1 << 10)])
def test_workers_whose_blocks_are_ready_in_different_orders(tmp_path: Path, blocks: int) -> None:
    """Sums in rank order need every worker's block: a credit that early data and pushes shared would stop them here."""
    with serving(tmp_path, workers=3, shards=2, gradients=3 * blocks * BLOCK) as shards:
        orders = [list(range(BLOCKS)), list(reversed(range(BLOCKS))), [*range(0, BLOCKS, 2), *range(1, BLOCKS, 2)]]
        models = [Layers(order) for order in orders]
        workers = [Worker(shards, rank, model, sgd(model), overlap=True) for rank, model in enumerate(models)]

        def act(worker: Worker) -> None:
            for _ in range(6):
                worker.optimizer.zero_grad()
                worker.model().backward()
                worker.optimizer.step()

        all_well(workers, act)
    assert all(torch.equal(p, torch.full_like(p, -6.0)) for model in models for p in model.parameters())
