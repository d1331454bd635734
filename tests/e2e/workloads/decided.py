"""A script whose last rank pushes late: `python decided.py EPOCHS GATES [late]`. With `late` each of its pushes is too late to count."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps
from tests.e2e.workloads.gates import Gates

PASSED = Path(os.environ.get("PSJOB_CONFIG", ".")).parent / "passed"
SECONDS = 20.0


def main(epochs: int, gates: Gates, late: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(480, 20)
    model: nn.Module = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 5))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = ps.attach(model, optimizer)
    loader = DataLoader(TensorDataset(x, (x @ torch.randn(20, 5)).argmax(1)), batch_size=8, shuffle=True)
    for _ in range(epochs):
        for inputs, labels in ps.shard(loader):
            begun = passed()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            time.sleep(0.02)
            if ps.rank() == ps.world() - 1:
                wait(begun + 2 if late else 0)
            optimizer.step()
            optimizer.zero_grad()
            ps.report(loss=loss)
            if ps.rank() == 0:
                PASSED.write_text(str(ps.step()))
            if ps.rank() != ps.world() - 1:
                gates.pass_at(ps.step())
    print(f"rank {ps.rank()} ends at step {ps.step()}", flush=True)


def passed() -> int:
    """Steps of rank 0."""
    return int(PASSED.read_text() or 0) if PASSED.exists() else 0


def wait(steps: int) -> None:
    """Until rank 0 has made so many; then whoever began before them is behind."""
    deadline = time.monotonic() + SECONDS
    while passed() < steps and time.monotonic() < deadline:
        time.sleep(0.01)


if __name__ == "__main__":
    main(int(sys.argv[1]), Gates(sys.argv[2]), "late" in sys.argv[3:])
