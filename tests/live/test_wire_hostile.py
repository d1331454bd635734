"""Bad words at a shard's port, of strangers and of a process that has a key: each gets an error and is closed, the shard lives and keeps
its memory."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench.peers import light_clients
from psjob import contract
from psjob.checkpoint.final import tensors_sha256
from psjob.contract import WIRE, keys
from psjob.process.asking import ask
from psjob.wire import auth
from psjob.wire.auth import Peer, Seal
from psjob.wire.frame import HEADER_BYTES, MAX_BODY, MAX_JSON, Flag, Header, Kind, WireError, dump, parse, run_digest
from psjob.wire.tcp import Part, StreamClosed
from psjob.worker import link as worker_link
from psjob.worker.link import ShardLink, _hello
from tests import warm
from tests.live.live_shards import Worker, all_well, serving
from tests.live.test_shard_training import batch, loss_of
from tests.reference import reference
from tests.runkeys import RUN as RUN_KEYS
from tests.runkeys import key_file
from tests.soaking import rotating

RUN = "run-9"
LENGTH_AT = 92
"""Where a header tells the length of what follows it."""
HELLO = {"role": "worker", "fresh": True, "view": 0, "recovery": 0, "table": [], "layout": "x", "rule": "sgd"}


@dataclass(frozen=True)
class Idle:
    """A shard's process that nobody trains with."""

    port: int
    status_port: int
    process: warm.Started

    def status(self) -> dict[str, Any]:
        return ask("127.0.0.1", self.status_port, RUN_KEYS["questions"], seconds=30)

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
        contract.ENV_ATTEMPT: "1", contract.ENV_VIEW: "1",
        contract.ENV_CONFIG: str(folder / "config.json"), contract.ENV_POD: "ps-0",
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


def damaged(at: int, value: int) -> bytes:
    raw = bytearray(hello())
    raw[at] ^= value
    return bytes(raw)


def resealed(offset: int, form: str, value: int) -> bytes:
    """A hello with one header field changed, and a right checksum over it."""
    raw = bytearray(hello())
    struct.pack_into(form, raw, offset, value)
    struct.pack_into("<I", raw, HEADER_BYTES - 4, zlib.crc32(bytes(raw[: HEADER_BYTES - 4])))
    return bytes(raw)


def sized(kind: Kind, length: int) -> bytes:
    return Header(kind, run=run_digest(RUN), start=1, length=length).pack()


def in_frames(count: int) -> bytes:
    """A hello of so many frames of MAX_JSON bytes each and one more, of blanks that JSON skips."""
    head = Header(Kind.HELLO, Flag.MORE, run=run_digest(RUN), start=1).sized(b" " * MAX_JSON).pack()
    return (head + b" " * MAX_JSON) * count + hello()


def client_hello() -> bytes:
    """What a TLS client says first."""
    import ssl

    context = ssl.create_default_context()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = context.wrap_bio(incoming, outgoing, server_hostname="shard")
    with pytest.raises(ssl.SSLWantReadError):
        session.do_handshake()
    return outgoing.read()


NOISE = random.Random(9)
BAD = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * HEADER_BYTES,
    "a TLS client": client_hello(),
    "random bytes": NOISE.randbytes(4096),
    "zeros": bytes(4096),
    "another version": resealed(4, "<H", WIRE + 1),
    "a short header length": resealed(6, "<H", 8),
    "a huge header length": resealed(6, "<H", 65535),
    "an unknown type": resealed(8, "<B", 250),
    "an unknown codec": resealed(9, "<B", 3),
    "a wrong header checksum": damaged(30, 1),
    "a wrong body checksum": damaged(len(hello()) - 1, 1),
    "a frame of another run": hello("run-8"),
    "a body above the limit": sized(Kind.HELLO, MAX_JSON + 1),
    "a body of 2^64-1 bytes": sized(Kind.HELLO, (1 << 64) - 1),
    "a body in frames that another breaks off": in_frames(1)[: HEADER_BYTES + MAX_JSON] + sized(Kind.PUSH, 0),
    "a body in frames above the limit": in_frames(MAX_BODY // MAX_JSON + 1),
    "a body in empty frames": Header(Kind.HELLO, Flag.MORE, run=run_digest(RUN), start=1).pack() * 2,
    "no hello first": sized(Kind.PUSH, 0),
    "a body that is no JSON": Header(Kind.HELLO, run=run_digest(RUN)).sized(b"{{{").pack() + b"{{{",
    "a body that is a list": hello(body=[1, 2]),
    "a deep body": Header(Kind.HELLO, run=run_digest(RUN)).sized(b"[" * 100_000).pack() + b"[" * 100_000,
    "another role": hello(body=HELLO | {"role": "king"}),
    "a role that is a list": hello(body=HELLO | {"role": []}),
    "a worker out of range": hello(worker=7),
    "a worker below zero": hello(worker=-5),
    "a shard without an index": hello(body={"role": "shard", "scheme": "none"}),
    "a shard out of range": hello(body={"role": "shard", "scheme": "none", "index": 5, "attempt": 1, "view": 1}),
}


