"""Strangers at a shard's port: each gets an error and is closed, the shard lives and keeps its memory (measure 9 of the first issue)."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psjob import contract
from psjob.checkpoint.final import tensors_sha256
from psjob.wire.frame import HEADER_BYTES, MAX_BODY, MAX_JSON, Flag, Header, Kind, WireError, dump, parse, run_digest
from psjob.worker import dialling
from psjob.worker.link import ShardLink
from tests.live.live_shards import Worker, all_well, serving
from tests.live.test_shard_training import batch, loss_of
from tests.reference import reference

RUN = "run-9"
HELLO = {"role": "worker", "scheme": "none", "fresh": True, "view": 0, "recovery": 0, "table": [], "layout": "x", "rule": "sgd"}


@dataclass(frozen=True)
class Idle:
    """A shard's process that nobody trains with."""

    port: int
    status_port: int
    process: subprocess.Popen[bytes]

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.status_port}{contract.STATUS_PATH}", timeout=30) as answer:
            told: dict[str, Any] = json.load(answer)
        return told

    def dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Idle]:
    """`python -m psjob.shard`, once for all tests of this file."""
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
        **os.environ, contract.ENV_ROLE: "shard", contract.ENV_INDEX: "0", contract.ENV_RUN: RUN,
        contract.ENV_ATTEMPT: "1", contract.ENV_VIEW: "1",
        contract.ENV_CONFIG: str(folder / "config.json"), contract.ENV_POD: "ps-0", contract.ENV_CHECKPOINTS: str(folder),
        contract.ENV_BIND: "127.0.0.1", contract.ENV_TERMINATION_LOG: str(folder / "end"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    process = subprocess.Popen([sys.executable, "-m", "psjob.shard"], env=env, cwd=folder, stderr=subprocess.DEVNULL)
    shard = Idle(port, status, process)
    try:
        deadline = time.monotonic() + 240
        while True:
            try:
                shard.status()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, "the shard did not start"
                time.sleep(0.2)
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
    "another version": resealed(4, "<H", 2),
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
    "another scheme": hello(body=HELLO | {"scheme": "kerberos"}),
    "another role": hello(body=HELLO | {"role": "king"}),
    "a role that is a list": hello(body=HELLO | {"role": []}),
    "a worker out of range": hello(worker=7),
    "a worker below zero": hello(worker=-5),
    "a shard without an index": hello(body={"role": "shard", "scheme": "none"}),
    "a shard out of range": hello(body={"role": "shard", "scheme": "none", "index": 5, "attempt": 1, "view": 1}),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_bad_first_word_gets_one_error_and_is_closed(idle: Idle, name: str) -> None:
    before = idle.status()["counters"]["badConnections"]
    with idle.dial() as sock:
        sock.sendall(BAD[name])
        raw = read_all(sock)
    if raw:  # a close with unread bytes may reset the answer away
        header = parse(raw)
        assert header.kind is Kind.ERROR and len(raw) == HEADER_BYTES + header.length
        told = json.loads(raw[HEADER_BYTES:])
        assert told["code"] == "protocol" and len(told["error"]) > 10
        print(told["error"])
    assert idle.status()["counters"]["badConnections"] == before + 1
    assert idle.process.poll() is None


def test_a_hello_cut_at_every_byte_is_closed(idle: Idle) -> None:
    whole = hello()
    for size in range(len(whole)):
        with idle.dial() as sock:
            sock.sendall(whole[:size])
            sock.shutdown(socket.SHUT_WR)
            read_all(sock)
    assert idle.process.poll() is None and idle.status()["state"] == "waiting"


def test_slow_bytes_run_into_the_deadline(idle: Idle) -> None:
    """A byte now and then does not keep a stream open: the deadline is for the whole hello, which never gets through."""
    whole = hello()
    sent = 0
    with idle.dial() as sock:
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
    assert 1 < sent < len(whole), "closed by the shard, before the hello was whole"
    assert not raw or b"bytes came in" in raw
    assert idle.process.poll() is None


def test_a_long_hello_that_stops_costs_what_was_sent(idle: Idle) -> None:
    """Each of 40 strangers announces 1 MiB more and sends a byte of it: what a shard allocates goes by what came."""
    before = settled(idle)
    socks = [idle.dial() for _ in range(40)]
    for sock in socks:
        sock.sendall(in_frames(1)[:HEADER_BYTES] + b" ")
    time.sleep(0.5)
    held = int(idle.status()["memory"]["rssBytes"])
    for sock in socks:
        sock.close()
    print(f"RSS {before / 2**20:.2f} MiB, with 40 that have begun a hello {held / 2**20:.2f} MiB")
    assert held - before <= 40 * (128 << 10) + (1 << 20)


def test_a_thousand_bad_connections_leave_no_memory_behind(idle: Idle) -> None:
    """Also with many of them open at once; the shard's RSS is what it was."""
    cases = [BAD[name] for name in sorted(BAD)]
    bad(idle, cases, 1000)  # what the first of a kind imports and caches stays, and what waits for the collector
    before = settled(idle)
    bad(idle, cases, 1000)
    after = settled(idle)
    print(f"RSS {before / 2**20:.2f} MiB, after 1,000 bad connections {after / 2**20:.2f} MiB")
    assert after - before <= 1 << 20


def bad(shard: Idle, cases: list[bytes], count: int) -> None:
    """`count` connections, twenty open at a time."""
    cases = [raw for raw in cases if len(raw) <= 2 * MAX_JSON]
    for begin in range(0, count, 20):
        socks = [shard.dial() for _ in range(20)]
        for number, sock in enumerate(socks):
            try:
                sock.sendall(cases[(begin + number) % len(cases)])
            except OSError:
                pass
        for sock in socks:
            read_all(sock)
            sock.close()


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

    def frames(worker: Worker) -> list[bytes]:
        session = worker.session
        link = session.links[0]
        block = next(b for b in session.layout.blocks if session.owner[b.index] == 0)
        payload = bytes(block.nbytes)
        head = session.header(Kind.PUSH, block=block.index, clock=session.clock, info=session.exchange._info[0], attempt=link.attempt)
        good = head.sized(payload)
        return [
            good._replace(length=good.length + 4).pack(),
            good._replace(length=(1 << 64) - 1).pack(),
            good._replace(block=4_000_000_000).pack() + payload,
            good._replace(clock=session.clock + 5).pack() + payload,
            good._replace(crc=1).pack() + payload,
            good._replace(info=99).pack() + payload,
            good._replace(worker=1 - worker.rank).pack() + payload,
            good._replace(start=77).pack() + payload,
            good._replace(run=run_digest("another")).pack() + payload,
            good._replace(kind=Kind.WELCOME).pack() + payload,
            good._replace(kind=Kind.INIT).pack() + payload,
            good._replace(kind=Kind.EARLY, length=good.length - 4).pack() + payload,
            good._replace(kind=Kind.EARLY, block=4_000_000_000).pack() + payload,
            head._replace(flags=Flag.HELD, part=3).pack(),
            head._replace(kind=Kind.RECORD, length=1 << 62).pack(),
            head._replace(kind=Kind.REPORT, length=MAX_JSON + 1).pack(),
            *(head._replace(kind=Kind.LEAVE, clock=clock).pack() for clock in (session.clock - 1, session.clock + 1, 1 << 62, -1)),
            head._replace(kind=Kind.INFO, info=3).sized(b"{}").pack() + b"{}",
            *(head._replace(kind=Kind.INFO, info=77).sized(body).pack() + body for body in ODD_NUMBERS),
            head._replace(kind=Kind.INFO, info=77).sized(ABSENT).pack() + ABSENT + good._replace(info=77).pack() + payload,
            head._replace(kind=Kind.PUSH, flags=Flag.STORE).sized(b"1234").pack() + b"1234",
            b"\0" * HEADER_BYTES,
            NOISE.randbytes(HEADER_BYTES * 3),
        ]

    def act(worker: Worker) -> None:
        link = worker.session.links[0]
        for step in range(STEPS):
            if step % 2 == worker.rank and step >= 2:
                made = frames(worker)
                for lane in link.lanes[:1]:
                    try:
                        lane.stream.sock.sendall(made[(step // 2 + 12 * worker.rank) % len(made)])
                    except OSError:
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
                worker.session.links[0].lanes[0].stream.sock.sendall(b"".join(head.pack() + ABSENT for head in heads))
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
        say, lies = dialling._hello, [10**9, 1 << 62, 1]

        def lie(link: ShardLink) -> dict[str, Any]:
            lying = lies and link is workers[1].session.links[1]
            return say(link) | ({"acked": lies.pop()} if lying else {})

        monkeypatch.setattr(dialling, "_hello", lie)

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
