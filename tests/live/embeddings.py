"""A model with offloaded embeddings, its batches and optimizers, and the same training in one process of plain torch."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import psjob as ps
from tests.live.live_shards import (
    Worker,
)

Make = Callable[[nn.Module], torch.optim.Optimizer]
ROWS, DIM = 60, 5


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


def adagrad(shards: object, rank: int, start: int = 1) -> Worker:
    model = offloaded()
    return Worker(shards, rank, model, torch.optim.Adagrad(model.parameters(), lr=0.1), start=start)  # type: ignore[arg-type]
