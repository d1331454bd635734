"""A stranger who knows the run, the source code and every message of the protocol hears nothing of the model and changes nothing.

- A stranger who knows the run, the source code and every message of the protocol: it hears nothing of the model and changes nothing.
- Who answers at a shard's address, and has proven nothing, writes no line of its own into a worker's log.
- Strangers, and the job's own processes with wrong keys, at the port by which a stage's worker waits for its neighbours.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from psjob.checkpoint.final import tensors_sha256
from psjob.contract import keys
from psjob.layout import structures
from psjob.modes.stages import Stages
from psjob.process.config import Config, ProcessContext, ShardAddress
from psjob.wire import auth, tcp
from psjob.wire.auth import GREETING_BYTES, Peer, ShardIdentity, Unproven
from psjob.wire.frame import HEADER_BYTES, Flag, Header, Kind, dump, parse, run_digest
from psjob.wire.handshake import greet
from psjob.wire.unauthenticated import STRANGER_LETTERS, one_line
from tests.live.live_shards import NEVER, SECONDS, Shards, Worker, all_well, aside, eventually, serving
from tests.live.stage_workers import Cluster, StageWorker, compare
from tests.live.training import batch, build, loss_of, train_step
from tests.support.reference import reference
from tests.support.relay import DIALLER, Relay, parts
from tests.support.runkeys import RUN, handed
from tests.support.soaking import rotating

STEPS = 30
NAME = "run-1"
DIGEST = run_digest(NAME)
HELLO = {"role": "worker", "fresh": True, "term": 1, "restore_id": 1 << 20, "table": [], "layout": "x", "rule": "sgd", "mode": "sync",
         "codecs": ["none"], "transports": ["tcp", "shared"], "push": "none", "pull": "none", "acked": 0, "attempt": 0}  # fmt: skip
PEER = {"role": "shard", "index": 1, "attempt": 9, "term": 10**17, "serving": True, "restore_id": 0, "mode": "sync", "carried": 0}
OTHER = {name: os.urandom(keys.SIZE) for name in RUN}
"""The keys of another run of the same cluster."""
OWN = keys.worker_key(RUN["workers"], 1, 1)
"""The key of worker 1, which was taken over."""


class Dialled:
    """A connection to a shard; what comes is kept."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.sock = socket.create_connection(address, timeout=SECONDS)
        self.heard = b""

    def say(self, *raw: bytes) -> None:
        try:
            self.sock.sendall(b"".join(raw))
        except OSError:
            pass  # hung up on

    def read(self, size: int) -> bytes:
        """So many bytes, or fewer where the shard hangs up."""
        raw = b""
        try:
            while len(raw) < size and (part := self.sock.recv(size - len(raw))):
                raw += part
        except OSError:
            pass
        self.heard += raw
        return raw

    def end(self) -> bytes:
        """All that was heard, once the shard has hung up."""
        began = time.monotonic()
        self.read(1 << 20)
        assert time.monotonic() - began < SECONDS, "the shard did not hang up"
        self.sock.close()
        return self.heard

    def greet(self, key: bytes, peer: Peer, run: bytes = DIGEST) -> tuple[auth.Seal, auth.Seal] | None:
        """The whole handshake with that key, whether the shard answers rightly or not; None where it hung up."""
        greeting = auth.greeting(peer, run, os.urandom(32))
        self.say(greeting)
        challenge = self.read(auth.CHALLENGE_BYTES)
        if len(challenge) < auth.CHALLENGE_BYTES:
            return None
        proof = auth.proof(key, greeting + challenge)
        self.say(proof)
        return auth.seals(key, greeting + challenge + proof)


Attempt = Callable[[Dialled], None]


def frame(kind: Kind, body: bytes = b"", **fields: int) -> bytes:
    """A frame as a worker of rank 0 would send it."""
    told = {"term": 1, "attempt": 1, "start": 1, "info": 1} | fields
    return Header(kind, run=DIGEST, **told).sized(body).pack() + body  # type: ignore[arg-type]


