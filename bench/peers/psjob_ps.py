"""psjob itself: shards and workers as processes of this machine, one step of an attached optimizer a cycle. `--what sync|async`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import clock
import torch

import psjob


def main() -> None:
    words = clock.asked(__doc__)
    if words.part:
        work(words)
        return
    with tempfile.TemporaryDirectory() as folder:
        config = job_config(words)
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        shared = {"OMP_NUM_THREADS": "1", "PSJOB_RUN": config["run"], "PSJOB_CONFIG": str(path)}
        shards = [shard(index, shared, folder) for index in range(words.shards)]
        workers = []
        for rank in range(words.workers):
            own = {"PSJOB_ROLE": "worker", "PSJOB_INDEX": str(rank), "PSJOB_POD": f"worker-{rank}", "PSJOB_START": "1"}
            workers.append(clock.spawn(words, "worker", rank, **shared, **own, PSJOB_TERMINATION_LOG=f"{folder}/worker-{rank}"))
        try:
            found = clock.last_line(workers[0])
            for worker in workers[1:]:
                worker.communicate(timeout=60)
            clock.answer(found)
        finally:
            for process in [*workers, *shards]:
                process.kill()
                process.wait()


def shard(index: int, shared: dict[str, str], folder: str) -> subprocess.Popen[Any]:
    own = {"PSJOB_ROLE": "shard", "PSJOB_INDEX": str(index), "PSJOB_POD": f"ps-{index}", "PSJOB_EPOCH": "1", "PSJOB_VIEW": "1"}
    own |= {"PSJOB_CHECKPOINTS": f"{folder}/checkpoints", "PSJOB_BIND": "127.0.0.1", "PSJOB_TERMINATION_LOG": f"{folder}/shard-{index}"}
    with open(f"{folder}/shard-{index}.log", "w") as log:
        return subprocess.Popen([sys.executable, "-m", "psjob.shard"], env={**os.environ, **shared, **own}, stdout=log, stderr=log)


def work(words: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    each = words.megabytes * 250_000 // words.tensors
    model = torch.nn.ParameterList([torch.zeros(each) for _ in range(words.tensors)])
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    attached, optimizer = psjob.attach(model, kinds[words.optimizer](model.parameters(), lr=1e-3))
    for parameter in attached.parameters():
        parameter.grad = torch.ones_like(parameter)
    clock.answer(clock.cycles(optimizer.step, words.seconds) if words.workers == 1 else clock.rounds(optimizer.step))


def job_config(words: argparse.Namespace) -> dict[str, Any]:
    ports = clock.free_ports(2 * words.shards)
    return {
        "format": 1,
        "job": "bench",
        "run": uuid.uuid4().hex,
        "specHash": "0" * 64,
        "mode": words.what or "sync",
        "seed": 0,
        "updateAt": None,
        "streams": words.streams,
        "workers": words.workers,
        "shards": [{"host": "127.0.0.1", "port": ports[2 * i], "statusPort": ports[2 * i + 1]} for i in range(words.shards)],
        "checkpoint": {"intervalSeconds": 3600.0, "everySteps": None, "keep": 2, "disabled": True, "resumeFrom": None},
        "successPolicy": "AllWorkers",
        "shardTimeoutSeconds": 30.0,
        "connectSeconds": 60.0,
    }


if __name__ == "__main__":
    main()
