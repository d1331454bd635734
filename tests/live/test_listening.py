"""The script's own thread reads the answers that it waits for; a link's thread reads what comes otherwise."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from psjob.api.recording import ResumeRecorder
from psjob.wire.frame import Kind
from psjob.wire.tcp import StreamClosed
from psjob.worker import connection as worker_link
from psjob.worker.connection import REST_SECONDS, ReadLock, ShardConnection, WorkerLane
from tests.live.live_shards import Worker, all_well, eventually, serving

pytestmark = pytest.mark.usefixtures("last_words")
STEPS = 60


def worker_of(shards: object, **stateful: object) -> Worker:
    model = torch.nn.ParameterList([torch.zeros(500), torch.zeros(500)])
    return Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=0.5), overlap=False, **stateful)  # type: ignore[arg-type]


def step(worker: Worker) -> None:
    for p in worker.model.parameters():
        p.grad = torch.ones_like(p)
    worker.optimizer.step()


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
        worker = worker_of(served)
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
        worker = worker_of(served)
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
        all_well([worker_of(served)], act)


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
    rested = threading.Thread(target=rest, daemon=True)
    rested.start()
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
    rested = threading.Thread(target=turn.rest, daemon=True)
    rested.start()
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
