"""Rows in memory that workers and shards of one host lend each other: the same bits as over TCP, whoever dies or goes mad meanwhile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psjob as ps
from psjob.layout import memory
from psjob.shard import row_frames as rowlending
from psjob.shard.table import RowGradient
from psjob.wire.frame import LENT_ANSWERS, LENT_PUSHES, Kind, WireError
from psjob.wire.shared_memory import PAGE, Offer, Region, SharedMemoryBroker
from psjob.worker.exits import SessionEnd
from psjob.worker.rows import LOOKUPS, RowSharing
from tests.live.embeddings import adagrad, rows_of, steps
from tests.live.live_shards import SECONDS, Shards, Worker, all_well, aside, at_once, eventually, serving, severed

ROWS, DIM = 40, 4


@pytest.fixture(autouse=True)
def _last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("PSJOB_TERMINATION_LOG", str(tmp_path / "last-words"))


def one_table(rows: int = ROWS, dim: int = DIM, **options: Any) -> nn.Module:
    return nn.ModuleDict({"user": ps.Embedding(rows, dim, **{"init": "zeros"} | options)})


def worker_of(shards: Shards, rank: int = 0, model: nn.Module | None = None, **options: Any) -> Worker:
    model = one_table() if model is None else model
    return Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=1.0), **options)


def step(worker: Worker, *ids: int) -> None:
    worker.optimizer.zero_grad()
    worker.model["user"](torch.tensor(ids)).sum().backward()
    worker.optimizer.step()


def held(shards: Shards, rows: int = ROWS, dim: int = DIM) -> torch.Tensor:
    """The table as the shards have it."""
    found = torch.zeros(rows, dim)
    for server in shards.servers:
        table = server.store.row_cells[0].table.export()
        found[table["ids"]] = table["weights"]
    return found


def staged(worker: Worker) -> int:
    """Pushes of the last clock that lie in lent memory."""
    return len(worker.session.rows.sharing._places)


def expected(*counts: tuple[int, float]) -> torch.Tensor:
    found = torch.zeros(ROWS, DIM)
    for row, value in counts:
        found[row] = value
    return found


# -- the same, and where it lies -------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_rows_have_the_bits_that_they_have_over_tcp(tmp_path: Path, mode: str) -> None:
    """Two tables, workers and shards; in async one worker, since two come as they like."""
    ends: dict[str, list[torch.Tensor]] = {}
    for transport in ("tcp", "auto"):
        (tmp_path / transport).mkdir()

        def act(worker: Worker, transport: str = transport) -> None:
            steps(6)(worker)
            assert staged(worker) == (4 if transport == "auto" else 0)
            if worker.rank == 0:
                ends[transport] = rows_of(worker.model)

        workers = 2 if mode == "sync" else 1
        with serving(tmp_path / transport, workers=workers, shards=2, mode=mode, transport=transport) as shards:
            all_well([adagrad(shards, rank) for rank in range(workers)], act)
            want = "shared" if transport == "auto" else "tcp"
            assert {server.sessions[0].transport for server in shards.servers} == {want}
    assert all(torch.equal(a, b) for a, b in zip(ends["tcp"], ends["auto"], strict=True))


def test_rows_are_lent_where_blocks_are_not(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1) as shards:
        worker = worker_of(shards, overlap=True)

        def act(worker: Worker) -> None:
            step(worker, 1, 2)
            assert staged(worker) == 1 and shards.servers[0].sessions[0].transport == "mixed"

        all_well([worker], act)
        assert torch.equal(held(shards), expected((1, -1.0), (2, -1.0)))


def test_more_lookups_than_there_are_places_bring_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the largest width, at which a lookup has 16 rows: two places for three lookups, in any order of their answers."""
    monkeypatch.setattr("psjob.worker.rows.LOOKUPS", 2)
    with serving(tmp_path, workers=1, shards=1) as shards:
        worker = worker_of(shards, model=one_table(dim=65536, init="uniform"))

        def act(worker: Worker) -> None:
            rows = worker.model["user"](torch.arange(ROWS)).detach()
            assert torch.equal(rows, worker.model["user"](torch.arange(ROWS).flip(0)).detach().flip(0))
            assert torch.equal(rows, shards.servers[0].store.row_cells[0].table.pull(torch.arange(ROWS))) and bool(rows.any())
            assert sorted(worker.session.rows._free[0]) == [0, 1]

        all_well([worker], act)


