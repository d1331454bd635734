"""Stages with dropout, batch norm and a tied weight: `stages.py PACE [WORD…] [CUT… | auto]`. Outside a job it is plain torch.

With `cuda` among the words all stages are on the first GPU. Updates are made on the CPU then too, as the shards of a job make them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

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


class OnHost(torch.optim.SGD):
    """Steps on the CPU, wherever its parameters lie. A kernel of another device rounds in other places."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        given = list(parameters)
        super().__init__(given, lr=0.05, momentum=0.9)
        self._pairs = [(p, nn.Parameter(p.detach().cpu().clone())) for p in given]
        self._inner = optimizer_of(mine for _, mine in self._pairs)

    def step(self, closure: Any = None) -> None:
        for theirs, mine in self._pairs:
            mine.grad = None if theirs.grad is None else theirs.grad.cpu()
        self._inner.step()
        with torch.no_grad():
            for theirs, mine in self._pairs:
                theirs.copy_(mine)


def main(pace: float, words: list[str]) -> None:
    device = torch.device("cpu")
    if "cuda" in words:
        from tests.support.hardware import repeatable  # a pod has this file alone

        device = repeatable("cuda")
    model = model_of(*words).to(device)
    cuts: list[str | int] | str = "auto" if "auto" in words else [int(word) for word in words if word.isdigit()]
    pipe = ps.pipeline(model, nn.functional.mse_loss, cuts=cuts, microbatches=4, seed=7, example=torch.randn(2, WIDE).to(device))
    alone = ps.world() == 1
    _, optimizer = ps.attach(model, (OnHost if alone and device.type == "cuda" else optimizer_of)(model.parameters()))
    for x, y in ps.shard(DataLoader(data_of(), batch_size=10)):
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = pipe.step(x, y)
        optimizer.step()
        ps.report(loss=float(loss))
        time.sleep(pace)
    if alone:
        torch.save(model.cpu().state_dict(), "alone.pt")


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