BODIES = {
    Kind.HELLO: dump(HELLO), Kind.INIT: bytes(64), Kind.PUSH: bytes(64), Kind.EARLY: bytes(64), Kind.PEER: dump(PEER),
    Kind.REPORT: dump({"metrics": {"loss": 0.0}}), Kind.CHECKPOINT: dump({}), Kind.STOP: dump({}), Kind.RECORD: bytes(16),
    Kind.INFO: dump({"hyperparameters": [{}], "none": []}), Kind.LOOKUP: bytes(8), Kind.ROW_PUSH: bytes(16),
    Kind.ROW_IDS: bytes(8),
}  # fmt: skip


def unproven(kind: Kind) -> Attempt:
    """That message without a handshake, after a hello."""
    return lambda to: to.say(frame(Kind.HELLO, BODIES[Kind.HELLO]), frame(kind, BODIES.get(kind, b""), clock=1 << 20))


def proving(key: bytes, peer: Peer, run: bytes = DIGEST, hello: bytes = BODIES[Kind.HELLO], **fields: int) -> Attempt:
    """A handshake as `peer` with that key, then a hello and a pull of every block that there may be."""

    def attempt(to: Dialled) -> None:
        seals = to.greet(key, peer, run)
        if seals is None:
            return
        own = {"worker": peer.index if peer.role == "worker" else -1 - peer.index, "start": peer.number} | fields
        for raw in (frame(Kind.HELLO, hello, **own), *(frame(Kind.PULL, b"", block=block, request=block + 1, **own) for block in range(4))):
            to.say(seals[0].on(raw[:HEADER_BYTES]), raw[HEADER_BYTES:])

    return attempt


def saying(*words: Callable[[Dialled], bytes]) -> Attempt:
    """Each part in turn, which may read what the shard said before."""

    def attempt(to: Dialled) -> None:
        for word in words:
            to.say(word(to))

    return attempt


def greeting(peer: Peer = Peer("worker", 0, 1), **changes: bytes) -> Callable[[Dialled], bytes]:
    return lambda to: auth.greeting(peer, changes.get("run", DIGEST), bytes(32))


def challenge(to: Dialled) -> bytes:
    return to.read(auth.CHALLENGE_BYTES)


def shortened(by: int) -> Callable[[Dialled], bytes]:
    return lambda to: auth.greeting(Peer("worker", 0, 1), DIGEST, bytes(32))[:-by]


def cut(to: Dialled) -> bytes:
    to.sock.shutdown(socket.SHUT_WR)
    return b""


def reflected(to: Dialled) -> bytes:
    """The shard's own proof."""
    return challenge(to)[-auth.PROOF_BYTES :]


def unsealed(key: bytes, peer: Peer) -> Attempt:
    """A right handshake, and then frames that anybody could have put onto the stream."""

    def attempt(to: Dialled) -> None:
        if to.greet(key, peer) is not None:
            to.say(frame(Kind.HELLO, BODIES[Kind.HELLO], worker=peer.index), frame(Kind.PULL, b"", worker=peer.index, request=1))

    return attempt


def old(version: int) -> bytes:
    raw = auth.greeting(Peer("worker", 0, 1), DIGEST, bytes(32))
    return raw[:4] + version.to_bytes(2, "little") + raw[6:]


