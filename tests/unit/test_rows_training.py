"""Rows on real shards in this process: what torch's embeddings do alone, many workers do together with rows on the shards."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psjob as ps
from tests.unit.live_shards import Worker, all_well, serving

Make = Callable[[nn.Module], torch.optim.Optimizer]
ROWS, DIM = 60, 5


@pytest.fixture(autouse=True)
def last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a refused worker leaves its sentence."""
    torch.set_num_threads(1)
    monkeypatch.setenv("PSJOB_TERMINATION_LOG", str(tmp_path / "last-words"))
    return tmp_path / "last-words"


class Clicks(nn.Module):
    """A user, a bag of pages, and whether they go together; `rows` makes the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.user = nn.Embedding.from_pretrained(torch.randn(ROWS, DIM, generator=generator), freeze=False)
        pages = torch.randn(ROWS, DIM, generator=generator)
        pages[0] = 0
        self.pages = nn.EmbeddingBag.from_pretrained(pages, freeze=False, mode="sum", padding_idx=0)
        self.head = nn.Linear(2 * DIM, 1)
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(1, 2 * DIM, generator=generator) * 0.3)
            self.head.bias.zero_()

    def forward(self, users: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.user(users), self.pages(pages)], 1)).squeeze(1)


def offloaded(**options: Any) -> Clicks:
    model = Clicks()
    assert ps.offload_embeddings(model, **options) == ["user", "pages"]
    return model


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    users = torch.randint(0, ROWS, (8,), generator=generator)
    return users, torch.randint(0, ROWS, (8, 4), generator=generator), torch.rand(8, generator=generator)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    users, pages, wanted = batch(step, rank)
    return nn.functional.mse_loss(model(users, pages), wanted)


def steps(count: int, jitter: random.Random | None = None) -> Callable[[Worker], None]:
    def act(worker: Worker) -> None:
        for step in range(count):
            if jitter is not None:
                time.sleep(jitter.random() * 0.004)
            worker.optimizer.zero_grad()
            loss_of(worker.model, step, worker.rank).backward()
            worker.optimizer.step()

    return act


def rows_of(model: nn.Module) -> list[torch.Tensor]:
    """Every row of both embeddings."""
    ids = torch.arange(ROWS)
    with torch.no_grad():
        return [model.user(ids), model.pages(ids[1:, None])]


def plain(make: Make, count: int, workers: int) -> nn.Module:
    """Torch alone, on the mean of the workers' gradients."""
    model = Clicks()
    optimizer = make(model)
    for step in range(count):
        optimizer.zero_grad()
        (sum(loss_of(model, step, rank) for rank in range(workers)) / workers).backward()
        optimizer.step()
    return model


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.1),
}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_workers_and_shards_are_near_plain_torch(tmp_path: Path, name: str, shards: int) -> None:
    make = OPTIMIZERS[name]
    held: dict[int, list[torch.Tensor]] = {}

    def act(worker: Worker) -> None:
        steps(8)(worker)
        held[worker.rank] = rows_of(worker.model)

    with serving(tmp_path, workers=2, shards=shards) as serve:
        workers = [Worker(serve, rank, model, make(model)) for rank, model in enumerate(offloaded() for _ in range(2))]
        all_well(workers, act)
    torch.testing.assert_close(held[0], rows_of(plain(make, 8, 2)), rtol=0, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(held[0], held[1], strict=True))
