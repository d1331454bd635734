"""Modes as tables: which pushes make an update, which are dropped, who may go on."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psjob import contract
from psjob.modes import MODES, Async, Backup, Batch, Bounded, LocalAsync, LocalSGD, Mode, Push, Quorum, Softsync, Sync, Threshold, of
from psjob.process.config import LocalConfig

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
        (Softsync(2, by_lag=False), [Push(3, 1, 1), *fresh(0)], Batch((*fresh(0), Push(3, 1, 1)))),
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
    ],
)
def test_who_may_go_on(mode: Mode, goes: tuple[bool, ...]) -> None:
    asked = [(8, 7, True), (8, 7, False), (10, 7, False), (11, 7, False)]
    assert tuple(mode.may_go(*ask) for ask in asked) == goes


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (lambda: Backup(-1), "backup_workers is -1"),
        (lambda: Bounded(-1), "staleness is -1"),
        (lambda: Softsync(0), "splits is 0"),
        (lambda: Threshold(-2), r"staleness \(lag\) is -2"),
        (lambda: LocalSGD(0), "inner_steps is 0"),
        (lambda: LocalSGD(quorum=-1), "quorum is -1"),
        (lambda: LocalAsync(0), "inner_steps is 0"),
        (lambda: LocalSGD(grace=float("nan")), "grace is nan"),
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
    assert of(Job("softsync", splits=4)) == Softsync(4) and of(Job("threshold", 0)) == Threshold(0)


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
