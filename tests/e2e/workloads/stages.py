"""A model in stages, with dropout, batch norm and a tied weight: `stages.py PACE [untied] [CUT…]`. Outside a job it is plain torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

STEPS, WIDE = 60, 32


def model_of() -> nn.Sequential:
    torch.manual_seed(3)
    first, last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
    last.weight = first.weight
    return nn.Sequential(
        first, nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Dropout(0.2), nn.BatchNorm1d(WIDE), nn.Linear(WIDE, WIDE), nn.Tanh(), last
    )


def data_of() -> TensorDataset:
    draw = torch.Generator().manual_seed(4)
    return TensorDataset(torch.randn(10 * STEPS, WIDE, generator=draw), torch.randn(10 * STEPS, WIDE, generator=draw))


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


def main(pace: float, cuts: list[str | int], tied: bool) -> None:
    model = model_of()
    if not tied:
        model[7] = nn.Linear(WIDE, WIDE)
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
    words = [word for word in sys.argv[2:] if word != "untied"]
    main(float(sys.argv[1]), [int(word) for word in words], "untied" not in sys.argv)
