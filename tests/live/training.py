"""A model, batches and optimizers that workers of live shards train, and the same training in one process of plain torch.

- A model of one parameter that each update moves by one: its value says how many updates were made, and none twice.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch
from safetensors.torch import load_file
from torch import nn

from tests.live.live_shards import Shards, Worker

Make = Callable[[nn.Module], torch.optim.Optimizer]


def build(width: int = 40) -> nn.Module:
    generator = torch.Generator().manual_seed(11)
    model = nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2)
    return model


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, 12, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def loss_of(model: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(pair[0]), pair[1])


def train_step(worker: Worker, step: int, rank: int | None = None) -> None:
    """On the batch of that step of `rank`, which is the worker's own where none is given."""
    worker.optimizer.zero_grad()
    loss_of(worker.model, batch(step, worker.rank if rank is None else rank)).backward()
    worker.optimizer.step()


def push_filled(worker: Worker, value: float) -> None:
    """A step of gradients that are this number everywhere."""
    for p in worker.model.parameters():
        p.grad = torch.full_like(p, value)
    worker.optimizer.step()


def steps(count: int, jitter: random.Random | None = None) -> Callable[[Worker], None]:
    def act(worker: Worker) -> None:
        for step in range(count):
            if jitter is not None:
                time.sleep(jitter.random() * 0.004)
            train_step(worker, step)

    return act


def one_inf(scales: dict[int, float]) -> Callable[[Worker], None]:
    """Six steps with a GradScaler; rank 1 finds inf in the third. `scales` takes each rank's scale at the end."""

    def act(worker: Worker) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        for step in range(6):
            worker.optimizer.zero_grad()
            scaler.scale(loss_of(worker.model, batch(step, worker.rank))).backward()
            if step == 2 and worker.rank == 1:
                worker.model[0].weight.grad[0, 0] = float("inf")
            scaler.step(worker.optimizer)
            scaler.update()
        scales[worker.rank] = scaler.get_scale()

    return act


def plain(make: Make, count: int, workers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Torch alone; the gradient is summed in rank order and multiplied once, as the shards do."""
    model = build()
    optimizer = make(model)
    for step in range(count):
        total: list[torch.Tensor] = []
        for rank in range(workers):
            optimizer.zero_grad()
            loss_of(model, batch(step, rank)).backward()
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            total = grads if not total else [a + b for a, b in zip(total, grads, strict=True)]
        for p, grad in zip(model.parameters(), total, strict=True):
            p.grad = grad * (1.0 / workers)
        optimizer.step()
    return model, optimizer


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01, weight_decay=1e-2),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.005, momentum=0.5, weight_decay=1e-2),
    "groups": lambda m: torch.optim.SGD(
        [{"params": m[0].parameters(), "lr": 0.01}, {"params": list(m[2].parameters()) + list(m[4].parameters())}], lr=0.1, momentum=0.5
    ),
}


def pair(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What can be learned: which of the first three numbers is the largest."""
    numbers, _ = batch(step, rank)
    return numbers, numbers[:, :3].argmax(1)


def learn(worker: Worker) -> None:
    for step in range(60):
        worker.optimizer.zero_grad()
        loss_of(worker.model, pair(step, worker.rank)).backward()
        worker.optimizer.step()


def whole_loss(model: nn.Module) -> float:
    """Over all that the four of them see."""
    with torch.no_grad():
        return sum(float(loss_of(model, pair(step, rank))) for step in range(60) for rank in range(4))


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