def test_rows_asked_for_early_hold_up_none_of_this_step(tmp_path: Path) -> None:
    """More tables than a shard takes lookups at a time: those of the next step are held until this one is made."""
    names = [f"t{number}" for number in range(LOOKUPS + 2)]
    model = nn.ModuleDict({name: ps.Embedding(ROWS, DIM, init="zeros") for name in names})
    ids = torch.arange(4)

    def act(worker: Worker) -> None:
        for step in range(3):
            for name in names:
                model[name].prefetch(ids)
            worker.optimizer.zero_grad()
            rows = torch.stack([model[name](ids + 1) for name in names])
            assert bool((rows[:, :3] == -0.1 * step).all())
            rows.sum().backward()
            worker.optimizer.step()

    with serving(tmp_path, workers=1, shards=1) as serve:
        all_well([Worker(serve, 0, model, torch.optim.SGD(model.parameters(), lr=0.1))], act)


def test_a_push_that_does_not_fit_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psjob.worker.rows.LENT_PUSHES", PAGE)
    monkeypatch.setattr(rowlending, "LENT_PUSHES", PAGE)
    with serving(tmp_path, workers=1, shards=1) as shards:
        worker = worker_of(shards, model=one_table(1000))

        def act(worker: Worker) -> None:
            step(worker, *range(1000))
            assert staged(worker) == 0
            step(worker, *range(100))
            assert staged(worker) == 1

        all_well([worker], act)
        assert torch.equal(held(shards, 1000), torch.cat([torch.full((100, DIM), -2.0), torch.full((900, DIM), -1.0)]))


def test_out_of_reach_means_tcp(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path, workers=1, shards=2) as shards:
        shards.servers[1].context.broker.close()  # type: ignore[union-attr]
        worker = worker_of(shards)

        def act(worker: Worker) -> None:
            step(worker, *range(ROWS))
            assert staged(worker) == 1

        all_well([worker], act)
        assert torch.equal(held(shards), torch.full((ROWS, DIM), -1.0))
    assert "shard 1: its memory for rows is out of reach" in caplog.text


# -- nothing lost ----------------------------------------------------------------------------------


def test_a_push_that_is_sent_again_is_read_where_it_lies(tmp_path: Path) -> None:
    """Its stream breaks before the shard has heard of it; the next session reads it from the same memory."""
    with serving(tmp_path, workers=1, shards=1) as shards:
        worker = worker_of(shards)

        def act(worker: Worker) -> None:
            rows = worker.model["user"](torch.tensor([3, 5])).sum()
            with severed(worker.session.links[0]):
                assert eventually(lambda: not worker.session.links[0].lanes)
                rows.backward()
                pushing = aside(worker.optimizer.step)
                assert eventually(lambda: any(h.kind is Kind.ROW_PUSH for h in worker.session.links[0].outstanding.values()))
            pushing.join(SECONDS)
            assert staged(worker) == 1
            step(worker, 5)

        all_well([worker], act)
        assert torch.equal(held(shards), expected((3, -1.0), (5, -2.0)))
        assert shards.servers[0].store.counters.duplicates == 0


def test_what_a_dead_worker_pushed_is_read_after_its_death(tmp_path: Path) -> None:
    """Its memory is the shard's too: what it had pushed counts when the other one comes, and its successor continues."""
    with serving(tmp_path, workers=2, shards=1) as shards:
        workers = [worker_of(shards, rank) for rank in range(2)]
        at_once(*(worker.attach for worker in workers))
        stays, dies = workers
        pushing = aside(lambda: step(dies, 7))
        pending = shards.servers[0].store.row_cells[0].pending
        assert eventually(lambda: shards.servers[0].store.clocks()[1] == 1 and (1, 0) in pending)
        dies.session._end(SessionEnd("lost"))
        pushing.join(SECONDS)
        dies.die()
        dies.session.withdraw()
        dies.session.rows.sharing._pushes = None
        step(stays, 7)
        assert torch.equal(held(shards), expected((7, -1.0)))
        stays.die()


