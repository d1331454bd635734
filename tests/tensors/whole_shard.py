"""Shard 0 with its coordinator, all in the thread that calls: a stream is what a peer says at once, and comes to its end here.

Nothing waits and nothing runs beside it, so that many thousand streams are served in a minute. Sockets, disk and keys are real.

- A shard without sockets, and frames of every kind for it, right and wrong.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from psjob.contract import keys
from psjob.layout.blocks import Layout, TensorSpec
from psjob.process.config import Config, ProcessContext, ShardAddress
from psjob.protocol.coordinator import events
from psjob.protocol.coordinator.membership import PACE_SECONDS
from psjob.protocol.shard.events import Phase
from psjob.resume.record import ResumeRecord, pack
from psjob.rules import named
from psjob.shard.acceptor import Acceptor
from psjob.shard.server import Server
from psjob.shard.store import Store
from psjob.tables import TableSpec
from psjob.wire import auth
from psjob.wire.auth import Peer
from psjob.wire.event_loop import NonBlockingStream
from psjob.wire.frame import HEADER_BYTES, Flag, Header, Kind, parse, run_digest
from psjob.wire.reading import Pause, ReadRequest, StreamClosed, Wants
from tests.live.live_shards import NEVER
from tests.support.costs import slower
from tests.support.runkeys import RUN as KEYS
from tests.support.runkeys import handed

RUN = "run-1"
TABLE = [{"name": f"w{i}", "shape": [64], "dtype": "float32", "group": 0} for i in range(3)]
ROWS = {"name": "user", "dim": 4, "rule": "sgd", "num_rows": 50}
LAYOUT = Layout.of([TensorSpec(t["name"], tuple(t["shape"]), t["dtype"], t["group"]) for t in TABLE])  # type: ignore[arg-type]
NUMBERS = {**named("sgd").hyperparameters, "lr": 0.1}
HELLO = {
    "role": "worker", "fresh": True, "term": 1, "restore_id": 1, "acked": 0, "attempt": 1, "mode": "async", "layout": LAYOUT.digest(),
    "rule": "sgd", "aliases": {}, "table": TABLE, "tables": [ROWS], "codecs": ["bf16", "int8", "topk"], "push": "none", "pull": "none",
    "transports": ["shared"], "rowTransports": ["shared"], "slots": 2, "has": None, "lane": False,
}  # fmt: skip
PEER_HELLO = {
    "role": "shard", "index": 1, "attempt": 1, "term": 1, "serving": False, "restore_id": 0, "mode": "async", "carried": 0, "early": False,
}  # fmt: skip
RECORD = pack(ResumeRecord(None, 0, {}, {}, []))
Said = tuple[bytes, bytes]
"""A frame, packed and not sealed, and what follows it."""
Say = Callable[[Header], Sequence[Said | list[Said]]]
"""Frames, those of a list at once; the header that every frame of this peer begins with is given."""
PART = 64 << 10


class WholeShard:
    """A run of one worker on one shard (or `shards`), which serves once the worker has begun it."""

    def __init__(self, checkpoints: Path, shards: int = 1, mode: str = "async") -> None:
        peers = tuple(ShardAddress("127.0.0.1", 1 + index, 0) for index in range(shards))
        config = Config("job", RUN, "0" * 64, mode, 5, None, 1, peers, NEVER, "AllWorkers", 10.0, 60.0)
        self.folder = checkpoints / RUN
        self.folder.mkdir(parents=True, exist_ok=True)
        self.place = ProcessContext("shard", 0, RUN, 1, 1, 0, "shard-0", config, None, checkpoints, 0, "", handed("shard", 0))
        self.server = server = Server(self.place, self.folder)
        coordinator = server.coordinator
        assert coordinator is not None
        self.coordinator = coordinator
        self._now = coordinator.clock()
        self.spent = 0.0
        """Seconds of this process that the last frame of a stream took, or those that were sent at once."""
        coordinator.clock = lambda: self._now
        server.control.answer = lambda body: coordinator.answer(0, body)
        server.store.on_step = coordinator.step_passed
        self.acceptor = Acceptor(self.place)
        self.acceptor.open(server.meet, server.refuse, server.hello_room)
        self._listener = socket.create_server(("127.0.0.1", 0))
        coordinator.feed(events.Started())
        self.settle()

    def close(self) -> None:
        """Give back its threads and descriptors: many thousands are made one after the other."""
        self._listener.close()
        self.server.close()

    @property
    def spoilt(self) -> bool:
        """Has somebody with a key ended the run, gone from it, begun it with another model or put a later start in its place?

        Then others are refused, rightly.
        """
        store = self.server.store
        if len(self.place.config.shards) == 1 and not self._as_begun(store):
            return True
        rows = store.admission.rows.values()
        odd = any(row.left_at is not None or row.incarnation > (1, 0) or row.complete > 1 << 20 for row in rows)
        return odd or bool(self.server._exit) or self.coordinator.machine.state.ended or self.server.job.final

    @staticmethod
    def _as_begun(store: Store) -> bool:
        same = store.layout is not None and store.layout.digest() == LAYOUT.digest() and store.layout.table == LAYOUT.table
        tables = [cell.spec for cell in store.row_cells.values()]
        return store.phase is Phase.SERVING and same and store.rule_name == "sgd" and tables == [TableSpec.from_json(ROWS)]

    def settle(self) -> None:
        """Let the coordinator and the disk do all that is left to do."""
        coordinator = self.coordinator
        self._now += PACE_SECONDS
        coordinator.tick()
        while True:
            self.server.control.disk.wait()
            if not coordinator.pending.empty():
                coordinator.feed(coordinator.pending.get_nowait())
            elif not coordinator.jobs.empty():
                done = coordinator.disk.carry_out(coordinator.jobs.get())
                if done is not None:
                    coordinator.pending.put(done)
            else:
                return

    def begin(self, given: bytes = RECORD) -> None:
        """Bring the run to where it serves: worker 0 says hello and sends first values and a record."""

        def first(base: Header) -> Sequence[tuple[bytes, bytes]]:
            init = [(base._replace(kind=Kind.INIT, block=b.index).sized(bytes(b.nbytes)), bytes(b.nbytes)) for b in LAYOUT.blocks]
            told = base._replace(kind=Kind.ROW_INIT, flags=Flag.STORE)
            record = frame(Kind.RECORD, given, base, clock=-1)
            return [frame(Kind.HELLO, HELLO, base), *((head.pack(), body) for head, body in init), (told.pack(), b""), record]

        self.converse(Peer("worker", 0, 1), first)

    def converse(self, peer: Peer, say: Say, greeting: Callable[[bytes], bytes] = bytes) -> bytes:
        """What the shard answers to `peer`, whose key is right. `greeting` changes the first words."""
        with socket.create_connection(self._listener.getsockname()) as here:
            there = self._listener.accept()[0]
            for sock in (here, there):  # no port is kept for what is still on its way
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = NonBlockingStream(there)
            try:
                return self._talk(here, stream, peer, say, greeting)
            finally:
                stream.close()
                stream.release()

    def _talk(self, here: socket.socket, stream: NonBlockingStream, peer: Peer, say: Say, greeting: Callable[[bytes], bytes]) -> bytes:
        serving = Served(self.acceptor.serve(stream), stream, self.settle)
        first = greeting(auth.greeting(peer, run_digest(RUN), bytes(auth.NONCE_BYTES)))
        here.sendall(first)
        serving.go_on()
        said = _came(here)
        if len(said) == auth.CHALLENGE_BYTES:
            of = keys.worker_key if peer.role == "worker" else keys.shard_key
            key = of(KEYS[peer.role + "s"], peer.index, peer.number)
            proof = auth.proof(key, first + said)
            here.sendall(proof)
            seal, _ = auth.seals(key, first + said + proof)
            base = Header(Kind.HELLO, run=run_digest(RUN), term=1, attempt=1, worker=peer.index, start=peer.number)
            heard = b""
            for said_at_once in say(base):
                frames = said_at_once if isinstance(said_at_once, list) else [said_at_once]
                raw = b"".join((seal.on(head) if len(head) >= HEADER_BYTES else head) + body for head, body in frames)
                heard += self._take(here, serving, raw)
                if serving.over:
                    break
            said = heard
        try:
            here.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        serving.end()
        return said + _came(here)

    def _take(self, here: socket.socket, serving: Served, raw: bytes) -> bytes:
        """Let the shard have it in parts that no kernel keeps waiting; what it answers meanwhile."""
        heard, began = b"", time.process_time()
        for at in range(0, len(raw), PART):
            here.sendall(raw[at : at + PART])
            serving.go_on()
            heard += _came(here)
            if serving.over:
                break
        self.spent = (time.process_time() - began) / slower()
        return heard


class Served:
    """A stream's generator, as a loop continues with it, in this thread."""

    def __init__(self, wants: Wants[Any], stream: NonBlockingStream, settle: Callable[[], None]) -> None:
        self._wants, self._stream, self._settle = wants, stream, settle
        self._want: ReadRequest | Pause | None = None
        self._apart: Callable[[], None] | None = None
        """Continues with the stream by calls that wait: once all has come."""
        self.over = False
        self._next()

    def go_on(self) -> None:
        """Take what has come."""
        while not self.over and self._apart is None:
            if isinstance(self._want, Pause):
                self._settle()
                self._stream.pump()
                self._next()
                if isinstance(self._want, Pause):
                    break
                continue
            assert self._want is not None
            before = self._want.done
            try:
                if not self._want.receive(socket.MSG_DONTWAIT):
                    if self._want.done == before:
                        break
                    continue
            except StreamClosed as error:
                self._next(error)
            else:
                self._next()
        self._settle()
        self._stream.pump()

    def end(self) -> None:
        """The peer has closed."""
        self.go_on()
        if self._apart is not None:
            self._apart()
            self.over = True
        while not self.over:
            self._next(StreamClosed("closed"))
        self._settle()
        self._stream.pump()

    def _next(self, error: Exception | None = None) -> None:
        try:
            if error is None and self._stream.closed:
                error = StreamClosed("closed")
            self._want = next(self._wants) if error is None else self._wants.throw(error)
        except StopIteration as end:
            self._apart, self.over = end.value, end.value is None
        except StreamClosed:
            self.over = True


