"""Modes as tables: which pushes make an update, which are dropped, who may continue.

- Decisions of the coordinator, as tables and properties: every push that arrived is decided on once, for all shards alike.
- Once only: the table of what a shard has taken.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psjob import contract
from psjob.modes import (
    MODES,
    Async,
    Backup,
    Batch,
    Bounded,
    LocalAsync,
    LocalSGD,
    Mode,
    Push,
    Quorum,
    ServedMode,
    Softsync,
    Sync,
    Threshold,
    config_of,
    format_mode,
    of,
    parse_mode,
)  # fmt: skip
from psjob.process.config import LocalConfig
from psjob.protocol.coordinator.decisions import DecisionOrder as Order
from psjob.protocol.coordinator.decisions import Decisions
from psjob.protocol.messages import encode_order
from psjob.shard.deduplication import Admission, Verdict

ALL = frozenset(range(4))


def fresh(*workers: int, version: int = 5, at: float = 0.0) -> list[Push]:
    return [Push(worker, version, version, at) for worker in workers]


LATE = Push(3, 4, 4)
LOST = Push(2, 9, None)


@pytest.mark.parametrize(
    ("mode", "arrived", "decision"),
    [
        (Sync(), fresh(2, 0, 3), None),
        (Sync(), fresh(2, 0, 3, 1), Batch(tuple(fresh(0, 1, 2, 3)))),
        (Bounded(0), fresh(2, 0, 3), None),
        (Bounded(0), fresh(2, 0, 3, 1), Batch(tuple(fresh(0, 1, 2, 3)))),
        (Bounded(1), fresh(2, 0), Batch(tuple(fresh(2)))),
        (Async(), fresh(2, 0), Batch(tuple(fresh(2)))),
        (Async(), [LOST], Batch((LOST,))),
        (Backup(1), fresh(2, 0), None),
        (Backup(1), fresh(2, 0, 3), Batch(tuple(fresh(0, 2, 3)))),
        (Backup(1), [*fresh(2, 0), LATE], Batch(dropped=(LATE,))),
        (Backup(1), [LOST], Batch(dropped=(LOST,))),
        (Backup(2), fresh(3, 0, 2, 1), Batch(tuple(fresh(0, 3)))),
        (Backup(9), fresh(2), Batch(tuple(fresh(2)))),
        (Softsync(1), fresh(2, 0, 1), None),
        (Softsync(2), [LATE, *fresh(0)], Batch((*fresh(0), LATE), (), (0.5, 0.5))),
        (Softsync(2), [Push(3, 1, 1), *fresh(0)], Batch((*fresh(0), Push(3, 1, 1)), (), (0.5, 0.125))),
        (Softsync(2, by_staleness=False), [Push(3, 1, 1), *fresh(0)], Batch((*fresh(0), Push(3, 1, 1)))),
        (Softsync(3), fresh(2), Batch(tuple(fresh(2)), (), (1.0,))),
        (Softsync(1), [*fresh(2, 0, 1), LOST], Batch(tuple(fresh(0, 1, 2)), (LOST,), (0.25,) * 3)),
        (Softsync(4), [LOST], Batch((), (LOST,), ())),
        (Softsync(9), fresh(1), Batch(tuple(fresh(1)), (), (1.0,))),
        (Threshold(2), [Push(1, 3, 3)], Batch((Push(1, 3, 3),))),
        (Threshold(2), [Push(1, 2, 2)], Batch(dropped=(Push(1, 2, 2),))),
        (Threshold(2), [LOST], Batch(dropped=(LOST,))),
        (LocalSGD(8), fresh(2, 0, 3), None),
        (LocalSGD(8), fresh(2, 0, 3, 1), Batch(tuple(fresh(0, 1, 2, 3)))),
        (LocalSGD(8, quorum=3), fresh(2, 0), None),
        (LocalSGD(8, quorum=3), fresh(2, 0, 3), Batch(tuple(fresh(0, 2, 3)))),
        (LocalSGD(8, quorum=2, grace=30), fresh(2, 0, 3, at=80), Batch(until=110)),
        (LocalSGD(8, quorum=2, grace=20), fresh(2, 0, 3, at=80), Batch(tuple(fresh(0, 2, 3, at=80)))),
        (LocalSGD(8, quorum=3), [*fresh(2, 0), LATE], Batch(dropped=(LATE,))),
        (LocalAsync(8), fresh(2, 0), Batch((fresh(2)[0],))),
        (LocalAsync(8), [LATE, *fresh(2)], Batch((LATE,))),
    ],
)
def test_which_pushes_count(mode: Mode, arrived: list[Push], decision: Batch | None) -> None:
    assert mode.takes(arrived, ALL, 5, 100.0) == decision


@pytest.mark.parametrize("mode", [made() for made in MODES.values()], ids=list(MODES))
def test_nothing_is_decided_of_nothing(mode: Mode) -> None:
    assert mode.takes([], ALL, 5) is None
    assert mode.takes([], frozenset(), 5) is None


@pytest.mark.parametrize(
    ("mode", "goes"),  # a worker whose push waits; one that is 1, 3, 4 clocks ahead and does not wait
    [
        (Sync(), (False, True, True, True)),
        (Backup(), (False, True, True, True)),
        (Bounded(0), (False, False, False, False)),
        (Bounded(3), (False, True, True, False)),
        (Softsync(), (True, True, True, True)),
        (Async(), (False, True, True, True)),
        (Threshold(), (False, True, True, True)),
        (LocalSGD(), (False, True, True, True)),
        (LocalAsync(), (False, True, True, True)),
        (Sync(1), (True, True, True, True)),
        (Async(2), (True, True, True, True)),
        (Bounded(3, 2), (True, True, True, False)),
    ],
)
def test_who_may_go_on(mode: Mode, goes: tuple[bool, ...]) -> None:
    asked = [(8, 7, 1), (8, 7, 0), (10, 7, 0), (11, 7, 0)]
    assert tuple(mode.may_go(*ask) for ask in asked) == goes


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (lambda: Backup(-1), "backup_workers is -1"),
        (lambda: Bounded(-1), "staleness is -1"),
        (lambda: Softsync(0), "splits is 0"),
        (lambda: Threshold(-2), r"staleness is -2"),
        (lambda: LocalSGD(0), "inner_steps is 0"),
        (lambda: LocalSGD(quorum=-1), "quorum is -1"),
        (lambda: LocalAsync(0), "inner_steps is 0"),
        (lambda: LocalSGD(grace=float("nan")), "grace is nan"),
        (lambda: Sync(2), "sync: delay is 2, must be 0 or 1"),
        (lambda: Sync(-1), "sync: delay is -1"),
        (lambda: Async(9), "async: delay is 9, must be 0 to 8"),
        (lambda: Bounded(3, 3), "bounded: delay is 3, must be below the staleness of 3, which counts it"),
        (lambda: of(Job("local", delay=1)), "training.delay is 1 in mode local; sync without backupWorkers, bounded and async have one"),
        (lambda: of(Job("sync", backup_workers=1, delay=1)), "training.delay is 1 in mode sync"),
        (lambda: parse_mode("sync:delay=4"), "delay is 4"),
        (lambda: parse_mode("sync:3"), "a running job changes among sync, bounded, async"),
    ],
)
def test_numbers_out_of_range_are_named(made, sentence: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=sentence):
        made()


@dataclass(frozen=True)
class Job:
    """What a config says."""

    mode: str
    staleness: int | None = None
    local: LocalConfig = field(default_factory=lambda: LocalConfig(inner_steps=7, quorum=2, grace_seconds=0.5))
    backup_workers: int = 0
    splits: int | None = None
    update_rule: str | None = None
    delay: int = 0


@pytest.mark.parametrize("name", sorted(set(MODES) - set(contract.MODES)))
def test_what_no_job_can_run_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"training.mode is '{name}'; this version has {', '.join(contract.MODES)}"):
        of(Job(name))


def test_a_job_runs_the_mode_and_the_numbers_that_it_names() -> None:
    ours = [of(Job(name)) for name in ("sync", "bounded", "softsync", "async", "threshold", "local")]
    assert ours == [Sync(), Bounded(3), Softsync(1), Async(), Threshold(16), Quorum(7, 2, 0.5)]
    assert of(Job("bounded", 5)) == Bounded(5)
    assert of(Job("bounded", 0)) == Sync() == of(Job("sync", 3)), "with no staleness it is sync itself, bit for bit"
    assert of(Job("sync", backup_workers=2)) == Backup(2)
    assert of(Job("local", update_rule="delayed-nesterov")) == LocalAsync(7)
    assert of(Job("async", update_rule="delayed-nesterov")) == Async()
    assert of(Job("sync", delay=1)) == Sync(1) and of(Job("async", delay=4)) == Async(4) and of(Job("bounded", 5, delay=2)) == Bounded(5, 2)
    assert of(Job("softsync", splits=4)) == Softsync(4) and of(Job("threshold", 0)) == Threshold(0)


def test_a_delay_lets_a_worker_go_with_so_many_pushes_under_way() -> None:
    for mode, most in ((Sync(), 0), (Sync(1), 1), (Async(4), 4), (Bounded(6, 2), 2)):
        assert [waiting for waiting in range(8) if mode.may_go(8, 8, waiting)] == list(range(most + 1))
    assert Bounded(5, 2).ahead == 3, "the answer to a push says how far its worker may be when the delay has run out"


@pytest.mark.parametrize("mode", [Sync(), Sync(1), Bounded(3), Bounded(5, 2), Async(), Async(8)])
def test_a_mode_is_read_back_from_its_word(mode: ServedMode) -> None:
    assert parse_mode(format_mode(mode)) == mode
    assert of(Job(**{"delay": 0, **(config_of(mode) or {})})) == mode


PUSHES = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 9), st.one_of(st.none(), st.integers(0, 9))), max_size=9, unique_by=lambda push: push[:2]
)


@given(
    st.sampled_from([*(made() for made in MODES.values()), Backup(2), Bounded(0), Softsync(2), Threshold(1), LocalSGD(4, 2, 3.0)]),
    PUSHES,
    st.frozensets(st.integers(0, 5)),
    st.integers(9, 12),
)
def test_a_decision_is_of_what_arrived_and_only_once(
    mode: Mode, pushes: list[tuple[int, int, int | None]], expected: frozenset[int], version: int
) -> None:
    arrived = [Push(*push, at=float(i)) for i, push in enumerate(pushes)]
    batch = mode.takes(arrived, expected, version, 20.0)
    if batch is None:
        return
    decided = [*batch.kept, *batch.dropped]
    assert decided or (batch.until is not None and batch.until > 20.0)
    assert len(set(decided)) == len(decided) and set(decided) <= set(arrived)
    assert list(batch.kept) == sorted(batch.kept), "sums run in rank order"
    assert batch.weights is None or (len(batch.weights) == len(batch.kept) and all(0 < w <= 1 for w in batch.weights))


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
    assert encode_order(order.numbered(1)) == {
        "do": "decide", "number": 1,
        "version": 0, "batches": [{"kept": [[0, 0], [2, 0]], "dropped": [], "weights": None, "staleness": 0}], "go": [(0, 1), (2, 1)],
    }  # fmt: skip
    late = made.told(0, 1, 0, 0, 2.0)
    assert late is not None and encode_order(late.numbered(1)) == {
        "do": "decide", "number": 1,
        "version": 1, "batches": [{"kept": [], "dropped": [[1, 0]], "weights": None, "staleness": None}], "go": [(1, 1)],
    }  # fmt: skip
    assert (made.version, made.dropped) == (1, 1)


def test_softsync_lets_its_worker_go_before_it_decides() -> None:
    made = decisions(Softsync(1), version=4)
    assert made.told(0, 1, 0, 4, 0.0) == Order(4, (), {1: 1})
    assert made.told(0, 1, 1, 4, 1.0) == Order(4, (), {1: 2})
    order = made.told(0, 0, 0, 1, 2.0)
    assert order is not None and order.go == {0: 1}
    assert encode_order(order.numbered(1))["batches"] == [
        {"kept": [[0, 0], [1, 0], [1, 1]], "dropped": [], "weights": [1 / 9, 1 / 3, 1 / 3], "staleness": 3}
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


def test_a_clock_is_taken_block_by_block_and_never_twice() -> None:
    table = Admission(workers=2, owned=2)
    assert table.admit(0, (1, 0), 0, 0) is Verdict.ADMIT
    assert table.admit(0, (1, 0), 0, 0) is Verdict.DUPLICATE
    assert table.admit(0, (1, 0), 1, 0) is Verdict.GAP
    assert table.admit(0, (1, 0), 0, 1) is Verdict.ADMIT
    assert table.rows[0].complete == 1
    assert table.admit(0, (1, 0), 0, 1) is Verdict.DUPLICATE
    assert table.admit(0, (1, 0), 1, 0) is Verdict.ADMIT
    assert table.rows[1].complete == 0


def test_an_older_process_is_fenced_and_a_newer_resets_nothing() -> None:
    table = Admission(workers=1, owned=1)
    assert table.meet(0, (1, 0)) and table.admit(0, (1, 0), 0, 0) is Verdict.ADMIT
    assert table.meet(0, (2, 0))
    assert not table.meet(0, (1, 9))
    assert table.admit(0, (1, 9), 1, 0) is Verdict.FENCED
    assert table.admit(0, (2, 0), 0, 0) is Verdict.DUPLICATE
    assert table.admit(0, (2, 0), 1, 0) is Verdict.ADMIT


def test_a_leaver_is_absent_from_its_clock_on() -> None:
    table = Admission(workers=3, owned=1)
    table.leave(1, 5)
    assert table.expected(4) == {0, 1, 2}
    assert table.expected(5) == {0, 2}
    assert table.live() == {0, 2}
    assert table.admit(1, (0, 0), 5, 0) is Verdict.GONE


def test_lost_clocks_are_counted_once() -> None:
    table = Admission(workers=1, owned=2)
    for clock in range(3):
        for position in range(2):
            table.admit(0, (0, 0), clock, position)
    restored = Admission(workers=1, owned=2)
    restored.load(table.save(), {})
    assert restored.jump(0, 7) == 4
    assert restored.jump(0, 7) == 0
    assert restored.admit(0, (0, 0), 7, 0) is Verdict.ADMIT


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 2)), max_size=200), st.integers(0, 199))
def test_every_key_counts_at_most_once_across_a_restore(pushes: list[tuple[int, int, int]], cut: int) -> None:
    """Whatever arrives, twice or out of order, before and after a save and load: each (worker, clock, block) is admitted once."""
    table, taken = Admission(workers=3, owned=3), set()
    for number, (worker, clock, position) in enumerate(pushes):
        if number == cut:
            again = Admission(workers=3, owned=3)
            again.load(table.save(), {})
            table = again
        if table.admit(worker, (1, 0), clock, position) is Verdict.ADMIT:
            assert (worker, clock, position) not in taken
            taken.add((worker, clock, position))
    for worker in range(3):
        complete = table.rows[worker].complete
        assert {(worker, c, p) for c in range(complete) for p in range(3)} <= taken
