"""A script that notes each step and trains until a test says where to end.

As a script: `python linked.py PACE [--last STEP] [--rest SECONDS] [--ledger] [--ballast MIB]`. It rests PACE seconds after each step
until it knows its last: LAST, or the number that a file `last` in the run's folder holds. It ends SECONDS after it. With `--ledger` each
worker counts its own steps (ledger.py). The ballast is memory in every resume record. A worker makes no step while the run's folder holds a
file `pause-RANK`.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps
from tests.e2e.workloads.ledger import FEW, Ledger, places

BATCH, MOST = 4, 20_000
"""Samples of a batch, and steps that there are samples for."""


class Ballast:
    """Large state of a script, another one after each step."""

    def __init__(self, mebibytes: int) -> None:
        self.kept = torch.rand(mebibytes << 18)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.kept = state["kept"]


def build() -> nn.Module:
    """About 1,000 parameters; its dropout draws from the generator that a resume record holds."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pace", type=float)
    parser.add_argument("--last", type=int)
    parser.add_argument("--rest", type=float, default=0.0)
    parser.add_argument("--ledger", action="store_true")
    parser.add_argument("--ballast", type=int, default=0)
    args = parser.parse_args()
    ballast = Ballast(args.ballast)

    model: nn.Module = Ledger(FEW) if args.ledger else build()
    lr, momentum = (1.0, 0.0) if args.ledger else (0.005, 0.9)  # at 0.05 plain torch diverges too
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    model, optimizer = ps.attach(model, optimizer, ballast=ballast)
    mine = places(ps.rank(), FEW)
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(BATCH * MOST * ps.world(), 16, generator=generator)
    folder = Path(os.environ["PSJOB_CONFIG"]).parent
    with (folder / f"steps-{ps.rank()}").open("a") as notes:
        for batch, target in ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH)):
            loss = model(mine) if args.ledger else nn.functional.mse_loss(model(batch), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ballast.kept += 0.5
            print(f"{ps.step()} {time.time():.4f}", file=notes, flush=True)
            last = args.last or told(folder / "last")
            if ps.step() == last:
                break
            time.sleep(0 if last else args.pace)
            while (folder / f"pause-{ps.rank()}").exists():
                time.sleep(0.02)
    time.sleep(args.rest)


def told(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


if __name__ == "__main__":
    main()