def test_ids_that_change_after_their_check_change_nothing(tmp_path: Path) -> None:
    """A push waits for another worker's; meanwhile its own worker writes ids into its memory that no table has."""
    with serving(tmp_path, workers=2, shards=1) as shards:
        workers = [worker_of(shards, rank) for rank in range(2)]
        at_once(*(worker.attach for worker in workers))
        pending = shards.servers[0].store.row_cells[0].pending
        pushing = aside(lambda: step(workers[0], 1, 2))
        assert eventually(lambda: (0, 0) in pending)
        region = workers[0].session.rows.sharing._pushes
        assert region is not None
        ids = memory.lent(region, 0, 2, "int64")
        assert ids.tolist() == [1, 2]
        ids.copy_(torch.tensor([-5, 1 << 40]))
        grad = pending[0, 0].grad
        assert isinstance(grad, RowGradient) and grad.ids.tolist() == [1, 2]
        step(workers[1], 2)
        pushing.join(SECONDS)
        assert torch.equal(held(shards), expected((1, -0.5), (2, -1.0)))
        for worker in workers:
            worker.die()


def test_a_forks_rows_reach_no_shard(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1) as shards:
        worker = worker_of(shards)

        def act(worker: Worker) -> None:
            step(worker, 1)
            region = worker.session.rows.sharing._pushes
            assert region is not None
            ids = memory.lent(region, 0, 1, "int64")
            if (child := os.fork()) == 0:
                ids.fill_(9)
                os._exit(0 if ids.tolist() == [9] else 1)
            assert os.waitpid(child, 0)[1] == 0
            assert ids.tolist() == [1]

        all_well([worker], act)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1) as shards:
        found: list[os.stat_result] = []

        def work(worker: Any) -> None:
            step(worker, *range(ROWS))
            lending = shards.servers[0].sessions[0].row_frames._lending
            assert lending is not None
            found.append(os.fstat(lending.answers.fd))

        all_well([worker_of(shards)], work)
        assert found[0].st_nlink == 0, "it has no name in any folder"
        assert found[0].st_size == LENT_ANSWERS
        assert found[0].st_blocks * 512 < 1 << 20, "memory comes as it is touched"
        assert eventually(lambda: shards.servers[0].sessions[0].row_frames._lending is None), "it goes with the session"


def shared_with() -> tuple[SharedMemoryBroker, RowSharing]:
    """A worker's side of memory that was handed over at this counter."""
    counter, theirs = SharedMemoryBroker("test"), Region.lend(LENT_ANSWERS)

    def give(fd: int) -> Region:
        os.close(fd)
        return theirs

    sharing = RowSharing(1)
    sharing.take(0, Offer(counter.address, counter.expect(give), LENT_ANSWERS))
    return counter, sharing


def test_what_is_withdrawn_takes_no_push_more() -> None:
    """A link may push again just then: what is there stays there, what is not is sent."""
    counter, sharing = shared_with()
    ids, grads = torch.arange(3), torch.ones(3, DIM)
    place = sharing.stage(0, 0, ids, grads)
    assert place == (0, 3 * (8 + 4 * DIM))
    sharing.withdraw()
    assert sharing.stage(0, 0, ids, grads) == place and sharing.stage(0, 1, ids, grads) is None
    counter.close()


def test_a_handover_that_fails_leaves_none_before_it() -> None:
    """The shard may have gone over to the memory that did not arrive."""
    counter, sharing = shared_with()
    assert sharing.answers(0) is not None
    with pytest.raises(OSError, match="did not take"):
        sharing.take(0, Offer(counter.address, "0" * 32, LENT_ANSWERS))
    assert sharing.answers(0) is None
    counter.close()


def test_only_what_was_agreed_is_borrowed() -> None:
    sharing = RowSharing(1)
    with pytest.raises(WireError, match=f"lends {LENT_PUSHES} bytes for rows, expected {LENT_ANSWERS}"):
        sharing.take(0, Offer("x", "y", LENT_PUSHES))


def test_where_each_index_is_a_machine_only_the_same_index_shares_memory(tmp_path: Path) -> None:
    """Blocks and rows alike; what is pushed counts all the same."""
    with serving(tmp_path, workers=2, shards=2, sharing="index") as shards:
        workers = [worker_of(shards, rank, nn.ModuleDict({"user": one_table()["user"], "dense": nn.Linear(4, 4)})) for rank in range(2)]

        def act(worker: Worker) -> None:
            for _ in range(3):
                step(worker, *range(ROWS))

        all_well(workers, act)
        roads = [[server.sessions[rank].transport for rank in range(2)] for server in shards.servers]
        assert roads == [["shared", "tcp"], ["tcp", "shared"]]
        assert torch.equal(held(shards), torch.full((ROWS, DIM), -3.0))