RANK0, RANK1 = Peer("worker", 0, 1), Peer("worker", 1, 1)
ATTEMPTS: dict[str, Attempt] = {f"{kind.name} without a handshake": unproven(kind) for kind in Kind} | {
    "no key": proving(b"", RANK0),
    "a key of zeros": proving(bytes(32), RANK0),
    "a guessed key": proving(b"psjob".ljust(32), RANK0),
    "the run as the key": proving(NAME.encode(), RANK0),
    "another run's worker key": proving(keys.worker_key(OTHER["workers"], 0, 1), RANK0),
    "another run's worker key, and its run": proving(keys.worker_key(OTHER["workers"], 0, 1), RANK0, run_digest("run-2")),
    "another run's shard key": proving(keys.shard_key(OTHER["shards"], 1, 1), Peer("shard", 1, 1), hello=dump(PEER)),
    "this run's worker, said to be of another run": proving(OWN, RANK1, run_digest("run-2")),
    "a worker's key as another rank": proving(OWN, RANK0),
    "a worker's key as its next start": proving(OWN, Peer("worker", 1, 2)),
    "a worker's key as the last start": proving(OWN, Peer("worker", 1, 2**32 - 1)),
    "a worker's key as a rank that is none": proving(OWN, Peer("worker", 2**31 - 1, 1)),
    "a worker's key as shard 1": proving(OWN, Peer("shard", 1, 1), hello=dump(PEER)),
    "a worker's key as shard 0": proving(OWN, Peer("shard", 0, 1), hello=dump(PEER | {"index": 0})),
    "a worker's key as a shard's early word": proving(OWN, Peer("shard", 1, 9), hello=dump(PEER | {"early": True})),
    "a worker that says another rank": proving(OWN, RANK1, worker=0),
    "a worker that says a later start": proving(OWN, RANK1, start=2),
    "a worker that says the last start": proving(OWN, RANK1, start=2**32 - 1),
    "a worker that says to be a shard": proving(OWN, RANK1, hello=dump(PEER)),
    "a worker of another run's digest": proving(OWN, RANK1, hello=b"{}"),
    "a right handshake without seals": unsealed(OWN, RANK1),
    "the shard's proof sent back": saying(greeting(), reflected),
    "the shard's proof sent back, as a shard": saying(greeting(Peer("shard", 1, 1)), reflected),
    "the challenge sent back": saying(greeting(), challenge),
    "an empty proof": saying(greeting(), challenge, lambda to: bytes(32), lambda to: frame(Kind.PULL, b"", request=1)),
    "a greeting that is cut": saying(shortened(1), cut),
    "half a greeting": saying(shortened(32), cut),
    "a greeting and no more": saying(greeting()),
    "nothing at all": lambda to: None,
    "a greeting of version 1": saying(lambda to: old(1)),
    "a greeting of version 0": saying(lambda to: old(0)),
    "a role that is none": saying(lambda to: auth.greeting(RANK0, DIGEST, bytes(32))[:6] + b"\x07" + bytes(57)),
    "the scheme none": saying(lambda to: frame(Kind.HELLO, dump(HELLO | {"scheme": "none"}))),
    "a challenge instead of a greeting": saying(lambda to: auth.challenge(bytes(32), b"", ShardIdentity(0, 1, 1), bytes(32))),
    "many greetings": saying(*[greeting()] * 9),
    "a proof first": saying(lambda to: os.urandom(auth.PROOF_BYTES) * 4),
    "a frame with a lane's token": saying(lambda to: frame(Kind.HELLO, dump({"role": "worker", "lane": 1, "token": "0" * 32}))),
    "LEAVE for every rank": saying(lambda to: b"".join(frame(Kind.LEAVE, b"", worker=rank, clock=0) for rank in range(2))),
    "a push with flag STORE": saying(lambda to: frame(Kind.PUSH, bytes(64), flags=Flag.STORE)),
}


def told(heard: bytes) -> list[bytes]:
    """The bodies of all frames that were heard behind a challenge. Fails where one tells anything but an error."""
    at = auth.CHALLENGE_BYTES if heard.startswith(auth.MAGIC) else 0
    bodies = []
    while at < len(heard):
        header = parse(heard[at : at + HEADER_BYTES], sealed=True)
        assert header.kind is Kind.ERROR, header
        bodies.append(heard[at + HEADER_BYTES : at + HEADER_BYTES + header.length])
        at += HEADER_BYTES + header.length
    return bodies


@pytest.fixture(scope="module")
def undisturbed() -> str:
    torch.set_num_threads(1)
    model = build()
    reference(model, "sgd", [{"lr": 0.1, "momentum": 0.9}], lambda step: [batch(step, rank) for rank in range(2)], loss_of, STEPS)
    return tensors_sha256(model.parameters())


def workers_of(shards: Shards, build: Callable[[], nn.Module] = build) -> list[Worker]:
    models = [build() for _ in range(2)]
    return [Worker(shards, rank, m, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)) for rank, m in enumerate(models)]


