"""Fine-tuning that adds the backbone's group in its second epoch: `python late_group.py PACE`."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps


def main(pace: float) -> None:
    torch.manual_seed(31)
    x = torch.randn(20 * 4 * ps.world(), 4, generator=torch.Generator().manual_seed(2))
    backbone, head = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1)), nn.Linear(8, 1)
    model: nn.Module = nn.Sequential(backbone, head)
    backbone.requires_grad_(False)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    model, optimizer = ps.attach(model, optimizer, later=[backbone])
    loader = ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True))
    for epoch in range(3):
        if epoch == 1:
            backbone.requires_grad_(True)
            optimizer.add_param_group({"params": backbone.parameters(), "lr": 1e-3})
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.99
            time.sleep(pace)


if __name__ == "__main__":
    main(float(sys.argv[1]))
