"""Workers that are a socket each: they speak the wire, push ones and take what is answered, all in one thread and without a model."""

from __future__ import annotations

import resource
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from psjob.contract import keys
from psjob.layout.blocks import Layout, TensorSpec
from psjob.resume.record import ResumeRecord, pack
from psjob.wire import auth
from psjob.wire.auth import Peer, Seal
from psjob.wire.frame import HEADER_BYTES, MAX_JSON, Header, Kind, dump, load, parse, run_digest

HYPERPARAMETERS = {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
OVER = (Kind.LEFT, Kind.FINISHED)


class Client:
    """Worker `rank`. What it hears is kept in `counts`, and the body of its WELCOME in `welcome`."""

    def __init__(self, address: tuple[str, int], rank: int, base: Header, workers: bytes) -> None:
        self.rank, self.clock = rank, 0
        self.base = base._replace(worker=rank, start=1)
        self.sock = socket.create_connection(address)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._mine, self._theirs = proven(self.sock, Peer("worker", rank, 1), keys.worker_key(workers, rank, 1), base.run)
        self.counts: dict[Kind, int] = {}
        self.welcome: dict[str, Any] = {}
        self._came = bytearray()

    def frame(self, kind: Kind, payload: bytes = b"", **fields: Any) -> bytes:
        """One frame of this worker."""
        return self._mine.on(self.base._replace(kind=kind, **fields).sized(payload, sums=False).pack()) + payload

    def send(self, kind: Kind, payload: bytes = b"", **fields: Any) -> None:
        self.sock.sendall(self.frame(kind, payload, **fields))

    def read(self) -> None:
        """Take what has come. Raises RuntimeError if the shard ends the stream, or refuses."""
        raw = self.sock.recv(1 << 20)
        if not raw and not any(kind in self.counts for kind in OVER):
            raise RuntimeError(f"client {self.rank}: the shard has closed the stream")
        self._came += raw
        at = 0
        while len(self._came) - at >= HEADER_BYTES:
            raw = bytes(self._came[at : at + HEADER_BYTES])
            header = parse(raw, sealed=True)
            end = at + HEADER_BYTES + header.length
            if len(self._came) < end:
                break
            self._theirs.check(raw)
            if header.kind in (Kind.ERROR, Kind.WELCOME) and header.length <= MAX_JSON:
                body = load(self._came[at + HEADER_BYTES : end])
                if header.kind is Kind.ERROR:
                    raise RuntimeError(f"client {self.rank}: {body}")
                self.welcome = body
                self.base = self.base._replace(term=header.term, attempt=header.attempt)
            self.counts[header.kind] = self.counts.get(header.kind, 0) + 1
            at = end
        del self._came[:at]

    def heard(self, kind: Kind) -> int:
        """How many frames of a kind have come."""
        return self.counts.get(kind, 0)


class Crowd:
    """`workers` clients of one shard, which is all of its job. A model of `blocks` blocks of `block` bytes. `key`: the run's key
    `workers` (contract.KEYS)."""

    def __init__(self, address: tuple[str, int], run: str, key: bytes, workers: int, mode: str, blocks: int = 2, block: int = 4096) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
        self.workers, self.mode = workers, mode
        spec = TensorSpec("w", (blocks * block // 4,), "float32")
        self.layout = Layout.of((spec,))
        if {one.nbytes for one in self.layout.blocks} != {block}:
            raise RuntimeError(f"blocks have {[one.nbytes for one in self.layout.blocks]} bytes, expected {block}")
        self._table = [spec.to_json()]
        self._ones = b"\0\0\x80\x3f" * (block // 4)
        self._selector = selectors.DefaultSelector()
        base = Header(Kind.HELLO, run=run_digest(run))
        self.clients: list[Client] = []
        self._dial = lambda rank: Client(address, rank, base, key)

    def join(self, seconds: float = 120.0) -> None:
        """Say hello, give the first values, and wait until all are welcome."""
        first = self._hello(0)
        self.wait(lambda: bool(first.welcome), seconds)
        for block in self.layout.blocks:
            first.send(Kind.INIT, bytes(block.nbytes), block=block.index)
        first.send(Kind.RECORD, pack(ResumeRecord(None, 0, {}, {}, [])), clock=-1)
        for rank in range(1, self.workers):
            self._hello(rank)
            self._hear(0.0)
        self.wait(lambda: all(client.welcome and not client.welcome.get("init") for client in self.clients), seconds)
        info = dump({"hyperparameters": [HYPERPARAMETERS], "none": []})
        for client in self.clients:
            client.send(Kind.INFO, info, info=1)

    def step(self, seconds: float = 120.0) -> None:
        """Every client pushes every block, and waits for its answers."""
        answered = [client.heard(Kind.PARAM) + len(self.layout.blocks) for client in self.clients]
        for at, client in enumerate(self.clients):
            self.push(client)
            if not at % 16:
                self._hear(0.0)
        self.wait(lambda: all(client.heard(Kind.PARAM) >= wanted for client, wanted in zip(self.clients, answered, strict=True)), seconds)

    def push(self, client: Client) -> None:
        """One client pushes every block."""
        client.sock.sendall(b"".join(self._push(client, block.index) for block in self.layout.blocks))
        client.clock += 1

    def ignore(self, client: Client) -> None:
        """Read no more of what a client is told."""
        self._selector.unregister(client.sock)

    def leave(self, seconds: float = 120.0) -> None:
        """Every client says that it is through, and is let go."""
        for client in self.clients:
            client.send(Kind.LEAVE, clock=client.clock)
            self._hear(0.0)
        self.wait(lambda: all(any(client.heard(kind) for kind in OVER) for client in self.clients), seconds)

    def wait(self, done: Callable[[], bool], seconds: float) -> None:
        """Read what comes until `done`. Raises RuntimeError after so many seconds."""
        until = time.monotonic() + seconds
        while not done():
            if time.monotonic() > until:
                raise RuntimeError(f"after {seconds:.0f} s: {self._summary()}")
            self._hear(1.0)

    def close(self) -> None:
        for client in self.clients:
            client.sock.close()
        self._selector.close()

    def _push(self, client: Client, block: int) -> bytes:
        return client.frame(Kind.PUSH, self._ones, clock=client.clock, info=1, block=block, request=client.clock + 1)

    def _hello(self, rank: int) -> Client:
        client = self._dial(rank)
        body = {
            "role": "worker", "codecs": ["none"], "transports": ["tcp"], "rowTransports": [], "slots": 1,
            "layout": self.layout.digest(), "mode": self.mode, "push": "none", "pull": "none", "term": 0, "restore_id": 0, "fresh": True,
            "acked": 0, "attempt": 0, "init": False, "has": None, "rule": "sgd", "aliases": {}, "tables": [], "table": self._table,
        }  # fmt: skip
        client.send(Kind.HELLO, dump(body))
        self.clients.append(client)
        self._selector.register(client.sock, selectors.EVENT_READ, client)
        return client

    def _hear(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            key.data.read()
            if any(key.data.heard(kind) for kind in OVER):
                self._selector.unregister(key.fileobj)

    def _summary(self) -> str:
        heard: dict[str, int] = {}
        for client in self.clients:
            for kind, count in client.counts.items():
                heard[kind.name] = heard.get(kind.name, 0) + count
        return f"{len(self.clients)} clients have heard {heard}"


def proven(sock: socket.socket, peer: Peer, key: bytes, run: bytes, index: int = 0) -> tuple[Seal, Seal]:
    """The seals of both directions of a stream to shard `index`, once its handshake is over."""
    greeting = auth.greeting(peer, run, secrets.token_bytes(auth.NONCE_BYTES))
    sock.sendall(greeting)
    said = sock.recv(auth.CHALLENGE_BYTES, socket.MSG_WAITALL)
    auth.read_challenge(key, greeting, said, index)
    proof = auth.proof(key, greeting + said)
    sock.sendall(proof)
    return auth.seals(key, greeting + said + proof)


def spent(pid: int) -> float:
    """Processor seconds of a process: Linux makes a clock's number of a process's."""
    return time.clock_gettime(~pid << 3 | 2)


def status(pid: int, names: Sequence[str] = ("Threads", "VmRSS")) -> list[int]:
    """Numbers of a process as Linux tells them; sizes in KiB."""
    with open(f"/proc/{pid}/status") as file:
        found = {line.split(":")[0]: line.split()[1] for line in file if len(line.split()) > 1}
    return [int(found[name]) for name in names]
