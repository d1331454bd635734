"""Bounded staleness on real shards: what a worker reads is never older than its bound, in any block, whoever is slow, leaves or dies."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from psjob import contract
from psjob.checkpoint import manifest
from psjob.checkpoint.final import tensors_sha256
from psjob.checkpoint.manifest import read_records
from psjob.checkpoint.states import read_states
from psjob.embeddings.embedding import RowModule
from psjob.modes import Bounded
from psjob.process.config import CheckpointConfig
from psjob.resume.record import unpack
from psjob.shard import server
from psjob.shard.deduplication import Admission, Verdict
from psjob.shard.pending import StalenessBound
from tests.e2e.workloads.ledger import Ledger, counted, places
from tests.live.embeddings import Clicks, offloaded
from tests.live.live_shards import (
    NEVER,
    SECONDS,
    Shards,
    Worker,
    all_well,
    aside,
    at_once,
    coordinator,
    eventually,
    serving,
    until_checkpoints,
    within,
)
from tests.live.training import OPTIMIZERS, build
from tests.live.training import steps as train
from tests.support.soaking import rotating
from tests.tensors.desk import Desk, take_snapshot

OFTEN = CheckpointConfig(interval_seconds=0.02, every_steps=None, keep=1000, disabled=False, resume_from=None)

pytestmark = pytest.mark.usefixtures("last_words")


# -- the gate alone ---------------------------------------------------------------------------------


class Schedule:
    """Workers that push blocks in order and continue when each is answered; who is next is drawn by chance."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.workers, self.blocks = chance, chance.randint(1, 4), chance.randint(1, 3)
        self.staleness, self.ends = chance.randint(1, 3), [chance.randint(1, 9) for _ in range(self.workers)]
        self.barrier: int | None = chance.randint(1, 9) if chance.random() < 0.7 else None
        self.table, lock = Admission(self.workers, self.blocks), threading.RLock()
        self.bounds = [StalenessBound(Bounded(self.staleness), self.table, lock, at) for at in range(self.blocks)]
        self.held: dict[int, dict[int, int]] = {}
        """By block: what it had of each worker when it was held at the barrier."""
        self.clock, self.sent, self.waits = [0] * self.workers, [0] * self.workers, [set[int]() for _ in range(self.workers)]

    def run(self) -> None:
        while live := sorted(self.table.live()):
            able = [rank for rank in live if self.sent[rank] < self.blocks or not self.waits[rank]]
            assert able, f"nobody can continue: {self.clock}, staleness {self.staleness}, barrier {self.barrier}"
            self.act(self.chance.choice(able))
            for at, bound in enumerate(self.bounds):
                self.answer(at, bound)

    def act(self, rank: int) -> None:
        if self.sent[rank] == self.blocks:  # all of its clock is answered
            self.clock[rank] += 1
            self.sent[rank] = 0
        if self.clock[rank] == self.ends[rank]:
            self.table.leave(rank, self.clock[rank])
            return
        at = self.sent[rank]
        assert self.table.admit(rank, (1, 0), self.clock[rank], at) is Verdict.ADMIT
        self.sent[rank] += 1
        self.waits[rank].add(at)

    def answer(self, at: int, bound: StalenessBound) -> None:
        """As a cell does: hold it if it is there, then answer who may continue."""
        pushed = self.table.pushed(at)
        if self.barrier is not None and at not in self.held and bound.stands_at(self.barrier):
            self.held[at] = pushed
        goes = bound.goes(self.barrier if at not in self.held else None)
        for rank in [rank for rank, waits in enumerate(self.waits) if at in waits]:
            step = self.clock[rank] + 1
            if not goes(rank, step):
                missing, last = bound.awaited(rank, step, self.barrier if at not in self.held else None)
                assert missing and rank not in missing and all(pushed[other] <= last for other in missing)
                continue
            self.waits[rank].discard(at)
            assert pushed[rank] == step, "it reads what it has pushed itself"
            assert all(pushed[other] >= step - self.staleness for other in self.table.live())


def test_the_bound_holds_in_every_block_on_random_schedules() -> None:
    chance = random.Random(7)
    for _ in range(400):
        schedule = Schedule(chance)
        schedule.run()
        for had in schedule.held.values():
            assert schedule.barrier is not None
            assert had == {rank: min(end, schedule.barrier) for rank, end in enumerate(schedule.ends)}


