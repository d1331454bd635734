"""A script whose rank 1 crashes once its end is safe: `python late.py STEPS`. Training is that of mlp.py.

A handler of `atexit` from before `attach` runs after the worker has left. Who starts again comes when no shard is there any more.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

import psjob as ps
from psjob import contract
from tests.e2e.workloads import mlp

SECONDS = 60.0


def crash() -> None:
    os._exit(5)


def wait_until_gone() -> None:
    """Return when shard 0 has ended; a deadline of `SECONDS`."""
    ending = Path(os.environ[contract.ENV_CONFIG]).parent / "logs" / "job-shard-0-a1.end"
    deadline = time.monotonic() + SECONDS
    while not ending.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def main(steps: int) -> None:
    if os.environ[contract.ENV_INDEX] == "1":
        if os.environ[contract.ENV_START] == "1":
            atexit.register(crash)
        else:
            wait_until_gone()
    model = mlp.build()
    optimizer: Any = mlp.optimizer_for("sgd", model)
    model, optimizer = ps.attach(model, optimizer)
    for batch in ps.shard(DataLoader(mlp.samples(steps, ps.world()), batch_size=mlp.BATCH)):
        mlp.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(int(sys.argv[1]))
