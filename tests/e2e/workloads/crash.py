"""A script whose workers crash once each, in every way a script can: `python crash.py STEPS`. Training is that of mlp.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

import psjob as ps
from tests.e2e.workloads import mlp

WAYS = {0: ("SystemExit", 12), 1: ("an exception", 24), 2: ("os._exit", 36)}
"""By rank: how, and at which step."""


def crash_once(rank: int, step: int) -> None:
    how, when = WAYS[rank]
    mark = Path(os.environ["PSJOB_CONFIG"]).parent / f"crashed-{rank}"
    if step != when or mark.exists():
        return
    mark.touch()
    if how == "os._exit":
        os._exit(5)
    if how == "SystemExit":
        raise SystemExit("this script gives up")
    raise RuntimeError("this script has a fault")


def main(steps: int) -> None:
    model = mlp.build()
    optimizer: Any = mlp.optimizer_for("sgd", model)
    model, optimizer = ps.attach(model, optimizer)
    for batch in ps.shard(DataLoader(mlp.samples(steps, ps.world()), batch_size=mlp.BATCH)):
        mlp.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        crash_once(ps.rank(), ps.step())


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1])))