def test_a_barrier_is_too_late_once_anyone_may_have_passed_it() -> None:
    table = Admission(3, 2)
    bound = StalenessBound(Bounded(3), table, threading.RLock(), 0)
    for rank in (0, 1):
        for clock in range(2):
            table.admit(rank, (1, 0), clock, 0)
            table.admit(rank, (1, 0), clock, 1)
    assert bound.beyond(1) and bound.beyond(2) and not bound.beyond(3)
    table.leave(2, 0)
    assert not bound.beyond(2) and bound.stands_at(2), "all that are left are there, and none beyond"
    table.admit(0, (1, 0), 2, 0)
    assert bound.beyond(2) and bound.passed(2) and not bound.passed(3)


# -- on a desk: checkpoints and what follows from them ----------------------------------------------


@pytest.fixture
def desk_of(tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    """Makes desks in the test's folder; the threads of their shards end with the test."""
    desks: list[Desk] = []

    def make(**options: Any) -> Desk:
        desks.append(Desk(tmp_path, **options))
        return desks[-1]

    yield make
    for desk in desks:
        for shard in desk.servers:
            shard.close()


@pytest.mark.parametrize(
    ("was", "now", "clocks"),
    [
        ("bounded", "sync", [4, 2]),
        ("bounded", "async", [4, 2]),
        ("sync", "bounded", [3, 3]),
        ("sync", "async", [3, 3]),
        ("async", "bounded", [5, 1]),
    ],
)
def test_a_run_goes_on_in_another_mode(desk_of: Callable[..., Desk], was: str, now: str, clocks: list[int]) -> None:
    desk = desk_of(mode=was)
    take_snapshot(desk, desk.begun(), clocks)
    made = desk.manifests()[-1]
    begin = [made.workers[str(rank)]["clock"] for rank in range(2)]
    assert was == made.mode and (begin == clocks if was == "async" else begin[0] == begin[1] == made.step)
    desk = desk_of(mode=now, run="run-2", checkpoint=replace(NEVER, resume_from=str(desk.folder)))
    again = [desk.hello(rank) for rank in range(2)]
    desk.settle()
    assert [clerk.placed["clock"] for clerk in again] == begin
    assert desk.versions() == {made.step if "sync" in (was, now) else sum(begin)}
    for clerk, clock in zip(again, begin, strict=True):
        desk.push(clerk, clock)
    weights = {float(cell.state.weights[0]) for server in desk.servers for cell in server.store.cells.values() if cell.state}
    pushes = made.step if was == "sync" else sum(begin)
    assert weights == {float(pushes + (1 if now == "sync" else 2))}, "in sync the mean of both, else each"


def test_async_workers_are_not_at_one_step_for_sync(desk_of: Callable[..., Desk]) -> None:
    desk = desk_of(mode="async")
    take_snapshot(desk, desk.begun(), [5, 1])
    refused = desk_of(mode="sync", run="run-2", checkpoint=replace(NEVER, resume_from=str(desk.folder))).servers[0]
    assert refused._exit == [contract.EXIT_REFUSED] and "that run was async, this job is sync" in refused.termination_message["error"]


def test_a_worker_that_was_beyond_a_barrier_before_its_shard_returned_gives_it_up(desk_of: Callable[..., Desk]) -> None:
    """A shard that came back takes the order of a snapshot before it meets the worker, which tells of pushes that the shard has lost."""
    desk = desk_of(mode="bounded")
    clerks = desk.begun()
    desk.begin_snapshot()
    desk.settle()
    current, store = desk.c.snapshots.current, desk.servers[0].store
    assert current is not None and current.step == 2 and {cell.barrier for cell in store.cells.values()} == {2}
    with store.lock:
        store.admission.jump(0, 5)
    store.ask_again()
    desk.settle()
    assert desk.c.snapshots.current is not current, "nobody could come to it"
    assert all(cell.barrier in (None, desk.c.snapshots.current and desk.c.snapshots.current.step) for cell in store.cells.values())
    with store.lock:
        store.admission.jump(1, 5)
    store.ask_again()
    for clerk in clerks:
        desk.push(clerk, 5)
    assert store.clocks() == {0: 6, 1: 6}


def test_a_void_snapshot_lets_everybody_go_on(desk_of: Callable[..., Desk]) -> None:
    desk = desk_of(mode="bounded")
    clerks = desk.begun()
    desk.begin_snapshot()
    desk.settle()
    current, store = desk.c.snapshots.current, desk.servers[0].store
    assert current is not None and current.step == 2
    for clock in range(2):
        desk.push(clerks[0], clock)
    held = [waiter for cell in store.cells.values() for waiter in cell.waiters]
    assert {waiter.version for waiter in held} == {2}, "3 clocks ahead are allowed, and yet it waits for the checkpoint"
    desk.servers[0].tick(time.monotonic() + 5.0)
    assert str(desk.servers[0].job.waiting_for).startswith("workers [1] have not pushed step 1 (block ")
    desk.drop_snapshot("a test says so")
    assert not any(cell.waiters for cell in store.cells.values())
    desk.push(clerks[0], 2)
    desk.begin_snapshot()
    desk.settle()
    current = desk.c.snapshots.current
    assert current is not None and current.step == 5, "ahead of the furthest"


# -- real shards ------------------------------------------------------------------------------------


def ledger(shards: Shards, rank: int, start: int = 1, overlap: bool = False) -> Worker:
    model = Ledger()
    return Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=1.0), start=start, overlap=overlap)


