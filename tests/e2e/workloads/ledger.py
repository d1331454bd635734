"""Each worker counts its own steps in every block: SGD with rate 1 and a gradient of -1 at the worker's coordinate adds 1 per push.

As a script: `python ledger.py STEPS PACE GATES [overlap]`. It prints the time of every step that came back.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps
from psjob.layout.blocks import Layout, TensorSpec, assign
from tests.e2e.workloads.gates import Gates

ELEMENTS = 1 << 16
"""Enough for several blocks a shard."""
FEW = 8192
"""For slow links."""


class Ledger(nn.Module):
    def __init__(self, elements: int = ELEMENTS) -> None:
        super().__init__()
        self.book = nn.Parameter(torch.zeros(elements))
        self.groups = nn.Parameter(torch.zeros(300, dtype=torch.float64))

    def forward(self, places: list[tuple[int, str, int]]) -> torch.Tensor:
        """The loss whose gradient is -1 at these places, and 0 elsewhere."""
        named = dict(self.named_parameters())
        total = torch.zeros((), dtype=torch.float64)
        for _, tensor, element in places:
            total = total - named[tensor][element]
        return total


def layout(elements: int = ELEMENTS) -> Layout:
    """Blocks of the ledger: several a shard, of two dtypes."""
    return Layout.of([TensorSpec("book", (elements,), "float32", 0), TensorSpec("groups", (300,), "float64", 0)])


def places(rank: int, elements: int = ELEMENTS) -> list[tuple[int, str, int]]:
    """(block, tensor, element) of a rank's coordinate in each block."""
    made = layout(elements)
    return [(block.index, made.table[block.pieces[0].tensor].name, block.pieces[0].tensor_offset + rank) for block in made.blocks]


def counted(weights: dict[str, torch.Tensor], workers: int, shards: int) -> dict[int, list[list[int]]]:
    """By shard: a list a block of what each rank has there. The ledger must hold whole numbers, and nothing elsewhere."""
    elements = len(weights["book"])
    owner = assign(layout(elements), shards)
    table: dict[int, list[list[int]]] = {shard: [[0] * workers for block in owner if block == shard] for shard in range(shards)}
    total = 0.0
    for rank in range(workers):
        at = dict.fromkeys(range(shards), 0)
        for block, tensor, element in places(rank, elements):
            value = float(weights[tensor][element])
            assert value == int(value), f"rank {rank} has {value} in block {block}"
            table[owner[block]][at[owner[block]]][rank] = int(value)
            at[owner[block]] += 1
            total += value
    assert total == sum(float(tensor.double().sum()) for tensor in weights.values()), "something was written outside the coordinates"
    return table


def main(steps: int, pace: float, gates: Gates, overlap: bool) -> None:
    model = Ledger()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = ps.attach(model, optimizer, overlap=overlap)
    mine = places(ps.rank())
    data = TensorDataset(torch.zeros(steps * ps.world()))
    for _ in ps.shard(DataLoader(data, batch_size=1)):
        optimizer.zero_grad()
        model(mine).backward()
        optimizer.step()
        print(f"step {ps.step()} at {time.time():.6f}", flush=True)
        time.sleep(pace)
        gates.pass_at(ps.step())


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), Gates(sys.argv[3] if len(sys.argv) > 3 else ""), "overlap" in sys.argv[4:])
