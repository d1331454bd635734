"""Bad words at a shard's port, of strangers and of a process that has a key: each gets an error and is closed, the shard lives and keeps
its memory.

- Strangers in numbers: connections that say nothing, a byte a second, or all that they may, and never read. Who has a key gets in.
- Changed streams and questions, over sockets to a shard's own process: it answers or hangs up, lives and keeps its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import socket
import struct
import threading
import time
import zlib
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
import torch
from torch import nn

from bench.peers.light_clients import Crowd, status
from bench.peers.strangers import GREETING, client_hello, flood, trickling
from psjob import contract
from psjob.checkpoint.final import tensors_sha256
from psjob.contract import WIRE, keys
from psjob.process.status_client import ask_shard
from psjob.wire import auth
from psjob.wire.auth import Peer
from psjob.wire.frame import (
    HEADER_BYTES,
    MAX_BODY,
    MAX_JSON,
    Flag,
    Header,
    Kind,
    parse,
    run_digest,
)
from psjob.wire.stream_pool import STRANGERS
from psjob.wire.tcp import Part, StreamClosed
from psjob.worker.connection import ShardConnection
from psjob_client.local.process import Listening
from psjob_client.local.status import ask_status
from psjob_operator.cluster import observe
from tests.live.live_shards import Worker, all_well, aside, eventually, serving
from tests.live.shard_processes import HELLO, RUN, Idle, hello, idle, processes, read_all, settled, sized
from tests.live.training import batch, loss_of, train_step
from tests.support.fuzzing import Change, byte_changes, changed_bytes, changed_json, counts, fuzz, json_changes
from tests.support.reference import reference
from tests.support.runkeys import RUN as FLOOD_RUN
from tests.support.runkeys import RUN as KEYS
from tests.support.runkeys import get, write_certificates
from tests.support.soaking import rotating

__all__ = ["idle"]


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


def in_frames(count: int) -> bytes:
    """A hello of so many frames of MAX_JSON bytes each and one more, of blanks that JSON skips."""
    head = Header(Kind.HELLO, Flag.MORE, run=run_digest(RUN), start=1).sized(b" " * MAX_JSON).pack()
    return (head + b" " * MAX_JSON) * count + hello()


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
    "a shard out of range": hello(body={"role": "shard", "scheme": "none", "index": 5, "attempt": 1, "term": 1}),
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

        thread = aside(drip)
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


# -- while training continues ------------------------------------------------------------------------


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


def test_a_workers_bad_frames_cost_it_its_stream_and_nothing_else(tmp_path: Path, undisturbed: str) -> None:
    """After hello: wrong sizes, unknown blocks, clocks ahead, damage. Each ends the stream; the worker dials again and continues."""

    def frames(worker: Worker) -> list[list[Part]]:
        session = worker.session
        link = session.links[0]
        block = next(b for b in session.layout.blocks if session.owner[b.index] == 0)
        payload = bytes(block.nbytes)
        head = session.header(Kind.PUSH, block=block.index, clock=session.clock, info=session.exchange._info, attempt=link.attempt)
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
    """A shard that believed it would take the pushes to come for old ones, and the job would wait forever."""
    with serving(tmp_path, workers=2, shards=2) as shards:
        workers = workers_of(shards)
        ends, lies = workers[1].session.ends, [10**9, 1 << 62, 1]
        say = ends.hello

        def lie(link: ShardConnection, host: str) -> dict[str, Any]:
            lying = lies and link is workers[1].session.links[1]
            return say(link, host) | ({"acked": lies.pop()} if lying else {})

        monkeypatch.setattr(ends, "hello", lie)

        def act(worker: Worker) -> None:
            for step in range(STEPS):
                train_step(worker, step)

        all_well(workers, act)
        assert not lies and shards.servers[1].bad_connections == 3
        assert [server.store.counters.applied for server in shards.servers] == [2 * STEPS, 2 * STEPS]
        assert tensors_sha256(workers[0].model.parameters()) == undisturbed


FLOOD = 10_000
TRICKLES = 1000
MEMORY_KIB = 16 << 10


def files_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.rotating
@pytest.mark.parametrize("encryption", ["none", "auto"])
def test_a_flood_costs_a_bounded_number_of_files_and_little_memory(tmp_path: Path, encryption: str) -> None:
    """Meanwhile workers that are there continue, and one more that has a key joins. Strangers of an encrypted run begin TLS with it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    words = GREETING if encryption == "none" else client_hello()
    if encryption != "none":
        write_certificates(tmp_path, 1)
    with processes(tmp_path, shards=1, workers=4, mode="async", encryption=encryption) as run:
        shard = run.start_whole(0)
        address = ("127.0.0.1", int(run.config["shards"][0]["port"]))
        crowd = Crowd(address, "run-1", FLOOD_RUN["workers"], 4, "async", 2, 4096)
        try:
            crowd.join()
            crowd.step()
            flood(address, 2 * STRANGERS, words)  # what the first strangers import stays
            (before,), files = status(shard.pid, ("VmRSS",)), files_of(shard.pid)
            most = [before, files]
            with trickling(address, TRICKLES):
                over = threading.Event()

                def look() -> None:
                    while not over.wait(0.02):
                        most[0] = max(most[0], status(shard.pid, ("VmRSS",))[0])
                        most[1] = max(most[1], files_of(shard.pid))

                watching = aside(look)
                flooding = aside(lambda: flood(address, FLOOD, words))
                steps = 0
                while flooding.is_alive():
                    crowd.step()
                    steps += 1
                again = Crowd(address, "run-1", FLOOD_RUN["workers"], 1, "async", 2, 4096)
                try:
                    again._hello(0)
                    again.wait(lambda: bool(again.clients[0].welcome), 30)
                finally:
                    again.close()
                over.set()
                watching.join()
                flooding.join()
            print(f"{steps} steps under the flood; memory +{(most[0] - before) / 1024:.1f} MiB, files {files} and {most[1]} at most")
            assert most[0] - before <= MEMORY_KIB
            assert most[1] - files <= 3 * STRANGERS
            assert steps > 3
        finally:
            crowd.close()


