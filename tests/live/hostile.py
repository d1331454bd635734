"""Sessions of a worker with a valid key that sends any value for any field, over real sockets to real shards."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
from torch import nn

from psjob.layout import memory
from psjob.layout.blocks import Block
from psjob.shard.status_server import serve_status
from psjob.shard.store import Store
from psjob.wire.frame import Flag, Header, Kind, WireError, run_digest
from psjob.wire.handshake import greet
from psjob.wire.reading import StreamClosed
from psjob.wire.tcp import Stream
from psjob.worker.connection import ShardConnection
from tests.live.live_shards import Rewound, Shards, Worker, at_once, serving, stacks
from tests.live.training import push_filled
from tests.support.fuzzing import EDGES, changed_json, json_changes

LR, LIMIT = 0.1, 0.5
SECONDS, ANSWER_SECONDS = 20.0, 0.2
BITS = {
    "flags": 8, "codec": 8, "term": 32, "attempt": 32, "worker": -32, "start": 32, "rewinds": 32, "clock": -64, "request": 32,
    "generation": 32, "table": 16, "info": 16, "block": 32, "part": 64, "length": 64, "crc": 32,
}  # fmt: skip
"""Of the header's fields; below 0: with a sign."""
VALUES = (0.0, 1e-3, -1.0, 1e30, -3e38, float("nan"), float("inf"), float("-inf"))
INFO = {"hyperparameters": [{"lr": LR}], "none": [], "rows": [], "nonFinite": None, "clip": 1.0, "clamp": 1.0, "processes": 1}
BODIES: dict[Kind, dict[str, Any]] = {
    Kind.INFO: INFO,
    Kind.REPORT: {"loss": 1.0, "total": 100, "accuracy": 0.5},
    Kind.HEARTBEAT: {"passes": 1},
    Kind.INPUTS: {"inputs": [1, 2, 3]},
    Kind.DIGEST: {"clock": 1, "look": "windows", "kinds": "tt", "sums": [1, 2], "names": ["a", "b"], "numbers": [{"lr": 0.1}],
                  "alone": False, "machine": "m", "strangers": ["x"], "leftOut": 0},
    Kind.MEASURED: {"idle": 0.5, "rss": 1, "peak": 1, "devicePeak": None, "waits": "x", "for": 0, "seconds": 1.0, "delay": 0.0},
    Kind.STEP_LOST: {"rank": 0, "step": 1},
    Kind.CODEC: {"pull": "bf16"},
    Kind.CHECKPOINT: {},
    Kind.HELLO: {},
}  # fmt: skip
COMMON = (Kind.PUSH, Kind.PUSH, Kind.PUSH, Kind.INFO, Kind.PULL, Kind.EARLY, Kind.RECORD, Kind.RECORD_PIECE, Kind.RECORD_DELTA)
ENDS = (Kind.LEAVE, Kind.STOP, Kind.INPUTS)
"""What a worker may do with the job, or with its own part in it, by its own word: asked for now and then only."""
PART = 0.02


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 4, bias=False))


