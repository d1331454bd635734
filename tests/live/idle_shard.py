"""A shard that nobody trains with, in a process of its own, and raw frames for it."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from bench.peers import light_clients
from psjob import contract
from psjob.contract import keys
from psjob.simulate.replay import ask_shard
from psjob.wire.auth import Peer, Seal
from psjob.wire.frame import HEADER_BYTES, Header, Kind, dump, run_digest
from tests.support import warm
from tests.support.runkeys import RUN as RUN_KEYS
from tests.support.runkeys import key_file

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
        return Dialled(sock, light_clients.proven(sock, Peer("worker", 0, 1), keys.worker(RUN_KEYS["workers"], 0, 1), run_digest(RUN))[0])


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
