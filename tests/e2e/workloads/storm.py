"""The ledger of `ledger.py`, a dense layer on noisy data, and a table of counts: what any kill must leave right.

As a script: `python storm.py STEPS PACE [table]`. Each step a worker adds 1 to its own coordinate of every ledger block. In the table it
adds 1 to its own row and 1 to a shared row.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps
from psjob.api.attachable import table_of
from psjob.layout.blocks import Layout, assign
from tests.e2e.workloads.ledger import FEW, Ledger, places

SHARED = 63
"""The row to which every worker pushes."""
ROWS = 64


class Storm(nn.Module):
    def __init__(self, table: bool) -> None:
        super().__init__()
        self.ledger = Ledger(FEW)
        self.dense = nn.Linear(40, 30)
        self.counts = ps.Table(ROWS, 1, dtype=torch.int32) if table else None


def made(table: bool) -> tuple[Storm, torch.optim.Optimizer]:
    """The model, and SGD with rate 1 for the ledger."""
    model = Storm(table)
    others = [parameter for name, parameter in model.named_parameters() if not name.startswith("ledger.")]
    groups = [{"params": list(model.ledger.parameters())}, {"params": others, "lr": 0.05}]
    return model, torch.optim.SGD(groups, lr=1.0)


def counted(weights: dict[str, torch.Tensor], workers: int, shards: int, table: bool, scale: int = 1) -> dict[tuple[int, int], set[int]]:
    """By (shard, rank): what the rank has in the ledger blocks of that shard, times `scale`. Whole numbers, or the test fails."""
    specs = table_of(*made(table))[1]
    layout = Layout.of(tuple(specs))
    owner = assign(layout, shards)
    found: dict[tuple[int, int], set[int]] = {}
    for rank in range(workers):
        for _, tensor, element in places(rank, FEW):
            row = next(index for index, spec in enumerate(specs) if spec.name == f"ledger.{tensor}")
            inside = (block.index for block, piece in layout.pieces_of(row) if 0 <= element - piece.tensor_offset < piece.length)
            value = float(weights[f"ledger.{tensor}"][element]) * scale
            assert abs(value - round(value)) < 1e-3, f"rank {rank} has {value} at {element} of {tensor}"
            found.setdefault((owner[next(inside)], rank), set()).add(round(value))
    return found


def main(steps: int, pace: float, table: bool) -> None:
    torch.manual_seed(0)
    model, optimizer = made(table)
    counts = model.counts
    model, optimizer = ps.attach(model, optimizer)
    mine, rank = places(ps.rank(), FEW), ps.rank()
    data = TensorDataset(torch.randn(steps * ps.world(), 40, generator=torch.Generator().manual_seed(7)))
    for (x,) in ps.shard(DataLoader(data, batch_size=1)):
        optimizer.zero_grad()
        loss = model.ledger(mine) + (model.dense(x) - x[:, :30].roll(1)).square().mean()
        loss.backward()
        if counts is not None:
            counts.push(torch.tensor([rank, SHARED]), torch.ones(2, 1, dtype=torch.int32))
        optimizer.step()
        time.sleep(pace)
    print(f"rank {rank} ends at step {ps.step()}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), "table" in sys.argv[3:])
