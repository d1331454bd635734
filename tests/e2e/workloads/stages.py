"""A model in stages, with dropout, batch norm and a tied weight: `python stages.py PACE [CUT…]`. Outside a job it is plain torch."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

STEPS, WIDE = 60, 32


def main(pace: float, cuts: list[str | int]) -> None:
    torch.manual_seed(3)
    first, last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
    last.weight = first.weight
    model = nn.Sequential(
        first, nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Dropout(0.2), nn.BatchNorm1d(WIDE), nn.Linear(WIDE, WIDE), nn.Tanh(), last
    )
    pipe = ps.pipeline(model, nn.functional.mse_loss, cuts=cuts, microbatches=4, seed=7)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    model, optimizer = ps.attach(model, optimizer)
    draw = torch.Generator().manual_seed(4)
    data = TensorDataset(torch.randn(10 * STEPS, WIDE, generator=draw), torch.randn(10 * STEPS, WIDE, generator=draw))
    for x, y in ps.shard(DataLoader(data, batch_size=10)):
        optimizer.zero_grad()
        loss = pipe.step(x, y)
        optimizer.step()
        ps.report(loss=float(loss))
        time.sleep(pace)
    if ps.rank() == 0 and ps.world() == 1:
        torch.save(model.state_dict(), "alone.pt")


if __name__ == "__main__":
    main(float(sys.argv[1]), [int(word) for word in sys.argv[2:]])
