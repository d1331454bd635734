"""Several streams between a worker and a shard: blocks are spread over them, and what breaks one loses and doubles nothing."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from psjob.checkpoint.final import tensors_sha256
from psjob.wire import tcp
from psjob.wire.frame import Header, Kind, WireError, dump
from psjob.wire.handshake import greet
from psjob.worker.connection import WorkerLane
from tests.live.live_shards import SECONDS, Shards, Worker, all_well, eventually, serving
from tests.support.soaking import rotating

STREAMS = 3


pytestmark = pytest.mark.usefixtures("last_words")


def worker_of(shards: Shards, rank: int) -> Worker:
    model = nn.Linear(64, 64)
    for p in model.parameters():
        nn.init.zeros_(p)
    return Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=1.0))


def count(worker: Worker, steps: int) -> None:
    """Every step of every worker adds 1 to every weight (in sync: their mean does)."""
    for _ in range(steps):
        for p in worker.model.parameters():
            p.grad = torch.full_like(p, -1.0)
        worker.optimizer.step()


def weights(shards: Shards) -> set[float]:
    return {n for s in shards.servers for c in s.store.cells.values() if c.state is not None for n in c.state.weights.tolist()}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_all_lanes_carry_blocks_and_each_push_counts_once(tmp_path: Path, mode: str) -> None:
    sent: Counter[int] = Counter()
    plain = WorkerLane.send_block

    def counted(lane: WorkerLane, header: Header) -> None:
        sent[lane.link.lanes.index(lane)] += 1
        plain(lane, header)

    with serving(tmp_path, workers=2, shards=2, mode=mode, streams=STREAMS) as shards, mock.patch.object(WorkerLane, "send_block", counted):
        workers = [worker_of(shards, rank) for rank in range(2)]
        all_well(workers, lambda worker: count(worker, 20))
        assert weights(shards) == {20.0 if mode == "sync" else 40.0}
        assert sum(s.store.counters.duplicates for s in shards.servers) == 0
    assert set(sent) == set(range(STREAMS)), "every lane has blocks"


def test_lanes_give_the_bits_of_one_stream(tmp_path: Path) -> None:
    def run(streams: int) -> str:
        (tmp_path / str(streams)).mkdir()
        with serving(tmp_path / str(streams), workers=2, shards=1, streams=streams) as shards:
            workers = [worker_of(shards, rank) for rank in range(2)]

            def act(worker: Worker) -> None:
                generator = torch.Generator().manual_seed(worker.rank)
                for _ in range(8):
                    for p in worker.model.parameters():
                        p.grad = torch.randn(p.shape, generator=generator)
                    worker.optimizer.step()

            all_well(workers, act)
            return tensors_sha256(workers[0].model.parameters())

    assert run(1) == run(STREAMS)


@pytest.mark.parametrize("mode", ["sync", rotating("async")])
def test_lanes_that_break_lose_and_double_nothing(tmp_path: Path, mode: str) -> None:
    over, stepped = threading.Event(), threading.Event()
    draw = random.Random(1)

    def break_some(workers: list[Worker]) -> None:
        while not over.wait(draw.random() * 0.02):
            # One break a step at most: where dialling takes longer than the time between two breaks, nobody would get on.
            if not stepped.wait(0.1):
                continue
            stepped.clear()
            link = draw.choice(draw.choice(workers).session.links)
            for lane in draw.sample(link.lanes, min(1, len(link.lanes))):
                lane.stream.close()

    with serving(tmp_path, workers=2, shards=2, mode=mode, streams=STREAMS) as shards:
        workers = [worker_of(shards, rank) for rank in range(2)]
        breaker = threading.Thread(target=break_some, args=(workers,), daemon=True)

        def act(worker: Worker) -> None:
            if worker.rank == 0:
                breaker.start()
            for _ in range(40):
                count(worker, 1)
                stepped.set()
                time.sleep(0.002)
            if worker.rank == 0:
                over.set()
                breaker.join(SECONDS)

        all_well(workers, act)
        assert weights(shards) == {40.0 if mode == "sync" else 80.0}


def test_streams_within_one_host_are_not_paced(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1) as shards:
        worker = worker_of(shards, 0)
        worker.attach()
        for stream in (worker.session.links[0].lanes[0].stream, shards.servers[0].sessions[0].stream):
            chosen = stream.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert chosen.rstrip(b"\0") == b"reno"
        assert worker.leave() == 0


def test_a_lane_needs_the_token_of_its_session_and_carries_blocks_only(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1, streams=STREAMS) as shards:
        worker = worker_of(shards, 0)
        worker.attach()
        server, link = shards.servers[0], worker.session.links[0]
        count(worker, 1)
        known = server.sessions[0]
        assert eventually(lambda: len(known.lanes) == STREAMS)

        def ask(body: dict[str, object]) -> str:
            stream = tcp.again(link.lanes[0].stream, 5.0)
            greet(stream, shards.place(0), 0)
            stream.send_json(worker.session.header(Kind.HELLO), {"role": "worker"} | body)
            header = stream.recv_header(10.0)
            said = str(stream.recv_json(header).get("error"))
            stream.close()
            return said

        assert "belongs to another session" in ask({"lane": 1, "token": "0" * 32})
        assert "belongs to another session" in ask({"lane": 1})
        assert f"at most {STREAMS}" in ask({"lane": 1, "token": known._token})
        assert not known.done.is_set(), "a stranger's lane harms no session"
        with pytest.raises(WireError, match="first stream"):
            known._handle(known.lanes[1], worker.session.header(Kind.REPORT))
        link.lanes[1].stream.send(worker.session.header(Kind.REPORT), dump({"loss": 1.0}))
        assert eventually(known.done.is_set), "what broke the rule ends the session"
        count(worker, 2)
        assert weights(shards) == {3.0}
        assert worker.leave() == 0
