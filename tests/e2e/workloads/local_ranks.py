"""A script for workers of several processes, with torchrun's names, and Dropout, a schedule and shuffled data where it `drops`.

As a script: `python local_ranks.py STEPS LAST [drops] [slow] [odd] [evals] [uneven] [early] [cuda] [RANK:STEP …]`. Each rank that is named
kills itself once in the forward pass of its step. The last round has LAST batches. With `cuda` all processes compute on the first GPU.
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
from tests.support.hardware import repeatable

NAMES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")


def build(drops: bool) -> nn.Module:
    model = mlp.build()
    return nn.Sequential(*model, nn.Dropout(0.25)) if drops else model


def die_once(deaths: dict[str, str], folder: Path) -> None:
    """Inside the step: once all processes of the worker stand in it, so that its record is handed in."""
    here = f"{ps.step()}-{os.environ['GROUP_RANK']}"
    if here not in deaths.values():
        return
    (folder / f"inside-{here}-{os.environ['LOCAL_RANK']}").touch()
    mark = folder / f"died-{ps.rank()}"
    if deaths.get(str(ps.rank())) != here or mark.exists():
        return
    deadline = time.monotonic() + 60
    while len(list(folder.glob(f"inside-{here}-*"))) < int(os.environ["LOCAL_WORLD_SIZE"]) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(1.0)
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def look(model: nn.Module) -> None:
    """As a script evaluates: only on rank 0, with a pass of its own."""
    model.eval()
    with torch.no_grad():
        for batch in ps.shard(DataLoader(mlp.samples(2, ps.world()), batch_size=mlp.BATCH)):
            model(batch[0])
    model.train()


def main(steps: int, last: int, deaths: dict[str, str], words: set[str]) -> None:
    drops = "drops" in words
    folder = Path(os.environ["PSJOB_CONFIG"]).parent
    (folder / f"names-{os.environ['RANK']}.json").write_text(json.dumps({name: os.environ[name] for name in NAMES}))
    if "early" in words and ps.rank():
        sys.exit(0)
    device = repeatable("cuda" if "cuda" in words else "cpu")
    torch.manual_seed(int(os.environ["RANK"]))
    model = (nn.Sequential(nn.Linear(16, 8)) if "odd" in words and ps.rank() else build(drops)).to(device)
    optimizer: Any = mlp.optimizer_for("sgd", model)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [15, 30], 0.5)
    model, optimizer = ps.attach(model, optimizer, **({"schedule": schedule} if drops else {}))
    loader = DataLoader(mlp.samples(steps, ps.world(), last), batch_size=mlp.BATCH, shuffle=drops)
    for batch in ps.shard(loader):
        die_once(deaths, folder)
        if "slow" in words and ps.step() > 10:
            (folder / "inside-slow").touch()
            time.sleep(0.05)
        mlp.loss_of(model, (batch[0].to(device), batch[1].to(device))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if drops:
            schedule.step()
        if "evals" in words and ps.is_first() and ps.step() % 7 == 0:
            look(model)
        if "uneven" in words and ps.step() == 10 + ps.rank():
            break
    (folder / f"ended-{ps.rank()}").write_text(str(ps.step()))


if __name__ == "__main__":
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    pairs = [word.split(":") for word in sys.argv[3:] if ":" in word]
    fatal = {rank: f"{step}-{int(rank) // local}" for rank, step in pairs}
    main(int(sys.argv[1]), int(sys.argv[2]), fatal, set(sys.argv[3:]))