@dataclass
class World:
    """Shards, an honest worker 0, and what a worker 1 would know. `restarted`: how often all had to begin anew."""

    folder: Path
    options: dict[str, Any]
    restarted: int = 0
    _open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def begin(self) -> None:
        """A new run with both workers; worker 1 has gone again."""
        self._open.close()
        folder = self.folder / f"{self.restarted}"
        folder.mkdir()
        self.shards: Shards = self._open.enter_context(serving(folder, workers=2, transport="tcp", **self.options))
        self.restarted += 1
        self.start = 1
        made: list[dict[str, Any]] = []
        workers = []
        for rank in range(2):
            net = model()
            groups = [{"params": [p]} for p in net.parameters()]  # a block each
            workers.append(Worker(self.shards, rank, net, torch.optim.SGD(groups, lr=LR)))
        ends = workers[1].session.ends
        hello = ends.hello

        def noted(link: ShardConnection, host: str) -> dict[str, Any]:
            body = hello(link, host)
            if link.index == 0:
                made.append(body)
            return body

        with mock.patch.object(ends, "hello", noted):
            at_once(*(worker.attach for worker in workers))
        self.honest, self.hello = workers[0], made[-1]
        self.health = serve_status(self.shards.servers[0], "127.0.0.1", 0)
        self._open.callback(self.health.server_close)
        self._open.callback(self.health.shutdown)
        workers[1].die()
        self.before = self.weights(), self.versions()
        self.restore_id = self.stores[0].restore_id

    def close(self) -> None:
        self._open.close()

    @property
    def stores(self) -> list[Store]:
        return [server.store for server in self.shards.servers]

    def weights(self) -> torch.Tensor:
        """Of all blocks."""
        cells = [cell for store in self.stores for cell in store.cells.values()]
        return torch.cat([cell.state.weights.reshape(-1).clone() for cell in cells if cell.state is not None])

    def versions(self) -> int:
        return max(cell.n for store in self.stores for cell in store.cells.values())

    def check(self, most: float) -> None:
        """The weights are finite, and have moved by `most` in each update."""
        (weights, version), now = self.before, (self.weights(), self.versions())
        assert bool(now[0].isfinite().all())
        moved = float((now[0] - weights).norm())
        assert moved <= most * (now[1] - version) * 1.001 + 1e-6, f"moved by {moved} in {now[1] - version} updates"
        assert not self.shards.codes, f"shards ended with {self.shards.codes}"
        self.before = now

    def dial(self, index: int, start: int) -> tuple[Stream, Any]:
        """A stream of worker 1 that is proven."""
        place = self.shards.place(1, start)
        stream = Stream(socket.create_connection(self.shards.address(index), SECONDS))
        greet(stream, place, index, SECONDS)
        return stream, place

    def hostile(self, random: Random) -> list[tuple[str, Any]]:
        """One session; what was sent in it."""
        self.start += 1
        index = random.randrange(len(self.stores))
        sent: list[tuple[str, Any]] = []
        stream, _ = self.dial(index, self.start)
        try:
            for header, payload in self._frames(random, index):
                sent.append((str(header), payload[:200]))
                stream.send(header, payload)
                if header.kind is Kind.HELLO and len(sent) == 1:
                    stream.recv_header(ANSWER_SECONDS)  # before it is let in nothing of it counts
            stream.sock.shutdown(socket.SHUT_WR)
            stream.sock.settimeout(ANSWER_SECONDS)  # a hello that waits for a term to come is not read on
            while stream.sock.recv(1 << 16):
                pass
        except (StreamClosed, WireError, OSError, struct.error):
            pass
        finally:
            stream.close()
        return sent

    def honest_step(self, mode: str) -> float:
        """Worker 0 makes a step, for which in sync a right worker 1 gives what is left of it; the seconds that it took."""
        failed: list[BaseException] = []

        def step() -> None:
            try:
                push_filled(self.honest, 1e-3)
            except (Rewound, Exception) as error:
                failed.append(error)

        thread = threading.Thread(target=step, daemon=True)
        began = time.monotonic()
        thread.start()
        if mode == "sync":
            self._give_the_rest()
        thread.join(SECONDS)
        assert not thread.is_alive(), f"the honest worker hangs: {self.told()}\n{stacks()}"
        took = time.monotonic() - began
        if failed:
            if not isinstance(failed[0], Rewound):
                raise failed[0]
            self.begin()
            return 0.0
        return took

    def told(self) -> str:
        """Where the shards stand."""
        return (
            "; ".join(
                f"worker 1 {store.admission.rows[1]}, blocks "
                + ", ".join(
                    f"{cell.index} at {cell.n} with {list(cell.pending)} clip {cell._clips is not None}" for cell in store.cells.values()
                )
                + f", norms wait for {store.norms.waits}, term {store.term}, recovery {store.restore_id}"
                for store in self.stores
            )
            + f"; worker 0 at {self.honest.session.clock}"
        )

    def _give_the_rest(self) -> None:
        """Absent in all blocks that worker 1 has not pushed for the step that worker 0 makes."""
        self.start += 1
        clock = self.honest.session.clock
        for index, store in enumerate(self.stores):
            stream, place = self.dial(index, self.start)
            base = Header(Kind.HELLO, run=run_digest(place.run), term=store.term, attempt=1, worker=1, start=self.start)
            stream.send_json(base, self.hello | {"restore_id": store.restore_id, "acked": store.complete(1), "fresh": False, "attempt": 1})
            assert stream.recv_header(SECONDS).kind is Kind.WELCOME
            row = store.admission.rows[1]
            if row.complete <= clock:
                for cell in store.cells.values():
                    if cell.position not in row.open:
                        stream.send(base._replace(kind=Kind.PUSH, flags=Flag.ABSENT, block=cell.index, clock=row.complete))
            stream.sock.shutdown(socket.SHUT_WR)
            stream.sock.settimeout(SECONDS)
            with contextlib.suppress(OSError):
                while stream.sock.recv(1 << 16):
                    pass
            stream.close()

    def _frames(self, random: Random, index: int) -> list[tuple[Header, bytes]]:
        store = self.stores[index]
        row = store.admission.rows[1]
        base = Header(Kind.HELLO, run=run_digest(self.shards.config.run), term=store.term, attempt=1, worker=1, start=self.start)
        hello = self.hello | {"restore_id": store.restore_id, "acked": row.complete, "fresh": False, "attempt": 1}
        if random.random() < 0.2:
            hello = changed_json(hello, json_changes(random))
        frames = [_json(base, hello)]
        info = dict(INFO, clip=random.choice((None, 1e-3, 1e9)), clamp=random.choice((None, 1.0)), none=random.choice(([], [0], [0, 1])))
        info["hyperparameters"] = [{"lr": LR}, {"lr": LR}]
        frames.append(_json(base._replace(kind=Kind.INFO, info=1), info))
        clock, blocks = row.complete, [cell.block for cell in store.cells.values()]
        for _ in range(random.randrange(1, 8)):
            if random.random() < 0.3:  # a whole step, of which each block says what it likes
                for block in blocks:
                    frames.append(_push(random, base, block, clock, store.cells[block.index].n))
                clock += 1
                continue
            kind = random.choice(COMMON) if random.random() < 0.7 else random.choice(tuple(Kind))
            if kind in ENDS and random.random() > PART:
                continue
            frames.append(_frame(random, base._replace(kind=kind), random.choice(blocks), clock, store.cells[blocks[0].index].n))
        return frames