ONLY_STRANGERS = {"a wrong header checksum", "a TLS client", "HTTP"}
"""A sealed header has no checksum, and the others are no frames."""


@pytest.mark.parametrize("proven", [False, True], ids=["stranger", "proven"])
def test_a_bad_first_word_gets_one_error_and_is_closed(idle: Idle, proven: bool) -> None:
    """Strangers all at once. Who has proven itself has one place, and says them one by one."""
    names = sorted(BAD.keys() - ONLY_STRANGERS if proven else BAD)
    before = idle.status()["counters"]["badConnections"]
    heard = {}
    for some in [[name] for name in names] if proven else [names]:
        dialled = {name: idle.dial(proven) for name in some}
        for name, to in dialled.items():
            to.say(BAD[name])
        for name, to in dialled.items():
            with to.sock:
                heard[name] = read_all(to.sock)
    for name, raw in heard.items():
        if raw:  # a close with unread bytes may reset the answer away
            header = parse(raw, sealed=proven)
            assert header.kind is Kind.ERROR and len(raw) == HEADER_BYTES + header.length, name
            told = json.loads(raw[HEADER_BYTES:])
            assert told["code"] == "protocol" and len(told["error"]) > 10 and RUN not in told["error"], (name, told)
    assert idle.status()["counters"]["badConnections"] == before + len(names)
    assert idle.process.poll() is None


@pytest.mark.parametrize("proven", [False, True], ids=["stranger", "proven"])
def test_a_first_word_cut_at_every_byte_is_closed(idle: Idle, proven: bool) -> None:
    whole = hello() if proven else auth.greeting(Peer("worker", 0, 1), run_digest(RUN), bytes(32))
    for size in range(len(whole)):
        to = idle.dial(proven)
        with to.sock:
            if to.seal is not None and size >= HEADER_BYTES:
                to.sock.sendall(to.seal.on(whole[:HEADER_BYTES]) + whole[HEADER_BYTES:size])
            else:
                to.sock.sendall(whole[:size])
            to.sock.shutdown(socket.SHUT_WR)
            read_all(to.sock)
    assert idle.process.poll() is None and idle.status()["state"] == "waiting"


@pytest.mark.parametrize("proven", [False, True], ids=["stranger", "proven"])
def test_slow_bytes_run_into_the_deadline(idle: Idle, proven: bool) -> None:
    """A byte now and then does not keep a stream open: the deadline is for the whole of the first word, which never gets through."""
    whole = hello() if proven else auth.greeting(Peer("worker", 0, 1), run_digest(RUN), bytes(32))
    sent = 0
    sock = idle.dial(proven).sock
    with sock:
        closed = threading.Event()

        def drip() -> None:
            nonlocal sent
            for byte in whole:
                if closed.wait(0.2):
                    return
                try:
                    sock.sendall(bytes([byte]))
                except OSError:
                    return
                sent += 1

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        raw = read_all(sock)
        closed.set()
        thread.join()
    assert 1 < sent < len(whole), "closed by the shard, before it was whole"
    assert not raw or b"bytes came in" in raw
    assert idle.process.poll() is None


def test_a_long_hello_that_stops_costs_what_was_sent(idle: Idle) -> None:
    """Each of 40 that have a key announces 1 MiB more and sends a byte of it: what a shard allocates goes by what came."""
    before = settled(idle)
    dialled = [idle.dial(proven=True) for _ in range(40)]
    for to in dialled:
        assert to.seal is not None
        to.sock.sendall(to.seal.on(in_frames(1)[:HEADER_BYTES]) + b" ")
    time.sleep(0.5)
    held = int(idle.status()["memory"]["rssBytes"])
    for to in dialled:
        to.sock.close()
    print(f"RSS {before / 2**20:.2f} MiB, with 40 that have begun a hello {held / 2**20:.2f} MiB")
    assert held - before <= 40 * (128 << 10) + (1 << 20)


