"""What a push asks of all workers is counted, not scanned: the counts are what a scan would find, and no push makes one.

- A push that comes again under its key: the same bytes are a duplicate, other ones are told of, and neither counts.
- How large a push may be: measured exactly, scaled down to the limit, told once.
- Of thousands of workers for whom an answer waits a few are told by rank, of the others how many they are.
- What a shard may hold of all workers' gradients: shares that keep to it, and a job that is refused where they cannot.
- Early data of a worker's streams together: one gradient a block, within its share, and the newest counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psjob.layout import memory
from psjob.layout.blocks import Layout, TensorSpec
from psjob.modes import Async, Backup, Bounded, LocalAsync, Push, Quorum, ServedMode, Softsync, Sync, Threshold
from psjob.protocol.worker.events import ShardWaits
from psjob.rules.base import BlockState
from psjob.shard.deduplication import Admission, MinCounter, Row, Verdict
from psjob.shard.pending import MOST_NAMED, Gradient, PendingPush, PendingPushes, PushMetadata, Waiter, Waiters, format_ranks
from psjob.shard.progress import room_problem
from psjob.shard.push_metrics import PushNorms, PushSamples, norm_of
from psjob.shard.store import Store
from psjob.shard.worker_stream import EarlyPushes
from psjob.wire.frame import Flag, Header, Kind, WireError
from psjob.worker.exchange import CREDIT, credits
from tests.tensors.desk import Desk
from tests.tensors.lone_shard import Answers

WORKERS = 4


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_a_tally_knows_what_its_members_would_show(moves: list[tuple[int, int]]) -> None:
    members: list[int] = []
    tally = MinCounter()
    for old, new in moves:
        if old in members:
            members[members.index(old)] = new
            tally.move(old, new)
        elif new % 2 and new in members:
            members.remove(new)
            tally.remove(new)
        else:
            members.append(new)
            tally.add(new)
        assert bool(tally) == bool(members)
        assert (tally.lowest, tally.highest) == (min(members, default=0), max(members, default=0))
        assert [tally.all_at(number) for number in range(6)] == [all(m == number for m in members) for number in range(6)]


ACTS = st.one_of(
    st.tuples(st.just("admit"), st.integers(0, WORKERS - 1), st.integers(0, 2)),
    st.tuples(st.just("jump"), st.integers(0, WORKERS - 1), st.integers(0, 9)),
    st.tuples(st.just("leave"), st.integers(0, WORKERS - 1), st.integers(0, 6)),
    st.tuples(st.just("load"), st.integers(0, WORKERS - 1), st.integers(0, 3)),
    st.tuples(st.just("reshard"), st.integers(0, WORKERS - 1), st.integers(0, 3)),
)


@given(st.lists(ACTS, max_size=60))
def test_counts_are_what_a_scan_finds(acts: list[tuple[str, int, int]]) -> None:
    table = Admission(WORKERS, owned=3)
    for position in (0, 2):
        table.watch(position)
    for act, rank, number in acts:
        row = table.rows[rank]
        if act == "admit":
            table.admit(rank, (0, 0), row.complete, number)
        elif act == "jump":
            table.jump(rank, number)
        elif act == "leave":
            table.leave(rank, number)
        elif act == "load":
            saved = table.save()
            saved[str(rank)] = {"complete": number, "open": [number % 3]}
            table.load(saved, {})
        else:
            table.resharded({rank: number}, [(number % WORKERS, number)], {})
        live = {r: row for r, row in table.rows.items() if row.left_at is None}
        assert table.live() == set(live)
        assert table.lowest() == min(row.complete for row in (live or table.rows).values())
        for clock in range(8):
            expected = {r for r, row in table.rows.items() if row.left_at is None or row.left_at > clock}
            assert table.expected(clock) == expected and table.first_expected(clock) == min(expected, default=-1)
        for position in (0, 2):
            counts = [count for r, count in table.pushed(position).items() if r in live]
            tally = table.tally(position)
            assert (tally.lowest, tally.highest) == (min(counts, default=0), max(counts, default=0))


def waiter(rank: int, version: int) -> Waiter:
    return Waiter(Answers(), rank, 0, version, 0, 0.0)


def test_only_those_for_whom_there_is_news_are_asked_about() -> None:
    waiters = Waiters()
    for rank in range(3):
        waiters.add(waiter(rank, 1))
    waiters.add(waiter(0, 2))
    asked: list[tuple[int, int]] = []

    def goes(rank: int, version: int) -> bool:
        asked.append((rank, version))
        return version <= 1

    assert waiters.take((2,), 0, lambda *who: asked.append(who) or False) == []
    assert asked == [(2, 1)], "version 1 is not reached, and there is news only of worker 2"
    asked.clear()
    assert [(w.rank, w.version) for w in waiters.take((), 1, goes)] == [(0, 1), (1, 1), (2, 1)]
    assert [(w.rank, w.version) for w in waiters] == [(0, 2)] and waiters.of(0) == 1 and not waiters.of(1)
    asked.clear()
    assert waiters.take((), 1, goes) == [] and asked == [], "version 1 is no news any more"
    assert [w.rank for w in waiters.take(None, None, lambda rank, version: True)] == [0] and not waiters


def test_who_waits_by_a_stream_that_ends_waits_no_more() -> None:
    waiters = Waiters()
    gone, stays = waiter(0, 5), waiter(0, 5)
    for each in (gone, stays, waiter(1, 5)):
        waiters.add(each)
    waiters.drop(gone.to, 0)
    assert [w.rank for w in waiters] == [1, 0] and gone not in list(waiters)
    assert len(waiters.take((), 5, lambda *who: True)) == 2


def test_pushes_are_told_in_order_of_arrival_whatever_is_taken() -> None:
    pending = PendingPushes()
    for rank in (2, 0, 1):
        pending[rank, 7] = PendingPush(Push(rank, 7, None), None, False, PushMetadata((), frozenset()))
    told = pending.pushes
    assert [push.worker for push in told] == [2, 0, 1] and pending.pushes is told
    assert [arrived.push.worker for arrived in pending.take([(1, 7), (2, 7)])] == [1, 2]
    assert [push.worker for push in pending.pushes] == [0]
    with pytest.raises(KeyError):
        pending.take([(2, 7)])
    pending.clear()
    assert not len(pending) and pending.pushes == []


class Watched(dict[int, Row]):
    """Rows by rank; it counts how often all of them are looked at."""

    scans = 0

    def __iter__(self) -> Iterator[int]:
        Watched.scans += 1
        return super().__iter__()

    def values(self) -> Any:
        Watched.scans += 1
        return super().values()

    def items(self) -> Any:
        Watched.scans += 1
        return super().items()


@pytest.mark.parametrize("mode", [Sync(), Async(), Bounded(2)], ids=["sync", "async", "bounded"])
def test_no_push_looks_at_the_rows_of_all_workers(mode: ServedMode, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = 30
    store = Store(0, 1, workers, 1, mode, "run")
    layout = Layout.of((TensorSpec("w", (512,), "float32"),))
    store.restore(layout, "plain", {block.index: (BlockState(torch.zeros(block.length)), 0) for block in layout.blocks})
    for rank in range(workers):
        store.infos.learn(rank, 1, PushMetadata(({"lr": 1.0, "weight_decay": 0.0},), frozenset()))
    store.open(1, 1)
    store.admission.rows = Watched(store.admission.rows)
    monkeypatch.setattr(Watched, "scans", 0)
    answers = Answers()
    for clock in range(4):
        for cell in store.cells.values():
            for rank in range(workers):
                header = Header(Kind.PUSH, worker=rank, start=1, clock=clock, info=1, block=cell.index, version=(1, cell.n))
                grad = store.target(header, cell)
                assert grad is not None
                grad.flat.fill_(1.0)
                assert store.push(header, cell, grad, answers, 0) is Verdict.ADMIT
    assert Watched.scans == 0
    assert store.step() == 4 and answers.count == 4 * workers * len(store.cells)
    assert Watched.scans == 0


def served(mode: ServedMode) -> Store:
    store = Store(0, 1, 2, 1, mode, "run")
    layout = Layout.of((TensorSpec("w", (512,), "float32"),))
    store.restore(layout, "plain", {block.index: (BlockState(torch.zeros(block.length)), 0) for block in layout.blocks})
    for rank in range(2):
        store.infos.learn(rank, 1, PushMetadata(({"lr": 1.0, "weight_decay": 0.0},), frozenset()))
    store.open(1, 1)
    return store


def push(store: Store, clock: int, value: float, at: int = 0, flags: int = Flag.NONE) -> Verdict:
    """Worker 0 pushes block 0: zeros but for one element."""
    cell = store.cells[0]
    header = Header(Kind.PUSH, worker=0, start=1, clock=clock, info=1, block=0, version=(1, cell.n), flags=flags)
    grad = None if flags else store.target(header, cell)
    if isinstance(grad, Gradient):
        grad.flat.zero_()
        grad.flat[at] = value
    return store.push(header, cell, grad, Answers(), 0)


@pytest.mark.parametrize("mode", [Sync(), Async()], ids=["sync", "async"])
def test_other_bytes_under_a_taken_key_are_told(mode: ServedMode, caplog: pytest.LogCaptureFixture) -> None:
    store = served(mode)
    assert push(store, 0, 1.0) is Verdict.ADMIT
    assert push(store, 0, 1.0) is Verdict.DUPLICATE
    assert (store.counters.duplicates, store.counters.differing, caplog.messages) == (1, 0, [])
    for value, at in ((2.0, 0), (1.0, -1)):
        assert push(store, 0, value, at) is Verdict.DUPLICATE
    assert push(store, 0, 0.0, flags=Flag.SKIP) is Verdict.DUPLICATE
    assert (store.counters.duplicates, store.counters.differing) == (4, 3)
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("worker 0 pushed step 0 of block 0 again with other bytes than")
    cell = store.cells[0]
    held = cell.pending[0, 0].grad if mode.ahead == 0 else None
    first = held.flat[0] if isinstance(held, Gradient) else -cell.state.weights[0]  # type: ignore[union-attr]
    assert float(first) == 1.0, "what came first counts"


def test_many_pushes_with_other_bytes_write_few_lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is told at once, and the others with the first one that comes a minute later."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    store = served(Async())
    push(store, 0, 1.0)
    for value in range(2, 1002):
        assert push(store, 0, float(value)) is Verdict.DUPLICATE
    assert store.counters.differing == 1000 and len(caplog.messages) == 1
    now += 60.0
    for value in range(2, 12):
        push(store, 0, float(value))
    assert store.counters.differing == 1010 and len(caplog.messages) == 2
    assert "left out (1000 such pushes since the last line). A process" in caplog.messages[1]


def test_a_push_before_the_newest_is_not_compared() -> None:
    store = served(Async())
    for cell in store.cells.values():
        header = Header(Kind.PUSH, worker=0, start=1, clock=0, info=1, block=cell.index, version=(1, 0))
        if cell.index:
            store.push(header, cell, store.target(header, cell), Answers(), 0)
    push(store, 0, 1.0)
    assert push(store, 1, 2.0) is Verdict.ADMIT
    assert push(store, 0, 3.0) is Verdict.DUPLICATE and store.counters.differing == 0
    assert push(store, 1, 3.0) is Verdict.DUPLICATE and store.counters.differing == 1


def test_what_is_not_known_differs_from_nothing() -> None:
    samples = PushSamples(owned=3)
    assert not samples.knows(5, 2) and not samples.differs(5, 2, memory.view(torch.ones(4)))
    samples.keep(5, 2, memory.view(torch.ones(4)))
    assert (
        not samples.knows(5, 1)
        and samples.differs(5, 2, memory.view(torch.zeros(4)))
        and not samples.differs(5, 2, memory.view(torch.ones(4)))
    )
    samples.forget(5)
    assert not samples.differs(5, 2, memory.view(torch.zeros(4)))


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), max_size=3000), st.floats(1e-6, 1e12))
def test_what_comes_out_is_within_the_limit_and_points_the_same_way(values: list[float], limit: float) -> None:
    push = torch.tensor(values, dtype=torch.float32)
    before = push.clone()
    norms = PushNorms(limit)
    out = norms.bounded(0, 1, "block 0", push)
    norm = float(push.double().norm())
    assert torch.equal(push, before), "the worker may look at it still"
    assert float(out.double().norm()) <= limit * (1 + 1e-4)
    if norm <= limit * (1 - 1e-4):
        assert out is push and norms.first is None
    elif norm > limit * (1 + 1e-4):
        assert norms.count == 1
        assert torch.allclose(out.double(), push.double() * (limit / norm), rtol=1e-3, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 1e4, 1e25, 1e38])
def test_the_norm_is_right_also_where_squares_overflow_or_vanish(dtype: torch.dtype, scale: float) -> None:
    numbers = (torch.linspace(0.1, 1.0, 5000, dtype=torch.float64) * scale).to(dtype).view(50, 100)
    found, right = norm_of(numbers), float(numbers.double().norm())
    if math.isinf(right) or bool(numbers.isinf().any()):
        assert found is None
    else:
        assert found == pytest.approx(right, rel=1e-5, abs=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_inf_count_as_zeros(bad: float, dtype: torch.dtype) -> None:
    push = torch.ones(2000, dtype=dtype)
    push[1500] = bad
    norms = PushNorms(1e9)
    out = norms.bounded(3, 7, "table words", push)
    assert out.dtype == dtype and not out.any()
    assert norms.told() == {"pushes": 1, "worker": 3, "step": 7, "of": "table words", "norm": None}
    assert norms.sentence() == (
        "worker 3's push of table words at step 7 is beyond training.maxPushNorm 1e+09: it held NaN or inf and was left out"
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_scaled_without_loss_of_the_factor(dtype: torch.dtype) -> None:
    push = torch.full((4000,), 60000.0, dtype=dtype)
    out = PushNorms(1e-3).bounded(0, 1, "block 0", push)
    assert float(out.double().norm()) == pytest.approx(1e-3, rel=0.02)


def test_a_push_counts_once_and_the_first_is_named() -> None:
    norms = PushNorms(1.0)
    for worker, clock in ((1, 4), (1, 4), (0, 4), (1, 5), (1, 3)):
        norms.bounded(worker, clock, "block 2", torch.full((4,), 5.0))
    assert norms.count == 3 and norms.first == (1, 4, "block 2", 10.0)
    assert (
        norms.sentence()
        == "worker 1's push of block 2 at step 4 is beyond training.maxPushNorm 1: it had a norm of 10 and was scaled down to it"
    )
    assert norms.bounded(0, 9, "block 3", torch.empty(0)).numel() == 0


def test_few_are_told_by_rank_and_many_by_number() -> None:
    assert format_ranks([3, 5]) == "[3, 5]"
    assert format_ranks(range(MOST_NAMED)) == str(list(range(MOST_NAMED)))
    assert format_ranks(range(4000)) == f"{list(range(MOST_NAMED))} and {4000 - MOST_NAMED} more"


def test_a_worker_writes_how_many_more_there_are() -> None:
    body = {"workers": [1, 2], "more": 7, "for": "block 0", "seconds": 2.0}
    assert ShardWaits.of(3, body).text == "shard 3 waits for workers [1, 2] and 7 more (block 0, 2.0 s)"
    assert ShardWaits.of(3, body | {"more": 0}).text == "shard 3 waits for workers [1, 2] (block 0, 2.0 s)"


def test_a_shard_that_has_every_gradient_waits_for_the_other_shards() -> None:
    body = {"workers": [], "more": 0, "for": "block 0", "seconds": 92.9}
    assert ShardWaits.of(0, body).text == "shard 0 waits until all shards can choose which gradients count (block 0, 92.9 s)"


MIB = 1 << 20


@pytest.mark.parametrize("workers", [1, 2, 64, 128, 1000, 4000])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [16, 4096, 16000, 65536])
def test_all_shares_together_are_within_the_budget(tmp_path: Path, workers: int, overlap: bool, budget: int) -> None:
    config = replace(Desk(tmp_path).servers[0].place.config, workers=workers, gradients=budget * MIB)
    pushes, early = credits(config, overlap)
    assert workers * (pushes + early) <= budget * MIB
    assert pushes <= CREDIT and (overlap or not early)
    assert pushes == CREDIT or pushes == budget * MIB // workers // (1 + overlap), "what is there is used"


@pytest.mark.parametrize(
    ("mode", "pushes"), [(Backup(1), 1), (Threshold(3), 1), (Quorum(5, 2), 1), (LocalAsync(5), 1), (Softsync(2), 2)], ids=lambda x: str(x)
)
def test_whole_pushes_need_room(mode: ServedMode, pushes: int) -> None:
    assert room_problem(8, mode, 800 * MIB, 800 * pushes * MIB) is None
    said = room_problem(8, mode, 800 * MIB, 800 * pushes * MIB - 1)
    assert said is not None and f"set training.gradientMebibytes to {800 * pushes}, or take more shards" in said


def test_other_modes_hold_what_is_on_its_way() -> None:
    assert room_problem(4000, Sync(), 1 << 50, 0) is None


def test_a_norm_of_the_whole_gradient_needs_room() -> None:
    assert room_problem(8, Sync(), 800 * MIB, 800 * MIB, clips=True) is None
    said = room_problem(8, Sync(), 800 * MIB, 800 * MIB - 1, clips=True)
    assert said is not None and said.startswith(
        "to clip by the norm of the whole gradient, a shard holds a whole push of each of 8 workers"
    )


def test_a_job_without_room_is_refused_when_it_begins(tmp_path: Path) -> None:
    desk = Desk(tmp_path, mode="softsync")
    said: list[str] = []
    for server in desk.servers:
        server.store.on_problem = said.append
        server.store.budget = 1
    desk.begun()
    assert len(said) == len(desk.servers) and "set training.gradientMebibytes to 1" in said[0]


class Given:
    """A gradient of `size` bytes."""

    def __init__(self, size: int = 4) -> None:
        self.flat = torch.zeros(size, dtype=torch.uint8)
        self.freed = 0

    def free(self) -> None:
        self.freed += 1


def keep(held: EarlyPushes, given: Given, block: int = 0, clock: int = 0, number: int = 1) -> None:
    held.keep(Header(Kind.EARLY, block=block, clock=clock, request=number), cast(Gradient, given))


def take(held: EarlyPushes, block: int = 0, clock: int = 0, number: int = 1) -> object:
    return held.take(Header(Kind.PUSH, block=block, clock=clock, part=number))


def test_the_newest_of_a_block_is_held_whatever_stream_it_came_by() -> None:
    held = EarlyPushes(100)
    first, second, late = Given(), Given(), Given()
    keep(held, first, number=1)
    keep(held, second, number=3)
    keep(held, late, number=2)
    assert (first.freed, second.freed, late.freed, held.nbytes()) == (1, 0, 1, 4)
    assert take(held, number=3) is second and held.nbytes() == 0
    with pytest.raises(WireError, match="not held here"):
        take(held, number=3)


def test_no_more_is_held_than_the_share_of_the_worker() -> None:
    held = EarlyPushes(10)
    given = [Given() for _ in range(5)]
    for block, one in enumerate(given):
        keep(held, one, block=block)
    assert held.nbytes() == 8 and [one.freed for one in given] == [0, 0, 1, 1, 1]
    held.drop(0, 0)
    keep(held, again := Given(), block=4)
    assert held.nbytes() == 8 and again.freed == 0 and given[0].freed == 1


def test_a_push_drops_what_is_not_newer() -> None:
    held = EarlyPushes(10)
    keep(held, one := Given(), clock=5)
    held.drop(0, 4)
    assert one.freed == 0
    held.drop(0, 5)
    held.clear()
    assert one.freed == 1 and held.nbytes() == 0
