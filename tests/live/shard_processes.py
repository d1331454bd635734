"""Shards as processes of this machine, as the planner starts them, and a worker in the test's own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from psjob import contract
from psjob.api import attach as attaching
from psjob.process.config import place
from tests.live.live_shards import _free

PROGRAM = ("-m", "psjob.shard")
SECONDS = 60.0


class Processes:
    """Shards of one run in `folder`. `started` are their processes by index, the newest."""

    def __init__(self, folder: Path, shards: int = 2, workers: int = 1, **changes: Any) -> None:
        held = [_free() for _ in range(2 * shards)]
        ports = [int(sock.getsockname()[1]) for sock in held]
        for sock in held:
            sock.close()
        self.folder, self.shards = folder, shards
        self.config: dict[str, Any] = {
            "format": 1, "job": "job", "run": "run-1", "specHash": "0" * 64, "mode": "async", "seed": 1, "updateAt": None,
            "workers": workers,
            "shards": [{"host": "127.0.0.1", "port": ports[2 * i], "statusPort": ports[2 * i + 1]} for i in range(shards)],
            "checkpoint": {"intervalSeconds": 0.5, "everySteps": None, "keep": 2, "disabled": False, "resumeFrom": None},
            "successPolicy": "AllWorkers", "shardTimeoutSeconds": 10.0, "connectSeconds": 20,
        } | changes  # fmt: skip
        self.path = folder / "config.json"
        self.path.write_text(json.dumps(self.config))
        self.run = folder / "checkpoints" / "run-1"
        self.started: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, index: int, attempt: int = 1, view: int = 1, program: Sequence[str] = PROGRAM, **more: str) -> subprocess.Popen[bytes]:
        """Start a shard; `more` goes into its environment."""
        own = {
            contract.ENV_ROLE: "shard", contract.ENV_INDEX: str(index), contract.ENV_ATTEMPT: str(attempt), contract.ENV_VIEW: str(view),
            contract.ENV_RUN: "run-1", contract.ENV_CONFIG: str(self.path), contract.ENV_CHECKPOINTS: str(self.folder / "checkpoints"),
            contract.ENV_POD: f"ps-{index}-{attempt}", contract.ENV_BIND: "127.0.0.1",
            contract.ENV_TERMINATION_LOG: str(self.folder / f"end-{index}"), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with (self.folder / f"log-{index}-{attempt}").open("wb") as log:
            made = subprocess.Popen([sys.executable, *program], env={**os.environ, **own, **more}, stdout=log, stderr=log)
        self.started[index] = made
        return made

    def get(self, index: int, path: str = contract.STATUS_PATH, seconds: float = 2.0) -> tuple[int, dict[str, Any]]:
        """(code, body) of a question to a status port; code 0: no answer."""
        url = f"http://127.0.0.1:{self.config['shards'][index]['statusPort']}{path}"
        try:
            with urllib.request.urlopen(url, timeout=seconds) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())
        except (OSError, ValueError):
            return 0, {}

    def said(self, index: int) -> dict[str, Any]:
        """The termination message of a shard; empty while there is none."""
        path = self.folder / f"end-{index}"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def log(self, index: int, attempt: int = 1) -> str:
        """What a shard has written to its standard error."""
        return (self.folder / f"log-{index}-{attempt}").read_text()

    def attached(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0) -> attaching.AttachedJob:
        """A worker in this process."""
        own = {
            contract.ENV_ROLE: "worker", contract.ENV_INDEX: str(rank), contract.ENV_START: "1", contract.ENV_RUN: "run-1",
            contract.ENV_CONFIG: str(self.path), contract.ENV_POD: f"worker-{rank}",
        }  # fmt: skip
        here = place(own)
        assert here is not None
        return attaching.AttachedJob(here, model, optimizer, {}, False)

    def close(self) -> None:
        for process in self.started.values():
            process.kill()
            process.wait()


@contextmanager
def processes(folder: Path, **options: Any) -> Iterator[Processes]:
    """A run's shards, killed at the end; none is started yet."""
    made = Processes(folder, **options)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def pushing(run: Processes, size: int = 4096) -> Iterator[None]:
    """A worker that trains beside the test until it ends; the run's shards may end before it."""
    torch.manual_seed(3)
    model = torch.nn.Linear(size, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = run.attached(model, optimizer)
    over = threading.Event()

    def train() -> None:
        torch.set_num_threads(1)
        try:
            job.join()
            attaching._take_over(job, optimizer)
            while not over.is_set():
                optimizer.zero_grad()
                model(torch.ones(1, size)).sum().backward()
                optimizer.step()
                time.sleep(0.002)
        except BaseException:  # its shards are gone
            return

    thread = threading.Thread(target=train, name="trains", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        job.session.ended = True
        for link in job.session.links:
            link.close()
        thread.join(SECONDS)
