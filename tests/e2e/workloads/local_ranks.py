"""A script for workers of several processes, with torchrun's names and state that a restart must put back: Dropout, a schedule, shuffled data.

As a script: `python local_ranks.py STEPS LAST [RANK:STEP …]`. Each rank that is named kills itself once at its step. The last round has
LAST batches.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import psjob as ps
from tests.e2e.workloads import mlp

NAMES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")


def build(drops: bool) -> nn.Module:
    model = mlp.build()
    return nn.Sequential(*model, nn.Dropout(0.25)) if drops else model


def die_once(deaths: dict[int, int], folder: Path) -> None:
    mark = folder / f"died-{ps.rank()}"
    if deaths.get(ps.rank()) == ps.step() and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main(steps: int, last: int, deaths: dict[int, int], drops: bool) -> None:
    folder = Path(os.environ["PSJOB_CONFIG"]).parent
    (folder / f"names-{os.environ['RANK']}.json").write_text(json.dumps({name: os.environ[name] for name in NAMES}))
    torch.manual_seed(int(os.environ["RANK"]))
    model = build(drops)
    optimizer: Any = mlp.optimizer_for("sgd", model)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [15, 30], 0.5)
    model, optimizer = ps.attach(model, optimizer, **({"schedule": schedule} if drops else {}))
    loader = DataLoader(mlp.samples(steps, ps.world(), last), batch_size=mlp.BATCH, shuffle=drops)
    for batch in ps.shard(loader):
        mlp.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if drops:
            schedule.step()
        if deaths:
            time.sleep(0.01)
        die_once(deaths, folder)
    (folder / f"ended-{ps.rank()}").write_text(str(ps.step()))


if __name__ == "__main__":
    pairs = [word.split(":") for word in sys.argv[3:] if ":" in word]
    main(int(sys.argv[1]), int(sys.argv[2]), {int(rank): int(step) for rank, step in pairs}, "drops" in sys.argv[3:])
