"""Rows on real shards in this process: what torch's embeddings do alone, many workers do together with rows on the shards."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import psjob as ps
from psjob.embeddings.embedding import RowModule
from psjob.shard import server
from psjob.worker.exits import SessionEnd
from tests.live.embeddings import DIM, OPTIMIZERS, ROWS, Clicks, batch, loss_of, offloaded, plain, rows_of, steps
from tests.live.live_shards import SECONDS, Rewound, Worker, all_well, aside, at_once, eventually, serving, severed
from tests.support.covering import each_value

pytestmark = pytest.mark.usefixtures("last_words")


@pytest.mark.parametrize(("name", "shards"), each_value(sorted(OPTIMIZERS), [3, 1]))
def test_workers_and_shards_are_near_plain_torch(tmp_path: Path, name: str, shards: int) -> None:
    make = OPTIMIZERS[name]
    held: dict[int, list[torch.Tensor]] = {}

    def act(worker: Worker) -> None:
        steps(8)(worker)
        held[worker.rank] = rows_of(worker.model)

    with serving(tmp_path, workers=2, shards=shards) as serve:
        workers = [Worker(serve, rank, model, make(model)) for rank, model in enumerate(offloaded() for _ in range(2))]
        all_well(workers, act)
    torch.testing.assert_close(held[0], rows_of(plain(make, 8, 2)), rtol=0, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(held[0], held[1], strict=True))


def test_runs_are_equal_bit_for_bit_whoever_comes_first(tmp_path: Path) -> None:
    found = []
    for seed in range(3):
        folder = tmp_path / str(seed)
        with serving(folder, workers=3, shards=2, transport=("auto", "tcp", "auto")[seed]) as serve:
            model = offloaded(optimizer="rowwise_adagrad", lr=0.2)
            workers = [Worker(serve, 0, model, OPTIMIZERS["sgd"](model))]
            for rank in (1, 2):
                other = offloaded(optimizer="rowwise_adagrad", lr=0.2)
                workers.append(Worker(serve, rank, other, OPTIMIZERS["sgd"](other)))

            def act(worker: Worker, seed: int = seed) -> None:
                steps(6, random.Random(10 * seed + worker.rank))(worker)
                if worker.rank == 0:
                    found.append(rows_of(worker.model))

            all_well(workers, act)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_accumulation_clipping_and_a_schedule_reach_the_rows(tmp_path: Path) -> None:
    """Two backward passes a step over common ids, clip_grad_norm_ over everything, and a learning rate that falls."""

    def make(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, falls: torch.optim.lr_scheduler.LRScheduler) -> None:
        for step in range(6):
            optimizer.zero_grad()
            for part in range(2):
                loss_of(model, step, part).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            assert float(norm) > 0.5
            optimizer.step()
            falls.step()

    alone = Clicks()
    train(alone, *make(alone))
    model = offloaded()
    optimizer, falls = make(model)
    held: list[list[torch.Tensor]] = []

    def act(worker: Worker) -> None:
        train(worker.model, worker.optimizer, falls)
        held.append(rows_of(worker.model))

    with serving(tmp_path, workers=1, shards=2) as serve:
        all_well([Worker(serve, 0, model, optimizer)], act)
    torch.testing.assert_close(held[0], rows_of(alone), rtol=0, atol=1e-6)


def test_a_found_inf_skips_the_rows_of_all(tmp_path: Path) -> None:
    """Rank 1's scaled gradient overflows only in its rows: nobody's step counts, and its scaler hears of it."""
    before = rows_of(Clicks())
    held: dict[int, list[torch.Tensor]] = {}
    scales: dict[int, float] = {}

    def act(worker: Worker) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        users, pages, _ = batch(0, worker.rank)
        out = worker.model.user(users).sum() + worker.model.pages(pages).sum()
        scaler.scale(out).backward()
        for module in (worker.model.head.weight, worker.model.head.bias):
            module.grad = torch.zeros_like(module)
        if worker.rank == 1:
            landed = worker.model.user._landed
            landed.grads[0, 0] = float("inf")
            worker.model.user.anchor.grad.fill_(float("inf"))
        scaler.step(worker.optimizer)
        scaler.update()
        scales[worker.rank] = scaler.get_scale()
        held[worker.rank] = rows_of(worker.model)

    with serving(tmp_path, workers=2, shards=1) as serve:
        workers = [Worker(serve, rank, model, OPTIMIZERS["sgd"](model)) for rank, model in enumerate(offloaded() for _ in range(2))]
        all_well(workers, act)
    assert scales[1] == 2.0**9
    for rank in range(2):
        assert all(torch.equal(a, b) for a, b in zip(held[rank], before, strict=True))


def test_open_ids_come_lazily_and_alike_everywhere(tmp_path: Path) -> None:
    """Rows of any int64 begin with values that follow from seed, table and id, on one shard and on three, in a job and out of it."""
    ids = torch.tensor([-(1 << 62), -5, 0, 7, 123456789, 1 << 62])
    found = []

    class Open(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = ps.Embedding(None, 6, scale=0.1, seed=9)

    def act(worker: Worker) -> None:
        with torch.no_grad():
            found.append(worker.model.rows(ids))
        for _ in range(2):
            worker.optimizer.zero_grad()
            worker.model.rows(ids[2:]).sum().backward()
            worker.optimizer.step()
        found.append(worker.model.rows(ids).detach())

    for shards in (1, 3):
        folder = tmp_path / str(shards)
        with serving(folder, workers=1, shards=shards) as serve:
            model = Open()
            all_well([Worker(serve, 0, model, torch.optim.SGD(model.parameters(), lr=0.5))], act)
    model = Open()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ps.attach(model, optimizer)
    worker = type("Here", (), {"model": model, "optimizer": optimizer})()
    act(worker)
    assert all(torch.equal(found[0], first) and torch.equal(found[1], last) for first, last in zip(found[::2], found[1::2], strict=True))
    assert torch.equal(found[0][:2], found[1][:2])
    torch.testing.assert_close(found[1][2:], found[0][2:] - 1.0)


def test_async_workers_see_their_own_updates(tmp_path: Path) -> None:
    def act(worker: Worker) -> None:
        ids = torch.tensor([worker.rank * 10 + 1, worker.rank * 10 + 2])
        for _ in range(5):
            with torch.no_grad():
                before = worker.model.user(ids)
            worker.optimizer.zero_grad()
            worker.model.user(ids).sum().backward()
            worker.optimizer.step()
            with torch.no_grad():
                torch.testing.assert_close(worker.model.user(ids), before - 0.1, rtol=0, atol=1e-6)

    with serving(tmp_path, workers=2, shards=2, mode="async") as serve:
        workers = [Worker(serve, rank, model, OPTIMIZERS["sgd"](model)) for rank, model in enumerate(offloaded() for _ in range(2))]
        all_well(workers, act)
        assert [server.store.counters.duplicates for server in serve.servers] == [0, 0]


@pytest.mark.parametrize(("mode", "transport"), each_value(["sync", "bounded", "async"], ["tcp", "auto"]))
def test_broken_streams_lose_and_double_no_row(tmp_path: Path, mode: str, transport: str) -> None:
    """Links are cut in the middle of training, with lookups and pushes on their way; the sum of all updates is exact."""
    count = 12

    def act(worker: Worker) -> None:
        chance = random.Random(worker.rank)
        ids = torch.arange(ROWS)
        for step in range(count):
            worker.optimizer.zero_grad()
            if step % 3 == 1:
                with severed(worker.session.links[chance.randrange(2)]):
                    pass
            worker.model.user(ids).sum().backward()
            if step % 3 == 2:
                with severed(worker.session.links[chance.randrange(2)]):
                    pass
            worker.optimizer.step()

    with serving(tmp_path, workers=2, shards=2, mode=mode, transport=transport) as serve:
        workers = [Worker(serve, rank, model, OPTIMIZERS["sgd"](model)) for rank, model in enumerate(offloaded() for _ in range(2))]
        all_well(workers, act)
        now = torch.empty(ROWS, DIM)
        for server in serve.servers:
            rows = server.store.row_cells[0].table.export()
            now[rows["ids"]] = rows["weights"]
    pushes = count if mode == "sync" else 2 * count
    torch.testing.assert_close(now, Clicks().user.weight.detach() - 0.1 * pushes, rtol=0, atol=1e-4)


def test_who_returns_to_a_table_that_has_moved_on_rewinds(tmp_path: Path) -> None:
    """A process died when its rows were pushed and its blocks were not; its successor must not mix rows and weights of two clocks."""
    with serving(tmp_path, workers=2, shards=1) as serve:
        models = [offloaded() for _ in range(3)]
        stays, dies = (Worker(serve, rank, models[rank], OPTIMIZERS["sgd"](models[rank])) for rank in range(2))
        at_once(stays.attach, dies.attach)
        loss_of(dies.model, 0, 1).backward()
        with mock.patch.object(dies.session.links[0], "send_block"):
            pushing = aside(dies.optimizer.step)
            assert eventually(lambda: len(serve.servers[0].store.admission.rows[1].open) == 2)
            dies.session._end(SessionEnd("lost"))
            pushing.join(SECONDS)
            dies.die()
        again = Worker(serve, 1, models[2], OPTIMIZERS["sgd"](models[2]), start=2)
        again.attach()
        assert again.session.clock == 0
        loss_of(stays.model, 0, 0).backward()
        aside(stays.optimizer.step)
        assert eventually(lambda: serve.servers[0].store.row_cells[0].n == 1)
        with pytest.raises(Rewound):
            loss_of(again.model, 0, 1)


def test_rows_of_the_next_step_are_asked_for_early_and_never_stale(tmp_path: Path) -> None:
    """What was prefetched is used, and is the row after the step of everybody; without a step between it is not taken."""
    used: list[bool] = []

    def act(worker: Worker) -> None:
        ids = torch.arange(20)
        module: RowModule = worker.model.user
        was = torch.empty(0)
        for step in range(6):
            time.sleep(0.01 * worker.rank)  # the other one is late with each push
            early = module._early
            worker.optimizer.zero_grad()
            rows = module(ids)
            if step:
                used.append(early is not None and module._early is None)
            if step:
                torch.testing.assert_close(rows.detach(), was - 0.1, rtol=0, atol=1e-6)
            was = rows.detach().clone()
            module.prefetch(ids)
            with torch.no_grad():
                assert torch.equal(module(ids), was)  # of this step, not of the next
            rows.sum().backward()
            worker.optimizer.step()

    with serving(tmp_path, workers=2, shards=2) as serve:
        workers = [Worker(serve, rank, model, OPTIMIZERS["sgd"](model)) for rank, model in enumerate(offloaded() for _ in range(2))]
        all_well(workers, act)
    assert used == [True] * 10


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ps.Embedding(3, 2, max_norm=1.0), "max_norm changes rows in the forward pass"),  # type: ignore[arg-type]
        (lambda: ps.EmbeddingBag(3, 2, mode="min"), "mode of an EmbeddingBag is sum, mean or max, got 'min'"),
        (lambda: ps.Embedding(3, 2, 3), "padding_idx is 3, it must be within the 3 rows"),
        (lambda: ps.EmbeddingBag.from_pretrained(torch.zeros(3, 2, dtype=torch.float64)), "first values of rows are float32"),
    ],
)
def test_what_rows_cannot_be_is_named(make: Callable[[], RowModule], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_worker_with_other_tables_is_refused_by_the_first_name(tmp_path: Path, last_words: Path) -> None:
    model, other = offloaded(), offloaded(optimizer="ftrl", lr=0.1)
    with serving(tmp_path, workers=2, shards=1) as serve:
        first = Worker(serve, 0, model, OPTIMIZERS["sgd"](model))
        first.attach()
        second = Worker(serve, 1, other, OPTIMIZERS["sgd"](other))
        with pytest.raises(SystemExit) as end:
            second.attach()
        first.die()
    assert end.value.code == 77
    assert "worker 1's table 0 (user) has rule 'ftrl', the job's (user) 'sgd'" in last_words.read_text()


def test_held_lookups_say_who_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WAITING_SECONDS", 0.05)
    with serving(tmp_path, workers=2, shards=1) as serve:
        models = [offloaded(), offloaded()]
        workers = [Worker(serve, rank, model, OPTIMIZERS["sgd"](model)) for rank, model in enumerate(models)]
        for worker in workers:
            worker.attach()
        models[0].user.prefetch(torch.arange(3))
        assert eventually(lambda: "workers [0, 1] (table user" in workers[0].session.links[0].told.waiting)
        assert "workers [0, 1] have not pushed step 0 (table user)" in str(serve.servers[0].job.waiting_for)
        for worker in workers:
            worker.die()


def test_a_rewind_that_comes_while_rows_are_awaited_is_carried_out(tmp_path: Path) -> None:
    """A shard is lost in the middle of a forward pass: the script begins anew, and does not die of it."""
    with serving(tmp_path, workers=1, shards=1) as serve:
        model = offloaded()
        worker = Worker(serve, 0, model, OPTIMIZERS["sgd"](model))
        worker.attach()
        asked = worker.session.rows.ask(0, torch.arange(3), 5)  # of a step that nobody makes

        def rewind() -> None:
            time.sleep(0.1)
            serve.servers[0].drop_sessions(rewind=True)

        threading.Thread(target=rewind, daemon=True).start()
        with pytest.raises(Rewound):
            worker.model.user._road.collect(asked)
