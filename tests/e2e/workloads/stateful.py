"""A script with everything that a rewind must put back: Dropout, BatchNorm, MultiStepLR, shuffled data and loader processes.

As a script: `python stateful.py EPOCHS GATES [overlap] [staged]`. Its dataset draws random noise in the loader process.
"""

from __future__ import annotations

import random
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import psjob as ps
from tests.e2e.workloads.gates import Gates
from tests.e2e.workloads.on_a_gpu import check_staged, stage_as_on_a_gpu

SAMPLES, BATCH = 800, 10


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points with noise from torch's and Python's generators, as augmentation does."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 20, generator=generator)
        self.y = (self.x @ torch.randn(20, 5, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + 0.05 * torch.randn(20) + 0.05 * random.random(), self.y[index]


def main(epochs: int, gates: Gates, overlap: bool) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 5))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 4], 0.5)
    model, optimizer = ps.attach(model, optimizer, overlap=overlap, schedule=schedule)
    if "staged" in sys.argv[3:]:
        check_staged()
    loader = DataLoader(Noisy(), batch_size=BATCH, shuffle=True, num_workers=1)
    for _ in range(epochs):
        for x, y in ps.shard(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ps.report(loss=loss, rate=optimizer.param_groups[0]["lr"])
            time.sleep(0.02)
            gates.pass_at(ps.step())
        schedule.step()
    print(f"rank {ps.rank()} ends at step {ps.step()} with rate {optimizer.param_groups[0]['lr']}", flush=True)


if __name__ == "__main__":
    if "staged" in sys.argv[3:]:
        stage_as_on_a_gpu()
    main(int(sys.argv[1]), Gates(sys.argv[2] if len(sys.argv) > 2 else ""), "overlap" in sys.argv[3:])
