"""Several streams between a worker and a shard: blocks are spread over them, and what breaks one loses and doubles nothing.

- What a shard holds of a worker is bounded, and the bound never stops a job, in whichever orders the blocks come.
- The script's own thread reads the answers that it waits for; a link's thread reads what comes otherwise.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from psjob.api.recording import ResumeRecorder
from psjob.checkpoint.final import tensors_sha256
from psjob.process import system
from psjob.shard.pending import Gradient
from psjob.wire import tcp
from psjob.wire.frame import Header, Kind, WireError, dump
from psjob.wire.handshake import greet
from psjob.wire.tcp import StreamClosed
from psjob.worker import connection as worker_link
from psjob.worker.connection import REST_SECONDS, ReadLock, ShardConnection, WorkerLane
from tests.live.live_shards import SECONDS, Shards, Worker, all_well, aside, eventually, serving
from tests.live.training import push_filled
from tests.support.covering import each_value
from tests.support.soaking import rotating

pytestmark = pytest.mark.usefixtures("last_words")

STREAMS = 3


def worker_of(shards: Shards, rank: int) -> Worker:
    model = nn.Linear(64, 64)
    for p in model.parameters():
        nn.init.zeros_(p)
    return Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=1.0))


def count(worker: Worker, steps: int) -> None:
    """Every step of every worker adds 1 to every weight (in sync: their mean does)."""
    for _ in range(steps):
        push_filled(worker, -1.0)


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


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_streams_by_cores_and_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, transport: str) -> None:
    """On 8 cores a lone worker has 8 streams by shared memory, and 4 over TCP. It tries one beside all of them, and the bits stay."""
    monkeypatch.setattr(system, "cores", lambda: 8)
    monkeypatch.setattr("psjob.protocol.streams.LEAST_BYTES", 1)
    most = 8 if transport == "auto" else 4
    plain, used = WorkerLane.send_block, set[int]()

    def noted(lane: WorkerLane, header: Header) -> None:
        used.add(lane.link.lanes.index(lane))
        plain(lane, header)

    monkeypatch.setattr(WorkerLane, "send_block", noted)

    def run(streams: int | None) -> tuple[str, list[int]]:
        counts: list[int] = []

        def act(worker: Worker) -> None:
            generator = torch.Generator().manual_seed(0)
            for step in range(32):
                if step == 22:
                    worker.session.links[0].close()
                used.clear()
                for p in worker.model.parameters():
                    p.grad = torch.randn(p.shape, generator=generator)
                worker.optimizer.step()
                counts.append(len(used))
            assert worker.session.exchange.trial.over

        with serving(tmp_path / str(streams), workers=1, shards=1, mode=mode, transport=transport, streams=streams) as shards:
            model = nn.Linear(512, 512)
            for p in model.parameters():
                nn.init.zeros_(p)
            worker = Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=1.0))
            all_well([worker], act)
            return tensors_sha256(worker.model.parameters()), counts

    bits, ones = run(1)
    again, counts = run(None)
    assert set(ones) == {1} and again == bits
    assert counts[:8] == [most] * 8 and counts[8:12] == [1] * 4 and counts[12:16] == [most] * 4 and counts[-1] in (1, most)


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


BLOCK = 4096
BLOCKS = 24


class Layers(nn.Module):
    """Each tensor is a group of its own, so a block of its own; `order` is that of the forward pass."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.order = order
        self.parts = nn.ModuleList([Part() for _ in range(BLOCKS)])

    def forward(self) -> torch.Tensor:
        total = torch.zeros(())
        for number in self.order:
            total = self.parts[number](total)
        return total


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(BLOCK // 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=1.0)


class Meter:
    """Bytes in the buffers of each worker at its shard: now, and at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now: Counter[int] = Counter()
        self.most: Counter[int] = Counter()
        lock, begin, free = threading.Lock(), Gradient.__init__, Gradient.free

        def begun(gradient: Any, pool: Any, size: int, block: Any) -> None:
            begin(gradient, pool, size, block)
            with lock:
                self.now[id(pool)] += block.nbytes
                self.most[id(pool)] = max(self.most[id(pool)], self.now[id(pool)])

        def freed(gradient: Any) -> None:
            with lock:
                self.now[id(gradient._pool)] -= gradient.flat.numel() * 4
            free(gradient)

        monkeypatch.setattr(Gradient, "__init__", begun)
        monkeypatch.setattr(Gradient, "free", freed)


@pytest.mark.parametrize(("blocks", "overlap"), each_value([1, 3, 8], [False, True]))
def test_four_workers_at_once_stay_within_their_credit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, overlap: bool) -> None:
    """One is late, so the others push all that they may; early data has half of a worker's share."""
    meter, limit = Meter(monkeypatch), blocks * BLOCK * (1 + overlap)
    with serving(tmp_path, workers=4, shards=1, gradients=4 * blocks * BLOCK * (1 + overlap), transport="tcp") as shards:
        models = [Layers(list(range(BLOCKS))) for _ in range(4)]
        workers = [Worker(shards, rank, model, sgd(model), overlap=overlap) for rank, model in enumerate(models)]

        def act(worker: Worker) -> None:
            for step in range(4):
                worker.optimizer.zero_grad()
                if worker.rank == 3 and step == 1:
                    assert eventually(lambda: list(meter.most.values()).count(limit) >= 3), "the others did not use their credit"
                worker.model().backward()
                if overlap:
                    time.sleep(0.02)
                worker.optimizer.step()

        all_well(workers, act)
    assert len(meter.most) == 4 and max(meter.most.values()) == limit
    assert not any(meter.now.values())
    assert all(torch.equal(p, torch.full_like(p, -4.0)) for model in models for p in model.parameters())


@pytest.mark.parametrize("blocks", [1, rotating(2), 10, rotating(1 << 10)])
def test_workers_whose_blocks_are_ready_in_different_orders(tmp_path: Path, blocks: int) -> None:
    """Sums in rank order need every worker's block: a credit that early data and pushes shared would stop them here."""
    with serving(tmp_path, workers=3, shards=2, gradients=3 * blocks * BLOCK) as shards:
        orders = [list(range(BLOCKS)), list(reversed(range(BLOCKS))), [*range(0, BLOCKS, 2), *range(1, BLOCKS, 2)]]
        models = [Layers(order) for order in orders]
        workers = [Worker(shards, rank, model, sgd(model), overlap=True) for rank, model in enumerate(models)]

        def act(worker: Worker) -> None:
            for _ in range(6):
                worker.optimizer.zero_grad()
                worker.model().backward()
                worker.optimizer.step()

        all_well(workers, act)
    assert all(torch.equal(p, torch.full_like(p, -6.0)) for model in models for p in model.parameters())


STEPS = 60


def listener_of(shards: object, **stateful: object) -> Worker:
    model = torch.nn.ParameterList([torch.zeros(500), torch.zeros(500)])
    return Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=0.5), overlap=False, **stateful)  # type: ignore[arg-type]