@pytest.mark.parametrize("proven", [False, True], ids=["strangers", "proven"])
@pytest.mark.parametrize("count", [200, rotating(1000)])
def test_many_bad_connections_leave_no_memory_behind(idle: Idle, proven: bool, count: int) -> None:
    """Also with many of them open at once; the shard's RSS is what it was."""
    cases = [BAD[name] for name in sorted(BAD)]
    bad(idle, cases, count, proven)  # what the first of a kind imports and caches stays, and what waits for the collector
    before = settled(idle)
    bad(idle, cases, count, proven)
    after = settled(idle)
    print(f"RSS {before / 2**20:.2f} MiB, after {count} bad connections {after / 2**20:.2f} MiB")
    assert after - before <= 1 << 20


def bad(shard: Idle, cases: list[bytes], count: int, proven: bool) -> None:
    """`count` connections, twenty open at a time."""
    cases = [raw for raw in cases if len(raw) <= 2 * MAX_JSON]
    for begin in range(0, count, 20):
        dialled = [shard.dial(proven) for _ in range(20)]
        for number, to in enumerate(dialled):
            to.say(cases[(begin + number) % len(cases)])
        for to in dialled:
            to.sock.settimeout(10)
            try:
                to.sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            read_all(to.sock)
            to.sock.close()


def settled(shard: Idle) -> int:
    """The smallest RSS of a second."""
    seen = []
    for _ in range(5):
        time.sleep(0.2)
        seen.append(int(shard.status()["memory"]["rssBytes"]))
    return min(seen)


# -- while training goes on ------------------------------------------------------------------------


def build() -> nn.Module:
    generator = torch.Generator().manual_seed(2)
    model = nn.Sequential(nn.Linear(12, 100), nn.Tanh(), nn.Linear(100, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2)
    return model


STEPS = 50
ODD_NUMBERS = (b'{"hyperparameters":[""],"none":[]}', b'{"hyperparameters":[{}],"none":[Infinity]}')
ABSENT = b'{"hyperparameters":[],"none":[],"rows":[]}'


@pytest.fixture(scope="module")
def undisturbed() -> str:
    torch.set_num_threads(1)
    model = build()
    reference(model, "sgd", [{"lr": 0.1, "momentum": 0.9}], lambda step: [batch(step, rank) for rank in range(2)], loss_of, STEPS)
    return tensors_sha256(model.parameters())


def workers_of(shards: Any) -> list[Worker]:
    models = [build() for _ in range(2)]
    return [Worker(shards, rank, m, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)) for rank, m in enumerate(models)]


def train_step(worker: Worker, step: int) -> None:
    worker.optimizer.zero_grad()
    loss_of(worker.model, batch(step, worker.rank)).backward()
    worker.optimizer.step()


def test_strangers_do_not_disturb_training(tmp_path: Path, undisturbed: str) -> None:
    """Every bad first word, at both shards, again and again while two workers train."""
    over = threading.Event()

    def attack(address: tuple[str, int]) -> None:
        while not over.is_set():
            for raw in BAD.values():
                with socket.create_connection(address, timeout=30) as sock:
                    try:
                        sock.sendall(raw)
                        sock.shutdown(socket.SHUT_WR)
                    except OSError:
                        continue
                    read_all(sock)

    with serving(tmp_path, workers=2, shards=2) as shards:
        attackers = [threading.Thread(target=attack, args=(shards.address(index),), daemon=True) for index in range(2)]
        for thread in attackers:
            thread.start()
        workers = workers_of(shards)

        def act(worker: Worker) -> None:
            for step in range(STEPS):
                train_step(worker, step)
                time.sleep(0.005)

        try:
            all_well(workers, act)
        finally:
            over.set()
        for thread in attackers:
            thread.join(30)
        assert all(server.bad_connections > 10 for server in shards.servers)
        assert tensors_sha256(workers[0].model.parameters()) == undisturbed


