"""A small network on made-up data, the same in a worker's script and in a test's oracle.

As a script: `python mlp.py OPTIMIZER STEPS [--replay] [--pace SECONDS] [--gates STEP:MANIFEST,…] [--last N]`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps
from tests.e2e.workloads.gates import Gates

BATCH = 8
Batch = tuple[torch.Tensor, torch.Tensor]


def build() -> nn.Module:
    """About 5,600 parameters: with blocks of 1/16 of the model both shards have several."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))


def optimizer_for(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of that name over all parameters, with torch's own way of computing."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.01)
    if name == "rmsprop":
        return torch.optim.RMSprop(model.parameters(), lr=0.002, momentum=0.5)
    raise ValueError(name)


def samples(steps: int, world: int, last: int | None = None) -> TensorDataset:
    """Samples for `steps` rounds of `world` batches; the last round has only `last` batches where that is given."""
    count = BATCH * ((steps - 1) * world + (world if last is None else last))
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 16, generator=generator)
    y = (x @ torch.randn(16, 5, generator=generator)).argmax(1)
    return TensorDataset(x, y)


def micro_batches(steps: int, world: int, step: int, last: int | None = None) -> list[Batch | None]:
    """What each rank trains on in a step: batch j of the data goes to rank j mod world; None for a rank without one."""
    x, y = samples(steps, world, last).tensors
    found: list[Batch | None] = []
    for rank in range(world):
        begin = (step * world + rank) * BATCH
        found.append((x[begin : begin + BATCH], y[begin : begin + BATCH]) if begin < len(x) else None)
    return found


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def mine(data: TensorDataset, steps: int) -> Iterator[Batch]:
    """This rank's batches without `ps.shard`: a script that finds its own slice."""
    x, y = data.tensors
    for step in range(steps):
        begin = (step * ps.world() + ps.rank()) * BATCH
        yield x[begin : begin + BATCH], y[begin : begin + BATCH]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("optimizer")
    parser.add_argument("steps", type=int)
    parser.add_argument("--replay", action="store_true")
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--gates", default="")
    parser.add_argument("--last", type=int)
    args = parser.parse_args()

    data = samples(args.steps, ps.world(), args.last)
    model = build()
    optimizer: Any = optimizer_for(args.optimizer, model)
    model, optimizer = ps.attach(model, optimizer)
    gates = Gates(args.gates)
    batches: Iterable[Any] = mine(data, args.steps) if args.replay else ps.shard(DataLoader(data, batch_size=BATCH))
    for number, batch in enumerate(batches):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ps.report(loss=loss, total=args.steps)
        if args.pace and number + 1 >= ps.step():  # a replayed step is no step
            time.sleep(args.pace)
        gates.pass_at(ps.step())
    print(f"rank {ps.rank()} ends at step {ps.step()}", flush=True)


if __name__ == "__main__":
    main()