def push(worker: Worker) -> None:
    worker.optimizer.zero_grad()
    worker.model(places(worker.rank)).backward()
    worker.optimizer.step()


def seen(worker: Worker, rank: int) -> list[int]:
    """How many pushes of `rank` the weights of each block hold."""
    named = dict(worker.model.named_parameters())
    return [int(named[tensor][element].item()) for _, tensor, element in places(rank)]


def rounds(ends: dict[int, int], staleness: int, seed: int, breaks: float = 0.0, saved: Shards | None = None) -> Callable[[Worker], None]:
    """Each worker makes the steps of `ends` at a speed of its own, and reads after each of them what it may.

    With `saved` at least three checkpoints are taken meanwhile, by these shards.
    """

    def act(worker: Worker) -> None:
        chance = random.Random(100 * seed + worker.rank)
        pace = chance.random() * 0.008
        for turn in range(worker.job.made, ends[worker.rank]):
            if saved is not None:
                until_checkpoints(worker, saved, 4 * turn // max(ends.values()))
            worker.edge(turn)
            if chance.random() < breaks:
                worker.session.links[chance.randrange(len(worker.session.links))].close()
            time.sleep(pace * chance.random())
            push(worker)
            worker.job.wait()
            for other, end in ends.items():
                counts = seen(worker, other)
                if other == worker.rank:
                    assert set(counts) == {turn + 1}, "it reads what it has pushed itself"
                else:
                    assert min(counts) >= min(end, turn + 1 - staleness), f"{other} is at {counts} for step {turn + 1}"
                    assert max(counts) <= min(end, turn + 2 + staleness)

    return act


@pytest.mark.parametrize(("transport", "overlap", "breaks"), [("auto", False, 0.1), rotating("tcp", False, 0.1), ("tcp", True, 0.0)])
def test_nobody_reads_what_is_older_than_the_bound(tmp_path: Path, transport: str, overlap: bool, breaks: float) -> None:
    """Rank 2 is through early; checkpoints are taken all the time, and each is one clock of every worker that is there."""
    ends = {0: 28, 1: 28, 2: 10}
    with serving(tmp_path, workers=3, shards=2, mode="bounded", staleness=2, checkpoint=OFTEN, transport=transport) as shards:
        all_well([ledger(shards, rank, overlap=overlap) for rank in ends], rounds(ends, 2, seed=3, breaks=breaks, saved=shards))
        assert shards.wait_ended() == [0, 0]
    found = [manifest.read_manifest(shards.folder, path.name) for path in sorted(shards.folder.glob("manifest-*.json"))]
    assert len(found) > 3 and found[-1].final
    for made in found:
        states = read_states(shards.folder, made, [block.index for block in made.layout.blocks])
        clocks = {int(rank): int(worker["clock"]) for rank, worker in made.workers.items()}
        assert clocks == {rank: min(made.step, end) if not made.final else end for rank, end in ends.items()}
        for rank, clock in clocks.items():
            for block, tensor, element in places(rank):
                state, n = states[block]
                assert n == sum(clocks.values())
                offset = made.layout.blocks[block].pieces[0].tensor_offset
                assert int(state.weights[element - offset].item()) == clock, (made.name, tensor)
        if not made.final and made.step:
            records = {rank: unpack(raw).step for rank, raw in read_records(shards.folder, made).items()}
            assert records == {rank: made.step for rank, end in ends.items() if made.workers[str(rank)]["leftAt"] is None}


def test_rows_that_are_asked_for_early_are_within_the_bound(tmp_path: Path) -> None:
    """Each push takes 0.1 from every row, so a row tells how many it holds; what was prefetched has the worker's own step."""
    used: list[bool] = []

    def act(worker: Worker) -> None:
        module: RowModule = worker.model.user
        ids, begun = torch.arange(20), Clicks().user.weight.detach()[:20]
        for turn in range(8):
            time.sleep(0.02 * worker.rank)
            early = module._early
            worker.optimizer.zero_grad()
            rows = module(ids)
            used.append(turn == 0 or (early is not None and module._early is None))
            pushes = {round(number) for number in ((begun - rows.detach()) / 0.1).flatten().tolist()}
            assert turn + max(0, turn - 2) <= min(pushes) <= max(pushes) <= 2 * turn + 3
            module.prefetch(ids)
            rows.sum().backward()
            worker.optimizer.step()

    with serving(tmp_path, workers=2, shards=2, mode="bounded", staleness=2) as shards:
        models = [offloaded() for _ in range(2)]
        all_well([Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=0.1)) for rank, model in enumerate(models)], act)
    assert used == [True] * 16


