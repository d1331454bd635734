"""Strangers, and the job's own processes with wrong keys, at the port by which a stage's worker waits for its neighbours."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from psjob.contract import keys
from psjob.layout import structures
from psjob.modes.stages import Stages
from psjob.wire.auth import Peer
from psjob.wire.frame import Flag, Header, Kind
from tests.live.live_shards import SECONDS, eventually, serving
from tests.live.test_impostors import DIGEST, OTHER, Attempt, Dialled, frame
from tests.live.test_stage_pipeline import Cluster, StageWorker, compare
from tests.runkeys import RUN

MICROBATCHES, AT = 4, 2
LINK = keys.link(RUN["workers"], {0: 1, 1: 1})
"""The key of the link between the two workers, one of which was taken over."""
HEAD, PARTS = structures.write((torch.full((3, 16), 7.0), 1))
BODY = HEAD + b"".join(map(bytes, PARTS))


def proving(key: bytes, peer: Peer, *frames: Header, run: bytes = DIGEST, body: bytes = b"") -> Attempt:
    """A handshake, and then frames, of which the last has `body`."""

    def attempt(to: Dialled) -> None:
        seals = to.greet(key, peer, run)
        if seals is not None:
            for header in frames:
                last = header is frames[-1]
                to.say(seals[0].on(header.sized(body if last else b"").pack()), body if last else b"")

    return attempt


def own(kind: Kind, **fields: int) -> Header:
    told = {"view": 1, "start": 1, "worker": 0} | fields
    return Header(kind, run=DIGEST, **told)  # type: ignore[arg-type]


STANDS = own(Kind.STANDS, clock=AT)
GIVES = own(Kind.ACTIVATION, clock=AT, block=1, part=len(HEAD))
NOBODY: dict[str, Attempt] = {
    "noise": lambda to: to.say(b"\xff" * 300),
    "HTTP": lambda to: to.say(b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n" + bytes(100)),
    "a frame without a handshake": lambda to: to.say(frame(Kind.ACTIVATION, BODY, clock=AT, block=1)),
    "the key of worker 0": proving(keys.worker(RUN["workers"], 0, 1), Peer("worker", 0, 1), STANDS, GIVES, body=BODY),
    "a link's key of another run": proving(keys.link(OTHER["workers"], {0: 1, 1: 1}), Peer("worker", 0, 1), STANDS, GIVES, body=BODY),
    "another run's name": proving(LINK, Peer("worker", 0, 1), STANDS, GIVES, run=bytes(16), body=BODY),
    "as a shard": proving(LINK, Peer("shard", 0, 1), STANDS, GIVES, body=BODY),
    "as the next start": proving(LINK, Peer("worker", 0, 2), STANDS, GIVES, body=BODY),
    "as itself": proving(LINK, Peer("worker", 1, 1), STANDS, GIVES, body=BODY),
    "as a rank beyond all": proving(LINK, Peer("worker", 1 << 30, 1), STANDS, GIVES, body=BODY),
}
TAKEN_OVER: dict[str, Attempt] = {
    "no word of where it stands": proving(LINK, Peer("worker", 0, 1), GIVES, body=BODY),
    "another worker's frame": proving(LINK, Peer("worker", 0, 1), STANDS._replace(worker=1), GIVES, body=BODY),
    "another view": proving(LINK, Peer("worker", 0, 1), STANDS._replace(view=9), GIVES, body=BODY),
    "gradients from the stage before": proving(LINK, Peer("worker", 0, 1), STANDS, GIVES._replace(kind=Kind.GRADIENT), body=BODY),
    "a step far ahead": proving(LINK, Peer("worker", 0, 1), STANDS, GIVES._replace(clock=AT + 2), body=BODY),
    "a micro-batch beyond all": proving(LINK, Peer("worker", 0, 1), STANDS, GIVES._replace(block=1 << 20), body=BODY),
    "a head longer than the frame": proving(LINK, Peer("worker", 0, 1), STANDS, GIVES._replace(part=1 << 19), body=BODY),
    "no structure": proving(LINK, Peer("worker", 0, 1), STANDS, GIVES, body=b"x" * len(BODY)),
    "a push": proving(LINK, Peer("worker", 0, 1), STANDS, own(Kind.PUSH, clock=AT, flags=Flag.STORE), body=BODY),
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
        runner = threading.Thread(target=cluster.run, daemon=True)
        runner.start()
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