def test_a_stranger_is_hung_up_on_after_a_second(tmp_path: Path) -> None:
    """Whatever it says meanwhile: nothing, a byte now and then, or a greeting and no proof."""
    with processes(tmp_path, forked=True, shards=1) as run:
        run.start_whole(0)
        address = ("127.0.0.1", int(run.config["shards"][0]["port"]))
        own = auth.greeting(Peer("worker", 0, 1), run_digest("run-1"), bytes(32))
        for first in (b"", own[:10], own):
            with socket.create_connection(address, timeout=60) as sock:
                began = time.monotonic()
                sock.sendall(first)
                with contextlib.suppress(ConnectionResetError):  # what it said was not read
                    while sock.recv(4096):
                        pass
                assert time.monotonic() - began >= 0.9


def test_status_is_told_to_who_has_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the operator and to `psjob run` too. A stranger hears whether the shard lives; an answer of another run is not believed."""

    async def pulled(key: bytes) -> observe.ProgressAnswer:
        async with aiohttp.ClientSession() as session:
            return await observe.pull(session, "127.0.0.1", key)

    with processes(tmp_path, forked=True, shards=1) as run:
        run.start(0)
        port = int(run.config["shards"][0]["statusPort"])
        assert eventually(lambda: run.get(0, contract.STARTED_PATH)[0] == 200, 60)
        assert ask_shard("127.0.0.1", port, FLOOD_RUN["questions"])["run"] == "run-1"
        monkeypatch.setattr(observe, "STATUS_PORT", port)
        assert (asyncio.run(pulled(FLOOD_RUN["questions"])).status or {}).get("run") == "run-1"
        assert asyncio.run(pulled(FLOOD_RUN["workers"])) == observe.ProgressAnswer(problem=observe.UNKNOWN_KEY)
        assert (asyncio.run(ask_status(Listening("127.0.0.1", 0, port), FLOOD_RUN["questions"], 2.0)) or {}).get("run") == "run-1"
        assert get(port, contract.HEALTH_PATH) == (200, {"alive": True})
        assert get(port, contract.STARTED_PATH) == (200, {"started": True})
        nonce = get(port, contract.CHALLENGE_PATH)[1]["nonce"]
        path, right = contract.STATUS_PATH, keys.question(FLOOD_RUN["questions"], nonce, contract.STATUS_PATH)
        others = keys.question(FLOOD_RUN["workers"], nonce, path)
        for proof in (None, "", "x", f"{nonce} ", f"{nonce} {right[::-1]}", f"9{nonce} {right}", f"{nonce} {others}"):
            code, body = get(port, path, {} if proof is None else {contract.PROOF_HEADER: proof})
            assert code == 403 and "run-1" not in str(body) and set(body) == {"error"}
        assert get(port, contract.HISTORY_PATH, {contract.PROOF_HEADER: f"{nonce} {right}"})[0] == 403, "a proof is for one path"
        assert get(port, path, {contract.PROOF_HEADER: f"{nonce} {right}"})[0] == 200
        assert get(port, path, {contract.PROOF_HEADER: f"{nonce} {right}"})[0] == 403, "and for one question"
        with pytest.raises(OSError, match="403"):
            ask_shard("127.0.0.1", port, b"another key of 32 bytes".ljust(32))


MOST = 4 << 20
"""Bytes of memory for one case on this side."""
KEPT = 4 << 20
"""Bytes that the shard's process may have more after all cases: what it imports and caches."""
GREETING_FUZZ = auth.greeting(Peer("worker", 0, 1), run_digest(RUN), bytes(auth.NONCE_BYTES))