def step(worker: Worker) -> None:
    push_filled(worker, 1.0)


@pytest.mark.parametrize("shards", [1, 2])
def test_answers_are_read_by_who_waits_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    readers: Counter[bool] = Counter()
    take = ShardConnection.take

    def noted(link: ShardConnection, lane: WorkerLane) -> Kind:
        kind = take(link, lane)
        readers[threading.current_thread().name.startswith("link-")] += kind is Kind.PARAM
        return kind

    monkeypatch.setattr(ShardConnection, "take", noted)
    monkeypatch.setattr(worker_link, "REST_SECONDS", 2.0)  # on a busy machine an answer may take longer than a link's thread rests

    def act(worker: Worker) -> None:
        for _ in range(STEPS):
            step(worker)

    with serving(tmp_path, workers=1, shards=shards) as served:
        worker = listener_of(served)
        all_well([worker], act)
        assert worker.model[0][0] == -0.5 * STEPS
    assert readers[False] > readers[True] > 0, "and those of the first step, or of one that came late, by the link's"


@pytest.mark.parametrize("error", [StreamClosed("broken"), KeyboardInterrupt()])
def test_what_goes_wrong_as_the_script_reads_is_the_links_to_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    take, met = ShardConnection.take, []

    def broken(link: ShardConnection, lane: WorkerLane) -> Kind:
        if not threading.current_thread().name.startswith("link-") and not met and worker.session.clock > 10:
            met.append(link.index)
            lane.stream.recv_header(1.0)  # a part of the frame was taken
            raise error
        return take(link, lane)

    monkeypatch.setattr(ShardConnection, "take", broken)

    def act(worker: Worker) -> None:
        for number in range(STEPS):
            try:
                step(worker)
            except KeyboardInterrupt:
                worker.session.exchange.finish()
                worker.session.stepped()
                assert number >= 10

    with serving(tmp_path, workers=1, shards=2) as served:
        worker = listener_of(served)
        all_well([worker], act)
        assert met and worker.model[0][0] == worker.model[1][0] == -0.5 * STEPS


