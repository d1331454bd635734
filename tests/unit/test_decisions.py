"""Decisions of the coordinator, as tables and properties: every push that arrived is decided on once, for all shards alike."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psjob.modes import Backup, Batch, LocalSGD, Mode, Push, Softsync, Threshold
from psjob.protocol.coordinator.decisions import DecisionOrder as Order
from psjob.protocol.coordinator.decisions import Decisions


def decisions(mode: Mode, workers: int = 3, shards: int = 1, version: int = 0) -> Decisions:
    return Decisions(mode, range(shards), version, dict.fromkeys(range(workers), 0), range(workers))


def test_a_push_has_arrived_when_every_shard_has_it() -> None:
    """It was computed on the oldest of what the shards say, and of one unknown version nothing is known."""
    made = decisions(Threshold(2), shards=3, version=9)
    assert made.told(0, 1, 0, 9, 0.0) is None and made.told(2, 1, 0, 7, 0.0) is None
    assert made.told(2, 1, 0, 7, 0.0) is None, "told twice is told once"
    assert made.told(1, 1, 0, 8, 1.0) == Order(9, (Batch((Push(1, 0, 7, 1.0),)),), {1: 1})
    assert made.told(0, 1, 0, 9, 0.0) is None, "it is decided on already"
    assert (made.version, made.clocks) == (10, {0: 0, 1: 1, 2: 0})
    for shard, base in enumerate((10, None, 10)):
        order = made.told(shard, 0, 0, base, 2.0)
    assert order == Order(10, (Batch(dropped=(Push(0, 0, None, 2.0),)),), {0: 1})


def test_backup_takes_the_first_and_drops_the_late() -> None:
    made = decisions(Backup(1))
    assert made.told(0, 2, 0, 0, 0.0) is None
    assert made.missing() == [0, 1]
    order = made.told(0, 0, 0, 0, 1.0)
    assert order is not None and order.go == {0: 1, 2: 1}
    assert order.to_json() == {
        "version": 0, "batches": [{"kept": [(0, 0), (2, 0)], "dropped": [], "weights": None, "lag": 0}], "go": [(0, 1), (2, 1)],
    }  # fmt: skip
    late = made.told(0, 1, 0, 0, 2.0)
    assert late is not None and late.to_json() == {
        "version": 1, "batches": [{"kept": [], "dropped": [(1, 0)], "weights": None, "lag": None}], "go": [(1, 1)],
    }  # fmt: skip
    assert (made.version, made.dropped) == (1, 1)


def test_softsync_lets_its_worker_go_before_it_decides() -> None:
    made = decisions(Softsync(1), version=4)
    assert made.told(0, 1, 0, 4, 0.0) == Order(4, (), {1: 1})
    assert made.told(0, 1, 1, 4, 1.0) == Order(4, (), {1: 2})
    order = made.told(0, 0, 0, 1, 2.0)
    assert order is not None and order.go == {0: 1}
    assert order.to_json()["batches"] == [
        {"kept": [(0, 0), (1, 0), (1, 1)], "dropped": [], "weights": (1 / 9, 1 / 3, 1 / 3), "lag": 3},
    ]


def test_who_leaves_is_not_waited_for() -> None:
    """Of four, three are needed with one backup; when one has left, two: the pushes that wait count then."""
    made = decisions(Backup(1), workers=4)
    assert made.told(0, 0, 0, 0, 0.0) is None and made.told(0, 3, 0, 0, 0.0) is None
    order = made.left(1, 1.0)
    assert order is not None and [push.worker for push in order.batches[0].kept] == [0, 3]
    assert made.told(0, 2, 0, 1, 2.0) is None
    assert made.left(0, 3.0) is not None and made.version == 2


def test_what_the_last_leave_behind_is_decided() -> None:
    made = decisions(Softsync(1))
    made.told(0, 0, 0, 0, 0.0)
    made.told(0, 1, 0, 0, 0.0)
    for worker in range(3):
        made.left(worker, 1.0)
    assert made.clocks == {0: 1, 1: 1, 2: 0} and made.version == 1


def test_a_mode_that_waits_for_a_time_is_asked_again() -> None:
    made = decisions(LocalSGD(8, quorum=2, grace=5.0))
    made.told(0, 0, 0, 0, 10.0)
    assert made.told(0, 1, 0, 0, 11.0) is None and made.until == 16.0
    order = made.ask(16.0)
    assert order is not None and order.go == {0: 1, 1: 1} and made.until is None


@pytest.mark.parametrize("mode", [Backup(0), Backup(1), Backup(3), Softsync(1), Softsync(2), Softsync(4), Threshold(0), Threshold(2)])
@given(seed=st.integers(0, 10_000), shards=st.integers(1, 3))
def test_each_push_is_decided_once_and_nobody_is_left_behind(mode: Mode, seed: int, shards: int) -> None:
    """Shards of four workers tell in any order; whoever may go pushes again; at the end all leave."""
    chance = random.Random(seed)
    made = decisions(mode, workers=4, shards=shards, version=chance.randrange(3))
    clocks, bases = dict.fromkeys(range(4), 0), dict.fromkeys(range(4), made.version)
    on_their_way = [(worker, 0, shard) for worker in range(4) for shard in range(shards)]
    seen: list[tuple[int, int]] = []
    answered = dict.fromkeys(range(4), 0)
    ends = {worker: chance.randrange(1, 9) for worker in range(4)}
    version = made.version

    def check(order: Order | None) -> None:
        nonlocal version
        if order is None:
            return
        assert order.version == version
        for batch in order.batches:
            assert list(batch.kept) == sorted(batch.kept) and (batch.kept or batch.dropped)
            seen.extend((push.worker, push.clock) for push in (*batch.kept, *batch.dropped))
            assert all(push.base is not None and push.base <= version for push in batch.kept)
            if isinstance(mode, Backup):
                assert all(push.base == version for push in batch.kept) and len({push.worker for push in batch.kept}) == len(batch.kept)
            version += bool(batch.kept)
        for worker, count in order.go.items():
            assert count == clocks[worker] + 1 > answered[worker]
            answered[worker] = count
            clocks[worker] += 1
            bases[worker] = made.version
            if count == ends[worker]:
                check(made.left(worker, 0.0))
            else:
                on_their_way.extend((worker, count, shard) for shard in range(shards))

    while on_their_way:
        worker, clock, shard = on_their_way.pop(chance.randrange(len(on_their_way)))
        check(made.told(shard, worker, clock, bases[worker], 0.0))
    assert answered == ends == made.clocks
    assert sorted(seen) == [(worker, clock) for worker in range(4) for clock in range(ends[worker])]
    for worker in range(4):
        mine = [clock for who, clock in seen if who == worker]
        assert mine == sorted(mine)
    assert made.version == version and made.missing() == []
