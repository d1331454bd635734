"""A model in stages, with dropout, batch norm and a tied weight: `stages.py PACE [WORD…] [CUT…]`. Outside a job it is plain torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

STEPS, WIDE = 60, 32


def model_of(*words: str) -> nn.Sequential:
    """`untied`: no two stages share a weight; `plain`: no batch norm, whose few samples make much of a small difference."""
    torch.manual_seed(3)
    first, last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
    last.weight = first.weight
    model = nn.Sequential(
        first, nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Dropout(0.2), nn.BatchNorm1d(WIDE), nn.Linear(WIDE, WIDE), nn.Tanh(), last
    )
    if "untied" in words:
        model[7] = nn.Linear(WIDE, WIDE)
    if "plain" in words:
        model[4] = nn.Identity()
    return model


def data_of() -> TensorDataset:
    draw = torch.Generator().manual_seed(4)
    return TensorDataset(torch.randn(10 * STEPS, WIDE, generator=draw), torch.randn(10 * STEPS, WIDE, generator=draw))


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


def main(pace: float, words: list[str]) -> None:
    model = model_of(*words)
    cuts: list[str | int] = [int(word) for word in words if word.isdigit()]
    pipe = ps.pipeline(model, nn.functional.mse_loss, cuts=cuts, microbatches=4, seed=7)
    _, optimizer = ps.attach(model, optimizer_of(model.parameters()))
    for x, y in ps.shard(DataLoader(data_of(), batch_size=10)):
        optimizer.zero_grad()
        loss = pipe.step(x, y)
        optimizer.step()
        ps.report(loss=float(loss))
        time.sleep(pace)
    if ps.rank() == 0 and ps.world() == 1:
        torch.save(model.state_dict(), "alone.pt")


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
