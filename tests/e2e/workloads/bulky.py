"""A model of a given size whose gradients cost little. It goes slowly, or waits at a step, while a test wants that.

As a script: `python bulky.py MEGABYTES STEPS [--uneven] [--adam] [--pace SECONDS] [--hold STEP,…] [--signs FOLDER]`. It prints nothing,
since its log may lie on a full volume.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

TENSOR_BYTES = 4_000_000
HURRY = "hurry"
"""With a file of this name among the signs nobody goes slowly any more."""
HOLD_SECONDS = 600.0
SEED, RATE, MOMENTUM = 3, 1e-3, 0.9


class Bulky(nn.Module):
    """float32 tensors of about `megabytes` (10^6 bytes) in all.

    `uneven`: eight equal ones, of which every second gets no gradient, and a small one in a parameter group of its own. With two shards
    the small one and those without a gradient lie on shard 0: a checkpoint has kilobytes to write there, and much on shard 1.
    """

    def __init__(self, megabytes: float, uneven: bool = False) -> None:
        super().__init__()
        count = 8 if uneven else max(1, round(megabytes * 1e6 / TENSOR_BYTES))
        generator = torch.Generator().manual_seed(SEED)
        size = int(megabytes * 1e6 / count / 4)
        self.large = nn.ParameterList([nn.Parameter(torch.randn(size, generator=generator)) for _ in range(count)])
        self.small = nn.ParameterList([nn.Parameter(torch.randn(64, generator=generator))] if uneven else [])
        self._trained = [*self.large[1::2], *self.small] if uneven else [*self.large]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss: its gradient is 2 p + x, so that every bit depends on all steps before."""
        return torch.stack([((p + x) * p).sum() for p in self._trained]).sum()

    def optimizer(self, adam: bool = False) -> torch.optim.Optimizer:
        """SGD with momentum: a checkpoint has twice the model's bytes. With `adam`, Adam with amsgrad: four times."""
        groups = [{"params": list(group)} for group in (self.large, self.small) if len(group)]
        return torch.optim.Adam(groups, lr=RATE, amsgrad=True) if adam else torch.optim.SGD(groups, lr=RATE, momentum=MOMENTUM)


class Signs:
    """Files that a test makes, and for which the script looks."""

    def __init__(self, folder: Path, hold: set[int], pace: float) -> None:
        self._folder, self._hold, self._pace = folder, hold, pace

    def before(self, step: int) -> None:
        """Step `step` comes next: wait as long as a test wants."""
        if not (self._folder / HURRY).exists():
            time.sleep(self._pace)
        deadline = time.monotonic() + HOLD_SECONDS
        while step in self._hold and not go_sign(self._folder, step).exists() and time.monotonic() < deadline:
            time.sleep(0.05)


def go_sign(folder: Path, step: int) -> Path:
    """The file that lets the script make step `step`."""
    return folder / f"go-{step}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("megabytes", type=float)
    parser.add_argument("steps", type=int)
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--adam", action="store_true")
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--hold", default="")
    parser.add_argument("--signs", type=Path, default=Path())
    args = parser.parse_args()

    signs = Signs(args.signs, {int(step) for step in args.hold.split(",") if step}, args.pace)
    data = TensorDataset(torch.linspace(-1, 1, args.steps * ps.world()))
    bulky = Bulky(args.megabytes, args.uneven)
    model: Any
    optimizer: Any
    model, optimizer = ps.attach(bulky, bulky.optimizer(args.adam))
    for (x,) in ps.shard(DataLoader(data, batch_size=1)):
        signs.before(ps.step() + 1)
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ps.report(loss=loss, total=args.steps)


if __name__ == "__main__":
    main()