def test_a_workers_bad_frames_cost_it_its_stream_and_nothing_else(tmp_path: Path, undisturbed: str) -> None:
    """After hello: wrong sizes, unknown blocks, clocks ahead, damage. Each ends the stream; the worker dials again and goes on."""

    def frames(worker: Worker) -> list[list[Part]]:
        session = worker.session
        link = session.links[0]
        block = next(b for b in session.layout.blocks if session.owner[b.index] == 0)
        payload = bytes(block.nbytes)
        head = session.header(Kind.PUSH, block=block.index, clock=session.clock, info=session.exchange._info[0], attempt=link.attempt)
        good = head.sized(payload)
        return [
            [good._replace(length=good.length + 4)],
            [good._replace(length=(1 << 64) - 1)],
            [good._replace(block=4_000_000_000), payload],
            [good._replace(clock=session.clock + 5), payload],
            [good._replace(crc=1), payload],
            [good._replace(info=99), payload],
            [good._replace(worker=1 - worker.rank), payload],
            [good._replace(start=77), payload],
            [good._replace(run=run_digest("another")), payload],
            [good._replace(kind=Kind.WELCOME), payload],
            [good._replace(kind=Kind.INIT), payload],
            [good._replace(kind=Kind.EARLY, length=good.length - 4), payload],
            [good._replace(kind=Kind.EARLY, block=4_000_000_000), payload],
            [head._replace(flags=Flag.HELD, part=3)],
            [head._replace(kind=Kind.RECORD, length=1 << 62)],
            [head._replace(kind=Kind.REPORT, length=MAX_JSON + 1)],
            *([head._replace(kind=Kind.LEAVE, clock=clock)] for clock in (session.clock - 1, session.clock + 1, 1 << 62, -1)),
            [head._replace(kind=Kind.INFO, info=3).sized(b"{}"), b"{}"],
            *([head._replace(kind=Kind.INFO, info=77).sized(body), body] for body in ODD_NUMBERS),
            [head._replace(kind=Kind.INFO, info=77).sized(ABSENT), ABSENT, good._replace(info=77), payload],
            [head._replace(kind=Kind.PUSH, flags=Flag.STORE).sized(b"1234"), b"1234"],
            [b"\0" * HEADER_BYTES],
            [NOISE.randbytes(HEADER_BYTES * 3)],
        ]

    def act(worker: Worker) -> None:
        link = worker.session.links[0]
        for step in range(STEPS):
            if step % 2 == worker.rank and step >= 2:
                made = frames(worker)
                for lane in link.lanes[:1]:
                    try:
                        lane.stream.write(*made[(step // 2 + 12 * worker.rank) % len(made)])
                    except StreamClosed:
                        pass
            train_step(worker, step)

    with serving(tmp_path, workers=2, shards=2) as shards:
        workers = workers_of(shards)
        all_well(workers, act)
        assert shards.servers[0].bad_connections >= 23
        assert [server.store.counters.applied for server in shards.servers] == [2 * STEPS, 2 * STEPS]
        assert tensors_sha256(workers[0].model.parameters()) == undisturbed


def test_a_worker_that_numbers_its_infos_at_random_keeps_four(tmp_path: Path, undisturbed: str) -> None:
    """Each is a set of numbers for pushes to come; a shard that kept them all would grow without bound."""

    def act(worker: Worker) -> None:
        for step in range(STEPS):
            if worker.rank and step == 2:
                heads = [worker.session.header(Kind.INFO, info=NOISE.randrange(1000, 1 << 16)).sized(ABSENT) for _ in range(100)]
                worker.session.links[0].lanes[0].stream.write(*(part for head in heads for part in (head, ABSENT)))
            train_step(worker, step)

    with serving(tmp_path, workers=2, shards=2) as shards:
        workers = workers_of(shards)
        all_well(workers, act)
        assert shards.servers[0].store.infos.count(1) == 4
        assert tensors_sha256(workers[0].model.parameters()) == undisturbed


def test_a_hello_that_says_too_much_is_refused_and_nothing_is_missed(
    tmp_path: Path, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that believed it would take the pushes to come for old ones, and the job would wait for ever."""
    with serving(tmp_path, workers=2, shards=2) as shards:
        workers = workers_of(shards)
        say, lies = _hello, [10**9, 1 << 62, 1]

        def lie(link: ShardLink, host: str) -> dict[str, Any]:
            lying = lies and link is workers[1].session.links[1]
            return say(link, host) | ({"acked": lies.pop()} if lying else {})

        monkeypatch.setattr(worker_link, "_hello", lie)

        def act(worker: Worker) -> None:
            for step in range(STEPS):
                train_step(worker, step)

        all_well(workers, act)
        assert not lies and shards.servers[1].bad_connections == 3
        assert [server.store.counters.applied for server in shards.servers] == [2 * STEPS, 2 * STEPS]
        assert tensors_sha256(workers[0].model.parameters()) == undisturbed


def test_what_is_not_a_frame_is_named() -> None:
    for raw in (b"", b"PSJ1", bytes(HEADER_BYTES), NOISE.randbytes(HEADER_BYTES)):
        with pytest.raises(WireError):
            parse(raw)