def test_without_staleness_it_is_sync_bit_for_bit(tmp_path: Path) -> None:
    shas = set()
    for mode, staleness in (("bounded", 0), ("sync", None)):
        folder = tmp_path / mode
        with serving(folder, workers=3, shards=2, mode=mode, staleness=staleness) as shards:
            workers = [Worker(shards, rank, model, OPTIMIZERS["nesterov"](model)) for rank, model in enumerate(build() for _ in range(3))]
            all_well(workers, lambda worker: train(8, random.Random(worker.rank))(worker))
            shas |= {tensors_sha256(worker.model.parameters()) for worker in workers}
            made, _ = manifest.newest_manifest(shards.folder, "run-1")
            assert made is not None and made.mode == "sync"
    assert len(shas) == 1


def test_a_worker_that_dies_before_a_barrier_is_waited_for_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is on its way: who is alive stands before its step, and its successor brings everybody over it."""
    monkeypatch.setattr(server, "WAITING_SECONDS", 0.1)
    with serving(tmp_path, workers=2, shards=2, mode="bounded", staleness=3, checkpoint=NEVER) as shards:
        first, other = ledger(shards, 0), ledger(shards, 1)
        at_once(first.attach, other.attach)
        for worker in (first, other):
            rounds({0: 3, 1: 3}, 3, seed=1)(worker)
        other.die()
        machine = coordinator(shards).machine.state
        within(coordinator(shards), lambda: machine.snapshots.ask(machine.now))
        assert eventually(lambda: machine.snapshots.current is not None)
        snapshot = machine.snapshots.current
        assert snapshot is not None and snapshot.step is not None and 3 < snapshot.step <= 6
        ends = {0: 20, 1: 20}
        going = aside(lambda: rounds(ends, 3, seed=1)(first))
        assert eventually(lambda: "workers [1] have not pushed step" in str(shards.servers[0].job.waiting_for))
        assert eventually(lambda: all(one.store.clocks() == {0: snapshot.step, 1: 3} for one in shards.servers))
        assert going.is_alive(), "a barrier, though its bound would let it continue to 7"
        again = ledger(shards, 1, start=2)
        again.attach()
        assert again.session.clock == 3
        rounds(ends, 3, seed=2)(again)
        going.join(SECONDS)
        assert not going.is_alive() and eventually(lambda: machine.progress.committed == 1)
        ended = aside(first.leave)
        assert again.leave() == 0
        ended.join(SECONDS)
        assert shards.wait_ended() == [0, 0]
        table = counted(load_file(shards.folder / "final.safetensors"), 2, 2)
        assert all(block == [20, 20] for blocks in table.values() for block in blocks), table


def test_who_leaves_is_not_waited_for(tmp_path: Path) -> None:
    """Rank 0 stands at its bound when rank 1 ends: it continues at once."""
    with serving(tmp_path, workers=2, shards=2, mode="bounded", staleness=1) as shards:
        first, other = ledger(shards, 0), ledger(shards, 1)
        at_once(first.attach, other.attach)
        going = aside(lambda: [push(first) for _ in range(6)])
        assert eventually(lambda: shards.servers[0].store.clocks() == {0: 2, 1: 0})
        leaving = aside(other.leave)
        going.join(SECONDS)
        assert not going.is_alive() and first.session.clock == 6
        assert first.leave() == 0
        leaving.join(SECONDS)
        assert shards.wait_ended() == [0, 0]
