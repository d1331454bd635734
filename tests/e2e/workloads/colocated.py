"""A script whose blocks spread evenly, which notes what its streams to each shard have carried at two of its steps.

As a script: `python colocated.py TENSORS STEPS FIRST LAST SECONDS`: so many tensors of 1 MiB, and the steps after which bytes are noted in
`carried-<rank>.json` of the working folder: {step: [[received, sent, by shared memory?] by shard]}. SECONDS is the pace.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import psjob as ps
from psjob.api import attach as attaching

SIDE = 512


class Model(nn.Module):
    def __init__(self, tensors: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(SIDE, SIDE, generator=generator)) for _ in range(tensors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x @ part).mean() for part in self.parts]).sum()


def main(tensors: int, steps: int, noted: tuple[int, int], pace: float) -> None:
    model: nn.Module = Model(tensors)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = ps.attach(model, optimizer)
    carried = {}
    while ps.step() < steps:
        x = torch.full((2, SIDE), 1.0 + ps.rank() + ps.step() % 7)
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        if ps.step() in noted and attaching.current is not None:
            carried[ps.step()] = [[*link.carried, link.shared] for link in attaching.current.session.links]
        time.sleep(pace)
    Path(f"carried-{ps.rank()}.json").write_text(json.dumps(carried))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), (int(sys.argv[3]), int(sys.argv[4])), float(sys.argv[5]))