@counts(100, 10_000)
def test_changed_streams_end_and_the_process_lives(idle: Idle, cases: int) -> None:
    def make(random: Random) -> tuple[bool, bytes]:
        if random.random() < 0.4:
            return False, changed_bytes(GREETING_FUZZ, byte_changes(random)) + random.randbytes(random.choice((0, 32, 300)))
        body = changed_json(HELLO, json_changes(random))
        raw = hello(body=body) if random.random() < 0.5 else changed_bytes(hello(body=body), byte_changes(random))
        return True, raw + sized(random.choice(tuple(Kind)), random.choice((0, 1, 1 << 20, 1 << 63)))

    def read(case: tuple[bool, bytes]) -> None:
        proven, raw = case
        to = idle.dial(proven)
        with to.sock:
            to.sock.settimeout(30)
            to.say(raw)
            try:
                to.sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            assert RUN.encode() not in read_all(to.sock)

    fuzz(50, make, read, MOST)
    before = settled(idle)
    fuzz(cases, make, read, MOST)
    assert idle.process.poll() is None and idle.status()["state"] == "waiting"
    assert settled(idle) - before <= KEPT


QUESTION = "GET {path} HTTP/1.1\r\nHost: shard\r\n{header}: {nonce} {proof}\r\nConnection: close\r\n\r\n"


@counts(150, 20_000)
def test_changed_questions_are_refused_or_answered(idle: Idle, cases: int) -> None:
    """Who has not the key hears nothing of the run."""

    def make(random: Random) -> tuple[str, list[Change], bool]:
        path = random.choice((contract.STATUS_PATH, contract.HISTORY_PATH, contract.CHALLENGE_PATH, contract.HEALTH_PATH, "/x"))
        return path, byte_changes(random), random.random() < 0.3

    def read(case: tuple[str, list[Change], bool]) -> None:
        path, changes, right = case
        nonce = get(idle.status_port, contract.CHALLENGE_PATH, seconds=30)[1]["nonce"] if right else "0" * 96
        proof = keys.question(KEYS["questions"] if right else bytes(32), nonce, path)
        raw = QUESTION.format(path=path, header=contract.PROOF_HEADER, nonce=nonce, proof=proof).encode()
        with socket.create_connection(("127.0.0.1", idle.status_port), timeout=30) as sock:
            try:
                sock.sendall(changed_bytes(raw, changes))
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            assert right or b'"pushes"' not in read_all(sock)

    fuzz(cases, make, read, MOST)
    assert idle.process.poll() is None
    assert ask_shard("127.0.0.1", idle.status_port, KEYS["questions"], seconds=30)["run"] == RUN
