"""Shards as processes of this machine, as the planner starts them, and a worker that trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from psjob import contract
from psjob.simulate.replay import ask_shard
from tests.support import warm
from tests.support.ports import free
from tests.support.runkeys import RUN, get, key_file

PROGRAM = ("-m", "psjob.shard")
Process = subprocess.Popen[bytes] | warm.Started


def serving(process: Process) -> int:
    """The number of the process that serves in a shard, which its keeper has started."""
    servers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(servers[0]) if servers else process.pid


class Processes:
    """Shards of one run in `folder`. `started` are their processes by index, the newest.

    `forked`: they are forks of one process (see `tests.support.warm`), which saves seconds. Their memory is then not what a shard takes.
    """

    def __init__(self, folder: Path, shards: int = 2, workers: int = 1, forked: bool = False, **changes: Any) -> None:
        held = [free() for _ in range(2 * shards)]
        ports = [int(sock.getsockname()[1]) for sock in held]
        for sock in held:
            sock.close()
        self.folder, self.shards, self.forked = folder, shards, forked
        self.config: dict[str, Any] = {
            "format": contract.CONFIG_FORMAT, "job": "job", "run": "run-1", "specHash": "0" * 64, "mode": "async", "seed": 1,
            "updateAt": None, "workers": workers,
            "shards": [{"host": "127.0.0.1", "port": ports[2 * i], "statusPort": ports[2 * i + 1]} for i in range(shards)],
            "checkpoint": {"intervalSeconds": 0.5, "everySteps": None, "keep": 2, "disabled": False, "resumeFrom": None},
            "successPolicy": "AllWorkers", "shardTimeoutSeconds": 10.0, "connectSeconds": 20,
        } | changes  # fmt: skip
        self.path = folder / "config.json"
        self.path.write_text(json.dumps(self.config))
        self.run = folder / "checkpoints" / "run-1"
        self.started: dict[int, Process] = {}

    def start(self, index: int, attempt: int = 1, term: int = 1, program: Sequence[str] = PROGRAM, **more: str) -> Process:
        """Start a shard; `more` goes into its environment."""
        own = {
            contract.ENV_ROLE: "shard", contract.ENV_INDEX: str(index), contract.ENV_ATTEMPT: str(attempt), contract.ENV_TERM: str(term),
            contract.ENV_RUN: "run-1", contract.ENV_CONFIG: str(self.path), contract.ENV_CHECKPOINTS: str(self.folder / "checkpoints"),
            contract.ENV_POD: f"shard-{index}-{attempt}", contract.ENV_BIND: "127.0.0.1",
            contract.ENV_KEYS: key_file(self.folder, "shard", index, attempt),
            contract.ENV_TERMINATION_LOG: str(self.folder / f"end-{index}"), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        made = self.started[index] = self._python(program, {**own, **more}, self.folder / f"log-{index}-{attempt}")
        return made

    def get(self, index: int, path: str = contract.STATUS_PATH, seconds: float = 2.0) -> tuple[int, dict[str, Any]]:
        """(code, body) of a question to a status port; code 0: no answer."""
        port = self.config["shards"][index]["statusPort"]
        try:
            if path in (contract.STATUS_PATH, contract.HISTORY_PATH):
                return 200, ask_shard("127.0.0.1", port, RUN["questions"], path, seconds)
            return get(port, path, seconds=seconds)
        except (OSError, ValueError):
            return 0, {}

    def said(self, index: int) -> dict[str, Any]:
        """The termination message of a shard; empty while there is none."""
        path = self.folder / f"end-{index}"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def log(self, index: int, attempt: int = 1) -> str:
        """What a shard has written to its standard error."""
        return (self.folder / f"log-{index}-{attempt}").read_text()

    def worker(self, program: Sequence[str], rank: int = 0) -> Process:
        """Start a worker."""
        own = {
            contract.ENV_ROLE: "worker", contract.ENV_INDEX: str(rank), contract.ENV_START: "1", contract.ENV_RUN: "run-1",
            contract.ENV_CONFIG: str(self.path), contract.ENV_POD: f"worker-{rank}",
            contract.ENV_KEYS: key_file(self.folder, "worker", rank),
            contract.ENV_TERMINATION_LOG: str(self.folder / f"end-worker-{rank}"), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        return self._python(program, own, self.folder / f"log-worker-{rank}")

    def _python(self, words: Sequence[str], env: dict[str, str], log: Path) -> Process:
        if self.forked:
            return warm.start_python(self.folder, words, env, log, log)
        with log.open("wb") as file:
            return subprocess.Popen([sys.executable, *words], env={**os.environ, **env}, stdout=file, stderr=file)

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


TRAINS = """
import time
import torch
import psjob

torch.manual_seed(3)
model = torch.nn.Linear(4096, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
psjob.attach(model, optimizer)
while True:
    optimizer.zero_grad()
    model(torch.ones(1, 4096)).sum().backward()
    optimizer.step()
    time.sleep(0.002)
"""


@contextmanager
def pushing(run: Processes) -> Iterator[None]:
    """A worker trains beside the test, and is killed at its end."""
    process = run.worker(("-c", TRAINS))
    try:
        yield
    finally:
        process.kill()
        process.wait()
