"""A model of one parameter that each update moves by one: its value says how many updates were made, and none twice."""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from torch import nn

from tests.live.live_shards import Shards, Worker


def counting(shards: Shards, rank: int, start: int = 1, lr: float = 1.0) -> Worker:
    """A worker whose model begins at 0, and to which every step adds 1."""
    model = nn.Linear(40, 40)
    for p in model.parameters():
        nn.init.zeros_(p)
    return Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=lr), start=start)


def step(worker: Worker, count: int = 1) -> None:
    """By way of a forward and a backward pass, since that is where overlap acts."""
    for _ in range(count):
        worker.optimizer.zero_grad()
        loss = 0.0 * worker.model(torch.ones(1, 40)).sum()
        for p in worker.model.parameters():
            loss = loss - p.sum()
        loss.backward()
        worker.optimizer.step()


def numbers(model: nn.Module) -> set[float]:
    return {number for p in model.parameters() for number in p.detach().flatten().tolist()}


def final(shards: Shards) -> set[float]:
    return {number for tensor in load_file(shards.folder / "final.safetensors").values() for number in tensor.flatten().tolist()}