def _push(random: Random, base: Header, block: Block, clock: int, version: int) -> tuple[Header, bytes]:
    flags = random.choice((0, 0, 0, Flag.ABSENT, Flag.SKIP))
    payload = b"" if flags else bytes(memory.view(torch.full((block.length,), random.choice(VALUES))))
    head = base._replace(kind=Kind.PUSH, flags=flags, block=block.index, clock=clock, info=1, version=(1, version), length=len(payload))
    return head, payload


def _frame(random: Random, base: Header, block: Block, clock: int, version: int) -> tuple[Header, bytes]:
    """A frame of a kind, with right values, of which some are others."""
    kind = base.kind
    if kind is Kind.PUSH:
        head, payload = _push(random, base, block, clock, version)
    elif kind in BODIES:
        body = changed_json(BODIES[kind], json_changes(random)) if random.random() < 0.8 else BODIES[kind]
        head, payload = _json(base._replace(info=random.randrange(4)), body)
    else:
        payload = random.randbytes(random.choice((0, 0, 1, 8, 64, 4 * block.length, 70_000)))
        head = base._replace(block=block.index, clock=clock, info=1, version=(1, version), length=len(payload))
    changes: dict[str, Any] = {}
    for _ in range(random.choice((0, 0, 1, 1, 2))):
        name = random.choice((*BITS, "flags", "clock", "version"))
        if name == "version":
            changes[name] = (random.choice((0, 1, 2)), random.choice(EDGES) % (1 << 64))
        elif name != "length" or random.random() < 0.2:
            bits, value = BITS[name], random.choice(EDGES)
            changes[name] = value % (1 << bits) if bits > 0 else (value + (1 << -bits - 1)) % (1 << -bits) - (1 << -bits - 1)
    return head._replace(**changes), payload


def _json(head: Header, body: Any) -> tuple[Header, bytes]:
    raw = json.dumps(body).encode()
    return head._replace(length=len(raw)), raw
