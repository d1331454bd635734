"""A job of psjob for a program of this folder: its config, its shards and workers as processes of this machine."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import clock

from psjob.api import attach as attaching
from psjob.contract import CONFIG_FORMAT, keys

SHARD = ("-m", "psjob.shard")


@dataclass
class Running:
    """Processes of a job; `folder` holds the shards' logs and `checkpoints`."""

    folder: str
    config: dict[str, Any]
    keys: dict[str, bytes] = field(default_factory=keys.fresh)
    shards: list[subprocess.Popen[Any]] = field(default_factory=list)
    workers: list[subprocess.Popen[str]] = field(default_factory=list)

    def key_file(self, role: str, index: int) -> str:
        """The path of a process's key file."""
        path = Path(self.folder) / f"{role}-{index}.keys"
        path.write_text(keys.process_key_file(self.keys, role, index, 1))
        return str(path)

    def answers(self) -> list[list[float]]:
        """What every worker has measured, by rank. Raises RuntimeError if one ended badly, with the shards' last words."""
        try:
            return [clock.last_line(worker) for worker in self.workers]
        except RuntimeError as error:
            logs = " ".join(Path(f"{self.folder}/shard-{index}.log").read_text()[-200:] for index in range(len(self.shards)))
            raise RuntimeError(f"{error}; shards: {logs!r}") from None


def measure(doc: str | None, work: Callable[[argparse.Namespace], None]) -> None:
    """The whole of a program that answers with what worker 0 of one job has measured; its workers do `work`."""
    words = clock.asked(doc)
    if words.part:
        work(words)
        return
    with running(words) as job:
        clock.answer(job.answers()[0])


@contextlib.contextmanager
def running(
    words: argparse.Namespace,
    to_worker: Callable[[dict[str, Any], int], dict[str, Any]] = lambda config, rank: config,
    shard_program: Sequence[str] = SHARD,
    **changes: Any,
) -> Iterator[Running]:
    """Shards of psjob and workers of the calling program (part `worker`), with `changes` and `--set` in the config; killed in the end.

    `to_worker` gives the config that the worker of a rank has, where that is another one: its road to the shards. `shard_program` is what
    Python runs as a shard.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = Running(folder, config(words) | changes)
        for pair in words.set:
            key, _, value = pair.partition("=")
            *path, last = key.split(".")
            place = job.config
            for name in path:
                place = place[name]
            place[last] = json.loads(value)
        if job.config.get("encryption", "none") != "none":
            from psjob_operator.certificates import certificates  # environments of peers have no operator

            for name, text in certificates(words.shards).items():
                (Path(folder) / name).write_bytes(text)
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(job.config))
        shared = {"OMP_NUM_THREADS": "1", "PSJOB_RUN": job.config["run"], "PSJOB_CONFIG": str(path)}
        try:
            for index in range(words.shards):
                theirs = {"PSJOB_KEYS": job.key_file("shard", index)}
                job.shards.append(shard(index, shared | theirs, folder, shard_program))
            for rank in range(words.workers):
                own_config = Path(folder) / f"worker-{rank}.json"
                own_config.write_text(json.dumps(to_worker(job.config, rank)))
                own = {"PSJOB_ROLE": "worker", "PSJOB_INDEX": str(rank), "PSJOB_POD": f"worker-{rank}", "PSJOB_START": "1"}
                own |= {"PSJOB_TERMINATION_LOG": f"{folder}/worker-{rank}", "PSJOB_CONFIG": str(own_config)}
                own |= {"PSJOB_KEYS": job.key_file("worker", rank)}
                job.workers.append(clock.spawn(words, "worker", rank, **(shared | own)))
            yield job
        finally:
            for process in [*job.workers, *job.shards]:
                process.kill()
                process.wait()


def shard(index: int, shared: dict[str, str], folder: str, program: Sequence[str] = SHARD) -> subprocess.Popen[Any]:
    own = {"PSJOB_ROLE": "shard", "PSJOB_INDEX": str(index), "PSJOB_POD": f"ps-{index}", "PSJOB_ATTEMPT": "1", "PSJOB_VIEW": "1"}
    own |= {"PSJOB_CHECKPOINTS": f"{folder}/checkpoints", "PSJOB_BIND": "127.0.0.1", "PSJOB_TERMINATION_LOG": f"{folder}/shard-{index}"}
    with open(f"{folder}/shard-{index}.log", "w") as log:
        return subprocess.Popen([sys.executable, *program], env={**os.environ, **shared, **own}, stdout=log, stderr=log)


def check_road() -> None:
    """Raise RuntimeError in a worker whose job asks for shared memory and that sends its blocks over TCP all the same."""
    attached = attaching.current
    if attached is not None and attached.place.config.transport == "auto" and not all(link.shared for link in attached.session.links):
        raise RuntimeError("the job was to use shared memory, and uses TCP")


def config(words: argparse.Namespace) -> dict[str, Any]:
    """What the planner would hand the processes: sync over TCP, no checkpoints."""
    ports = clock.free_ports(2 * words.shards)
    return {
        "format": CONFIG_FORMAT,
        "job": "bench",
        "run": uuid.uuid4().hex,
        "specHash": "0" * 64,
        "mode": "sync",
        "seed": 0,
        "updateAt": None,
        "transport": "tcp",
        "workers": words.workers,
        "shards": [{"host": "127.0.0.1", "port": ports[2 * i], "statusPort": ports[2 * i + 1]} for i in range(words.shards)],
        "checkpoint": {"intervalSeconds": 3600.0, "everySteps": None, "keep": 2, "disabled": True, "resumeFrom": None},
        "successPolicy": "AllWorkers",
        "shardTimeoutSeconds": 30.0,
        "connectSeconds": 60.0,
    }