def test_no_attempt_hears_or_changes_anything(tmp_path: Path, undisturbed: str) -> None:
    """Each at both shards while two workers train; the weights are those of a run that nobody disturbed, and the folder holds its files."""
    assert len(ATTEMPTS) >= 40
    heard: dict[tuple[str, int], bytes] = {}
    over = threading.Event()

    def attack(index: int, address: tuple[str, int]) -> None:
        for name, attempt in ATTEMPTS.items():
            to = Dialled(address)
            attempt(to)
            heard[name, index] = to.end()

    with serving(tmp_path, workers=2, shards=2) as shards:
        attackers = [threading.Thread(target=attack, args=(index, shards.address(index)), daemon=True) for index in range(2)]
        workers = workers_of(shards)

        def act(worker: Worker) -> None:
            for step in range(STEPS):
                if step == 3 and worker.rank == 0:
                    for thread in attackers:
                        thread.start()
                if step == STEPS - 3 and worker.rank == 0:
                    for thread in attackers:
                        thread.join(100)
                    over.set()
                train_step(worker, step)

        all_well(workers, act)
        assert over.is_set() and len(heard) == 2 * len(ATTEMPTS)
        for (name, index), raw in heard.items():
            for body in told(raw):
                assert NAME.encode() not in body and json.loads(body)["code"] == "protocol", (name, index, body)
        assert tensors_sha256(workers[0].model.parameters()) == undisturbed
        assert [server.store.term for server in shards.servers] == [1, 1]
        assert [server.store.counters.applied for server in shards.servers] == [2 * STEPS, 2 * STEPS]
        assert [path.name for path in shards.folder.glob("CLAIM-*")] == ["CLAIM-000001"]


# -- between a worker and its shard -----------------------------------------------------------------------------------------------


class Meddler(Relay):
    """Sits on the road to a shard: `meddle` says what becomes of each frame that a worker sends, once."""

    def __init__(self, port: int, meddle: Callable[[bytes, int], bytes]) -> None:
        self._meddle = meddle
        self.done = threading.Event()
        self.recorded = b""
        """The first stream as the worker has sent it."""
        super().__init__(port, self._frames)

    def _frames(self, near: socket.socket) -> Iterator[bytes]:
        first, count = not self.recorded, 0
        for header, raw in parts(near, DIALLER):
            self.recorded += raw if first else b""
            count += header is not None
            changed = raw if header is None or self.done.is_set() else self._meddle(raw, count)
            if changed != raw:
                self.done.set()
            yield changed


