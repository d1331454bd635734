"""A script that clips, and takes its time: `python clipping.py PACE [script]`; with `script` it asks for the norm itself."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

STEPS, LIMIT = 60, 0.5


def main(pace: float, itself: bool) -> None:
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = ps.attach(model, optimizer)
    x = torch.randn(4 * ps.world() * STEPS, 32, generator=torch.Generator().manual_seed(4))
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        if itself:
            ps.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        time.sleep(pace)


if __name__ == "__main__":
    main(float(sys.argv[1]), "script" in sys.argv)
