"""A lazy model of wide layers: `python stage_memory.py WIDTH LAYERS STEPS BATCH PACE [MICROBATCHES CUT…]`.

In a job the manifest says how many micro-batches there are, and the cuts. Outside of one it is plain torch.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import psjob as ps

NARROW = 16


class Drawn(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples by number, which take no memory before they are asked for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(number)
        return torch.randn(NARROW, generator=draw), torch.randn(NARROW, generator=draw)


def model(width: int, layers: int) -> nn.Sequential:
    """`layers` wide ones between two narrow ends."""
    wide = [one for _ in range(layers) for one in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(NARROW, width), nn.Tanh(), *wide, nn.Linear(width, NARROW))


def main(width: int, layers: int, steps: int, batch: int, pace: float, microbatches: int, cuts: list[str | int]) -> None:
    with ps.lazy():
        net: nn.Module = model(width, layers)
    pipe = ps.pipeline(net, nn.functional.mse_loss, cuts, microbatches, seed=1)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, fused=True)
    net, optimizer = ps.attach(net, optimizer)
    for x, y in ps.shard(DataLoader(Drawn(steps * batch), batch_size=batch)):
        optimizer.zero_grad()
        loss = pipe.step(x, y)
        optimizer.step()
        ps.report(loss=float(loss))
        time.sleep(pace)
    if ps.world() == 1:
        torch.save(net.state_dict(), "alone.pt")


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:5]]
    main(*numbers, float(sys.argv[5]), int((sys.argv[6:] or ["1"])[0]), [int(word) for word in sys.argv[7:]])
