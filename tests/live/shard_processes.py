"""Shards as processes of this machine, as the planner starts them, and a worker that trains.

- A shard that nobody trains with, in a process of its own, and raw frames for it.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.peers import light_clients
from psjob import contract
from psjob.contract import keys
from psjob.process.status_client import ask_shard
from psjob.wire.auth import Peer, Seal
from psjob.wire.frame import HEADER_BYTES, Header, Kind, dump, run_digest
from tests.live.live_shards import eventually
from tests.support import warm
from tests.support.ports import free
from tests.support.runkeys import RUN as RUN_KEYS
from tests.support.runkeys import get, key_file

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

    def start_whole(self, index: int) -> Process:
        """Start a shard, and wait until it answers that it has started."""
        made = self.start(index)
        assert eventually(lambda: self.get(index, contract.STARTED_PATH)[0] == 200)
        return made

    def get(self, index: int, path: str = contract.STATUS_PATH, seconds: float = 2.0) -> tuple[int, dict[str, Any]]:
        """(code, body) of a question to a status port; code 0: no answer."""
        port = self.config["shards"][index]["statusPort"]
        try:
            if path in (contract.STATUS_PATH, contract.HISTORY_PATH):
                return 200, ask_shard("127.0.0.1", port, RUN_KEYS["questions"], path, seconds)
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


RUN = "run-9"
LENGTH_AT = 92
"""Where a header tells the length of what follows it."""
HELLO = {"role": "worker", "fresh": True, "term": 0, "restore_id": 0, "table": [], "layout": "x", "rule": "sgd"}


@dataclass(frozen=True)
class Idle:
    """A shard's process that nobody trains with."""

    port: int
    status_port: int
    process: warm.Started

    def status(self) -> dict[str, Any]:
        return ask_shard("127.0.0.1", self.status_port, RUN_KEYS["questions"], seconds=30)

    def dial(self, proven: bool = False) -> Dialled:
        """A connection; `proven`: on which worker 0 has proven itself, and its frames are sealed."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        if not proven:
            return Dialled(sock, None)
        return Dialled(
            sock, light_clients.proven(sock, Peer("worker", 0, 1), keys.worker_key(RUN_KEYS["workers"], 0, 1), run_digest(RUN))[0]
        )


@dataclass(frozen=True)
class Dialled:
    """A connection to a shard, and what its headers are sealed with."""

    sock: socket.socket
    seal: Seal | None

    def say(self, raw: bytes) -> None:
        """Send frames as they are, but for their seals; what is shorter than a header, or follows the last one, goes as it is."""
        try:
            if self.seal is None:
                self.sock.sendall(raw)
                return
            while len(raw) >= HEADER_BYTES:
                size = struct.unpack_from("<Q", raw, LENGTH_AT)[0]
                self.sock.sendall(self.seal.on(raw[:HEADER_BYTES]) + raw[HEADER_BYTES : HEADER_BYTES + size])
                raw = raw[HEADER_BYTES + size :]
            self.sock.sendall(raw)
        except OSError:
            pass  # hung up on


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Idle]:
    """A shard, a fork of a process that has imported torch, once for all tests of this file."""
    folder = tmp_path_factory.mktemp("shard")
    held = [socket.socket() for _ in range(2)]
    for sock in held:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
    port, status = (sock.getsockname()[1] for sock in held)
    checkpoint = {"intervalSeconds": 3600, "everySteps": None, "keep": 3, "disabled": False, "resumeFrom": None}
    config = {
        "format": contract.CONFIG_FORMAT, "job": "job", "run": RUN, "specHash": "0", "mode": "sync", "seed": 0,
        "updateAt": None, "workers": 1, "shards": [{"host": "127.0.0.1", "port": port, "statusPort": status}],
        "checkpoint": checkpoint, "successPolicy": "AllWorkers",
        "shardTimeoutSeconds": 10, "connectSeconds": 600,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    env = {
        contract.ENV_ROLE: "shard", contract.ENV_INDEX: "0", contract.ENV_RUN: RUN,
        contract.ENV_ATTEMPT: "1", contract.ENV_TERM: "1",
        contract.ENV_CONFIG: str(folder / "config.json"), contract.ENV_POD: "shard-0",
        contract.ENV_CHECKPOINTS: str(folder), contract.ENV_KEYS: key_file(folder, "shard", 0), contract.ENV_BIND: "127.0.0.1",
        contract.ENV_TERMINATION_LOG: str(folder / "end"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    process = warm.start(folder, "psjob.shard", [], env, folder / "printed", folder / "told")
    shard = Idle(port, status, process)
    try:
        deadline = time.monotonic() + 100
        while True:
            try:
                shard.status()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, "the shard did not start"
                time.sleep(0.02)
        yield shard
    finally:
        process.kill()
        process.wait()
        for sock in held:
            sock.close()


def read_all(sock: socket.socket) -> bytes:
    """Until the other side closes; a reset is a close too."""
    raw = b""
    try:
        while part := sock.recv(65536):
            raw += part
    except ConnectionResetError:
        pass
    return raw


def hello(run: str = RUN, body: Any = HELLO, **fields: Any) -> bytes:
    raw = dump(body)
    return Header(Kind.HELLO, run=run_digest(run), start=1, **fields).sized(raw).pack() + raw


def sized(kind: Kind, length: int) -> bytes:
    return Header(kind, run=run_digest(RUN), start=1, length=length).pack()


def settled(shard: Idle) -> int:
    """The smallest RSS of a second."""
    seen = []
    for _ in range(5):
        time.sleep(0.2)
        seen.append(int(shard.status()["memory"]["rssBytes"]))
    return min(seen)