def frame(kind: Kind, body: Any, base: Header, **fields: Any) -> tuple[bytes, bytes]:
    """A control frame."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return base._replace(kind=kind, **fields).sized(raw).pack(), raw


def heard(raw: bytes, sealed: bool = True) -> list[Header]:
    """Headers of whole frames."""
    found = []
    while len(raw) >= HEADER_BYTES:
        found.append(parse(raw, sealed=sealed))
        raw = raw[HEADER_BYTES + found[-1].length :]
    return found


def _came(sock: socket.socket) -> bytes:
    raw = b""
    try:
        while part := sock.recv(1 << 16, socket.MSG_DONTWAIT):
            raw += part
    except (BlockingIOError, ConnectionResetError):
        pass
    return raw


WORKER, SHARD = Peer("worker", 0, 1), Peer("shard", 1, 1)
INFO = {"hyperparameters": [NUMBERS], "rows": [{"lr": 0.1}], "none": [], "nonFinite": None, "clip": None, "clamp": None}
BLOCK = LAYOUT.blocks[0]
BODIES: dict[Kind, Any] = {
    Kind.HELLO: HELLO, Kind.INFO: INFO, Kind.REPORT: {"loss": 0.5, "accuracy": "nan"}, Kind.CHECKPOINT: {}, Kind.STOP: {},
    Kind.HEARTBEAT: {},
    Kind.INPUTS: {"steps": [[0, 12345]]},
    Kind.DIGEST: {"look": "whole", "clock": 16, "kinds": "tf", "sums": [1, 2], "names": ["a", "b"], "numbers": [{"lr": 0.1}]},
    Kind.CODEC: {"pull": "bf16"}, Kind.MARK: {}, Kind.LEAVE: {},
}  # fmt: skip
RAW: dict[Kind, bytes] = {
    Kind.PUSH: bytes(BLOCK.nbytes), Kind.EARLY: bytes(BLOCK.nbytes), Kind.INIT: bytes(BLOCK.nbytes), Kind.RECORD: RECORD,
    Kind.RECORD_PIECE: RECORD, Kind.RECORD_DELTA: RECORD[:9], Kind.LOOKUP: bytes(8), Kind.ROW_PUSH: bytes(8 + 4 * ROWS["dim"]),  # type: ignore[operator]
    Kind.ROW_INIT: bytes(8 + 4 * ROWS["dim"]), Kind.PULL: b"", Kind.STATE: b"", Kind.ROW_IDS: bytes(8),  # type: ignore[operator]
}  # fmt: skip
ANSWERS: list[Any] = [
    {"did": "where", "ask": 1, "rows": [[0, 0, 0]], "lo": 0, "hi": 0, "owned": 1, "stored": 0},
    {"did": "restored", "restore_id": 1, "complete": {"0": 3}, "lo": 0, "hi": 0, "owned": 1, "stored": 0},
    {"did": "written", "snapshot": 1, "file": None,
     "blocks": [{"index": 0, "file": "v000001-c000001-x", "attempt": 1, "n": 3, "counts": {}}],
     "table": {"file": {"name": "x.json", "bytes": 9, "crc": 1, "tensors": {}}, "left": {"0": 4}, "complete": {"0": 3}}, "rows": None},
    {"did": "unwritten", "snapshot": 1, "why": "the volume is full", "full": True},
    {"did": "progress", "doing": "writing", "snapshot": 1, "restore_id": 1, "done": 5, "total": 9},
    {"did": "initialised", "setup": 1}, {"did": "doubts"}, {"did": "ready", "snapshot": 1}, {"did": "counts", "applied": 5, "dropped": 0},
    {"did": "arrived", "restore_id": 1, "push": [0, 3], "base": None, "carried": 0},
    {"did": "measured", "restore_id": 1, "version": 3, "limit": 1.0, "squares": 4.0, "nan": False},
    {"did": "staleness", "attempt": 1, "staleness": {"count": 1, "sum": 2, "max": 2, "buckets": [[1, 1]]}, "gap": None},
]  # fmt: skip
"""What another shard answers."""


class Standing:
    """A shard that serves; one that a case has spoilt, as a process with a key may, is put back."""

    def __init__(self, folder: Path, mode: str, shards: int = 1) -> None:
        self._folder, self._mode, self._shards, self._number = folder, mode, shards, 0
        self.shard = self._made()

    def _made(self) -> WholeShard:
        self._number += 1
        made = WholeShard(self._folder / str(self._number), self._shards, self._mode)
        if self._shards == 1:
            made.begin()
        return made

    def again(self) -> None:
        """After a case: it serves on, or is another one."""
        if self.shard.spoilt:
            self.close()
            self.shard = self._made()

    def close(self) -> None:
        self.shard.close()
