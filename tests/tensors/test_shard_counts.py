"""What a push asks of all workers is counted, not scanned: the counts are what a scan would find, and no push makes one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psjob.layout.blocks import Layout, TensorSpec
from psjob.modes import Async, Bounded, Push, ServedMode, Sync
from psjob.rules.base import BlockState
from psjob.shard.admission import Admission, MinCounter, Row, Verdict
from psjob.shard.pending import PendingPush, PendingPushes, PushMetadata, Waiter, Waiters
from psjob.shard.store import Store
from psjob.wire.frame import Header, Kind
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
    assert asked == [(2, 1)], "version 1 is not reached, and of worker 2 alone there is news"
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