def flipped(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


AFTER = 12
MEDDLING: dict[str, Callable[[bytes, int], bytes]] = {
    "nothing": lambda raw, count: raw,
    "a header's clock is changed": lambda raw, count: flipped(raw, 52) if count == AFTER else raw,
    "a header's flags are changed": lambda raw, count: flipped(raw, 10) if count == AFTER else raw,
    "a header's length is changed": lambda raw, count: flipped(raw, 96) if count == AFTER else raw,
    "a seal is changed": lambda raw, count: flipped(raw, HEADER_BYTES - 8) if count == AFTER else raw,
    "a frame is left out": lambda raw, count: b"" if count == AFTER else raw,
    "a frame is sent twice": lambda raw, count: raw + raw if count == AFTER else raw,
    "a frame is put before it": lambda raw, count: frame(Kind.LEAVE, b"", worker=1, clock=0) + raw if count == AFTER else raw,
}

QUICK = {"a header's clock is changed", "a frame is left out", "a frame is sent twice", "a frame is put before it"}
"""A changed header, and each way in which the order of frames can change."""


@pytest.mark.parametrize("name", [name if name in QUICK else rotating(name) for name in MEDDLING])
def test_who_sits_between_ends_a_stream_and_no_more(tmp_path: Path, undisturbed: str, name: str) -> None:
    """The worker dials again and the weights are the same to the bit. The stream that was recorded is then of no use to anybody."""
    with serving(tmp_path, workers=2, shards=2, transport="tcp") as shards:
        between = Meddler(shards.address(0)[1], MEDDLING[name])
        workers = workers_of(shards)
        state = workers[1].session.state
        config = state.place.config
        led = replace(config.shards[0], host="127.0.0.1", port=between.port)
        state.place = replace(state.place, config=replace(config, shards=(led, *config.shards[1:])))

        def act(worker: Worker) -> None:
            for step in range(STEPS):
                train_step(worker, step)
                if step == STEPS // 2 and worker.rank == 0:
                    to = Dialled(shards.address(0))
                    to.say(between.recorded)
                    told(to.end())

        try:
            all_well(workers, act)
        finally:
            between.close()
        assert between.done.is_set() == (name != "nothing")
        assert tensors_sha256(workers[0].model.parameters()) == undisturbed
        assert [server.store.counters.applied for server in shards.servers] == [2 * STEPS, 2 * STEPS]


EVIL = "no\n2026-11-26 psjob: all is well\x1b[2J\x1b]0;owned\x07\u202e\u2028\r" + "x" * 5000


def test_the_refusal_of_an_impostor_is_one_printable_line() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = int(listener.getsockname()[1])

    def answer() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(GREETING_BYTES)
            raw = dump({"code": "protocol", "error": EVIL[:3000]})
            sock.sendall(Header(Kind.ERROR).sized(raw).pack() + raw)
            sock.recv(1)

    threading.Thread(target=answer, daemon=True).start()
    config = Config("job", "run-1", "0" * 64, "sync", 5, None, 1, (ShardAddress("127.0.0.1", port, 0),), NEVER, "AllWorkers", 10.0, 60.0)
    place = ProcessContext("worker", 0, "run-1", 1, 0, 0, "worker-0", config, None, None, 0, "", handed("worker", 0, 1))
    (stream,) = tcp.connect("127.0.0.1", port, 5.0)
    try:
        with pytest.raises(Unproven) as caught:
            greet(stream, place, 0)
    finally:
        stream.close()
        listener.close()
    text = str(caught.value)
    assert text.isprintable() and text.startswith("it refuses this process: no 2026") and len(text) <= STRANGER_LETTERS + 30


def test_one_line() -> None:
    said = one_line(EVIL, 100)
    assert said.isprintable() and len(said) == 100 and said.startswith("no 2026-11-26 psjob: all is well [2J")
    assert one_line(None, 10) == "None" and one_line("a sentence: ü", 50) == "a sentence: ü"


MICROBATCHES, AT = 4, 2
LINK = keys.link_key(RUN["workers"], {0: 1, 1: 1})
"""The key of the link between the two workers, one of which was taken over."""
HEAD, PARTS = structures.encode_structure((torch.full((3, 16), 7.0), 1))
BODY = HEAD + b"".join(map(bytes, PARTS))


def proving_link(key: bytes, peer: Peer, *frames: Header, run: bytes = DIGEST, body: bytes = b"") -> Attempt:
    """A handshake, and then frames, of which the last has `body`."""

    def attempt(to: Dialled) -> None:
        seals = to.greet(key, peer, run)
        if seals is not None:
            for header in frames:
                last = header is frames[-1]
                to.say(seals[0].on(header.sized(body if last else b"").pack()), body if last else b"")

    return attempt


def own(kind: Kind, **fields: int) -> Header:
    told = {"term": 1, "start": 1, "worker": 0} | fields
    return Header(kind, run=DIGEST, **told)  # type: ignore[arg-type]


STANDS = own(Kind.STANDS, clock=AT)
GIVES = own(Kind.ACTIVATION, clock=AT, block=1, part=len(HEAD))
NOBODY: dict[str, Attempt] = {
    "noise": lambda to: to.say(b"\xff" * 300),
    "HTTP": lambda to: to.say(b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n" + bytes(100)),
    "a frame without a handshake": lambda to: to.say(frame(Kind.ACTIVATION, BODY, clock=AT, block=1)),
    "the key of worker 0": proving_link(keys.worker_key(RUN["workers"], 0, 1), Peer("worker", 0, 1), STANDS, GIVES, body=BODY),
    "a link's key of another run": proving_link(
        keys.link_key(OTHER["workers"], {0: 1, 1: 1}), Peer("worker", 0, 1), STANDS, GIVES, body=BODY
    ),
    "another run's name": proving_link(LINK, Peer("worker", 0, 1), STANDS, GIVES, run=bytes(16), body=BODY),
    "as a shard": proving_link(LINK, Peer("shard", 0, 1), STANDS, GIVES, body=BODY),
    "as the next start": proving_link(LINK, Peer("worker", 0, 2), STANDS, GIVES, body=BODY),
    "as itself": proving_link(LINK, Peer("worker", 1, 1), STANDS, GIVES, body=BODY),
    "as a rank beyond all": proving_link(LINK, Peer("worker", 1 << 30, 1), STANDS, GIVES, body=BODY),
}
TAKEN_OVER: dict[str, Attempt] = {
    "no word of where it stands": proving_link(LINK, Peer("worker", 0, 1), GIVES, body=BODY),
    "another worker's frame": proving_link(LINK, Peer("worker", 0, 1), STANDS._replace(worker=1), GIVES, body=BODY),
    "another term": proving_link(LINK, Peer("worker", 0, 1), STANDS._replace(term=9), GIVES, body=BODY),
    "gradients from the stage before": proving_link(LINK, Peer("worker", 0, 1), STANDS, GIVES._replace(kind=Kind.GRADIENT), body=BODY),
    "a step far ahead": proving_link(LINK, Peer("worker", 0, 1), STANDS, GIVES._replace(clock=AT + 2), body=BODY),
    "a micro-batch beyond all": proving_link(LINK, Peer("worker", 0, 1), STANDS, GIVES._replace(block=1 << 20), body=BODY),
    "a head longer than the frame": proving_link(LINK, Peer("worker", 0, 1), STANDS, GIVES._replace(part=1 << 19), body=BODY),
    "no structure": proving_link(LINK, Peer("worker", 0, 1), STANDS, GIVES, body=b"x" * len(BODY)),
    "a push": proving_link(LINK, Peer("worker", 0, 1), STANDS, own(Kind.PUSH, clock=AT, flags=Flag.STORE), body=BODY),
}


def attacked(folder: Path, act: Callable[[tuple[str, int]], None]) -> None:
    """`act` is done while worker 1 waits within a step, and the job has the bits of a calm one."""
    reached, done, address = threading.Event(), threading.Event(), []

    def before(worker: StageWorker, what: str, step: int, micro: int) -> None:
        if (worker.rank, what, step, micro) == (1, "take ACTIVATION", AT, 1) and not reached.is_set():
            links = worker.session.stage_links
            assert links is not None
            address.append(("127.0.0.1", links.listen("127.0.0.1")))
            reached.set()
            assert done.wait(SECONDS)

    with serving(folder, workers=2, shards=1, stages=Stages((1, 1))) as shards:
        cluster = Cluster(shards, MICROBATCHES, before)
        runner = aside(cluster.run)
        try:
            assert reached.wait(SECONDS)
            act(address[0])
        finally:
            done.set()
        runner.join(SECONDS)
        assert not runner.is_alive() and len(cluster.ended) == 2 and not (cluster.died or cluster.rewound)
        compare(cluster, MICROBATCHES)


def test_who_has_not_the_key_of_a_link_is_hung_up_on(tmp_path: Path) -> None:
    def act(address: tuple[str, int]) -> None:
        for name, attempt in NOBODY.items():
            to = Dialled(address)
            attempt(to)
            heard = to.end()
            assert len(heard) <= 120 and b"run-1" not in heard, (name, heard)

    attacked(tmp_path, act)


@pytest.mark.parametrize("name", list(TAKEN_OVER))
def test_a_neighbour_that_was_taken_over_says_what_it_may_not(tmp_path: Path, name: str) -> None:
    """Its stream is closed; the right process links again."""

    def act(address: tuple[str, int]) -> None:
        to = Dialled(address)
        TAKEN_OVER[name](to)
        to.end()

    attacked(tmp_path, act)


def test_many_streams_of_strangers_leave_a_neighbour_its_place(tmp_path: Path) -> None:
    """They are closed within a second, and the worker of the stage before is linked again meanwhile."""

    def act(address: tuple[str, int]) -> None:
        held = [Dialled(address) for _ in range(300)]
        assert eventually(lambda: all(_closed(one) for one in held))

    def _closed(one: Dialled) -> bool:
        one.sock.settimeout(0.01)
        try:
            return one.sock.recv(1) == b""
        except TimeoutError:
            return False
        except OSError:
            return True

    attacked(tmp_path, act)
