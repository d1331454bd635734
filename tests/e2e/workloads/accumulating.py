"""A script that accumulates gradients over batches, in one of the three ways in which scripts end an epoch.

As a script: `python accumulating.py FORM PACE [stream]`. FORM is `drop`, `length` or `after`; with `stream` the data is an IterableDataset.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import psjob as ps

EPOCHS, EVERY, SIZE = 4, 2, 4
SAMPLES = 52
"""13 batches: on three workers five rounds, of which the last has one."""


def data() -> TensorDataset:
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(4))
    return TensorDataset(x, x.sum(1, keepdim=True))


class Stream(IterableDataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        return iter(data())


def build() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y) / EVERY


def main(form: str, pace: float, stream: bool) -> None:
    model = build()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = ps.attach(model, optimizer)
    loader = ps.shard(DataLoader(Stream(), batch_size=SIZE) if stream else DataLoader(data(), batch_size=SIZE, shuffle=True))
    for _ in range(EPOCHS):
        open_batches = 0
        for i, batch in enumerate(loader):
            loss_of(model, batch).backward()
            open_batches += 1
            if (i + 1) % EVERY == 0 or (form == "length" and i + 1 == len(loader)):
                optimizer.step()
                optimizer.zero_grad()
                open_batches = 0
            time.sleep(pace)
        if form == "after" and open_batches:
            optimizer.step()
            optimizer.zero_grad()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), "stream" in sys.argv)