def test_a_break_while_the_script_computes_is_seen_soon(tmp_path: Path) -> None:
    def act(worker: Worker) -> None:
        for _ in range(20):
            step(worker)
        before = worker.session.links[0].lanes[0]
        served.servers[0].drop_sessions(False)
        assert eventually(lambda: worker.session.links[0].lanes[:1] not in ([], [before]) and worker.session.links[0].welcomed, 5.0)
        for _ in range(20):
            step(worker)

    with serving(tmp_path, workers=1, shards=1) as served:
        all_well([listener_of(served)], act)


def test_a_turn_is_one_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    soon = REST_SECONDS
    monkeypatch.setattr(worker_link, "REST_SECONDS", 30.0)
    turn, met = ReadLock(), []

    def rest() -> None:
        with pytest.raises(StreamClosed) as raised:
            turn.rest()
        met.append(raised.value)

    turn.take()
    assert not turn.borrow()
    rested = aside(rest)
    assert eventually(lambda: turn._rests) and turn.borrow()
    monkeypatch.setattr(worker_link, "REST_SECONDS", soon)
    turn.call()
    rested.join(20 * soon)
    assert rested.is_alive(), "and comes back only when nobody reads"
    turn.failure = StreamClosed("broken")
    turn.give()
    turn.call()
    assert eventually(lambda: not rested.is_alive()) and met == [turn.failure] and not turn.borrow()


def test_a_call_ends_a_rest_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "REST_SECONDS", 30.0)
    turn = ReadLock()
    turn.take()
    rested = aside(turn.rest)
    assert eventually(lambda: turn._rests)
    began = time.monotonic()
    turn.call()
    rested.join(20.0)
    assert not rested.is_alive() and time.monotonic() - began < 20.0


def test_a_record_that_is_made_ahead_is_that_of_the_edge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[bytes, bytes]] = []
    make = ResumeRecorder.make

    def both(records: ResumeRecorder, cursor: dict[str, int] | None, last: bool = False) -> bytes:
        ready, clock = records._ready, records._session.clock
        record = make(records, cursor, last)
        if ready is not None and not last:
            assert ready == (clock, record)
            made.append((record, records._pack(cursor, clock, last)))
        return record

    monkeypatch.setattr(ResumeRecorder, "make", both)

    def act(worker: Worker) -> None:
        for _ in range(10):
            torch.rand(3)
            step(worker)
            scheduler.step()

    with serving(tmp_path, workers=1, shards=1) as served:
        model = torch.nn.ParameterList([torch.zeros(500)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        all_well([Worker(served, 0, model, optimizer, overlap=False, scheduler=scheduler)], act)
    assert len(made) == 10 and all(one == other for one, other in made)
    assert len({one for one, _ in made}) == 10
