"""What shard 0 keeps of a job's numbers over time: bounded, in order, from the beginning to now.

- How many steps a script will make in all is estimated by its epochs and its data.
- What the coordinator tells of an interruption, and of what all shards have counted.
"""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psjob import contract
from psjob.api.datacursor import Totals
from psjob.protocol.coordinator.report import MOST_ENTRIES, MOST_NAMES, JobProgress, MetricHistory, RecoveryTimer
from psjob.shard.push_metrics import Counters, JobCounts


@given(st.integers(1, 3000), st.floats(0.01, 10.0))
def test_it_spans_all_of_the_time_in_a_bounded_list(steps: int, seconds: float) -> None:
    past = MetricHistory(most=16)
    for step in range(steps):
        past.note(step, {"loss": 1.0}, None, 1000.0 + step * seconds, {"loss": step})
    told = past.told()
    times = [entry["time"] for entry in told]
    assert 1 <= len(told) < 16 and times == sorted(times)
    spacing = max((after - before for before, after in pairwise(times)), default=0.0)
    whole = (steps - 1) * seconds
    assert spacing <= max(2 * whole / 4, 2 * seconds, 2.0), "no hole"
    assert whole - (times[-1] - 1000.0) <= max(whole / 2, seconds, 1.0), "the newest is near the end"


def test_its_answer_fits_what_is_read() -> None:
    past = MetricHistory()
    names = {f"{number:064d}": -1.2345678901234567e-300 for number in range(2 * MOST_NAMES)}
    for step in range(MOST_ENTRIES - 1):
        past.note(10**12 + step, names, -1.2345678901234567e-300, 1.8e9 + 2 * step + 0.123456, dict.fromkeys(names, 10**12 + step))
    assert len(past.told()) == MOST_ENTRIES - 1
    assert len(json.dumps({"entries": past.told()})) < contract.STATUS_BYTES


def test_progress_keeps_what_was_reported() -> None:
    progress = JobProgress()
    for step in range(1, 5):
        progress.report(0, {"loss": 1.0 / step})
        progress.passed(step, 1000.0 + 2 * step)
    assert [(entry["step"], entry["metrics"]["loss"]) for entry in progress.past.told()] == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    assert progress.past.told()[-1]["reported"] == [3], "it was given when three steps had passed"
    progress.report(0, {"accuracy": 0.5})
    progress.report(0, {"loss": 0.1})
    said = progress.status(1010.0)
    assert dict(zip(said["metrics"], said["reported"], strict=True)) == {"accuracy": 4, "loss": 4}


def test_a_numbers_first_value_waits_for_no_second() -> None:
    past = MetricHistory()
    past.note(1, {}, None, 1000.0, {})
    past.note(2, {"loss": 0.5}, None, 1000.01, {"loss": 2})
    past.note(3, {"loss": 0.25}, None, 1000.02, {"loss": 3})
    past.note(4, {"loss": 0.2, "grad_norm": 3.0}, None, 1000.03, {"loss": 4, "grad_norm": 4})
    assert [(entry["step"], entry["metrics"]) for entry in past.told()] == [
        (1, {}),
        (2, {"loss": 0.5}),
        (4, {"loss": 0.2, "grad_norm": 3.0}),
    ]


def test_names_without_end_make_no_entries_without_end() -> None:
    past = MetricHistory()
    for step in range(10_000):
        past.note(step, {f"loss_{step}": 1.0}, None, 1000.0 + step * 1e-6, {f"loss_{step}": step})
    assert len(past.told()) == MOST_NAMES


def made(totals: Totals, epochs: int | None, epoch: int, rounds: int | None, batches: int, every: int = 1, clock: int = 0) -> int:
    """An epoch of which so many batches were taken, with a step after each `every` of them; the clock then."""
    totals.begin_epoch(epochs, epoch, clock)
    totals.begin_pass(rounds, 0)
    for number in range(1, batches + 1):
        totals.give()
        clock += number % every == 0
    return clock


@pytest.mark.parametrize(("every", "total"), [(1, 1000), (4, 250)])
@pytest.mark.parametrize("batches", [20, 52, 100])
def test_the_first_epoch_is_estimated_by_its_data(every: int, total: int, batches: int) -> None:
    totals = Totals()
    clock = made(totals, 10, 0, 100, batches, every)
    assert totals.total(clock) == pytest.approx(total, rel=0.05)


def test_later_epochs_are_as_long_as_the_one_before() -> None:
    totals = Totals()
    clock = made(totals, 10, 0, None, 73)
    assert totals.total(clock) is None, "a pass without a length says nothing"
    totals.begin_epoch(10, 1, clock)
    assert totals.total(clock) == 730


def test_a_restart_in_the_middle_counts_what_was_before() -> None:
    totals = Totals()
    totals.begin_epoch(5, 2, 260)  # 130 steps an epoch, of which this one made 0 and continues at batch 40, clock 300
    totals = Totals()
    totals.begin_epoch(5, 2, 300)
    totals.begin_pass(130, 40)
    for _ in range(10):
        totals.give()
    assert totals.total(310) == 260 + 3 * 130
    totals.begin_epoch(5, 3, 390)
    assert totals.total(390) is None, "the epoch before was not seen whole"


@pytest.mark.parametrize("epochs", [None, 0])
def test_a_loop_without_an_end_has_no_total(epochs: int | None) -> None:
    totals = Totals()
    assert totals.total(0) is None
    assert totals.total(made(totals, epochs, 0, 100, 50)) is None


def test_it_is_told_when_it_has_changed() -> None:
    totals = Totals()
    clock = made(totals, 10, 0, 100, 10)
    assert totals.news(clock) == 1000
    assert totals.news(clock) is None
    totals.give()
    assert totals.news(clock + 1) is None, "the same number"
    totals.begin_epoch(10, 1, 101)
    assert totals.news(101) == 1010, "at an epoch's beginning it is known"


def test_what_the_script_tells_counts() -> None:
    totals = Totals()
    clock = made(totals, 10, 0, 100, 10)
    totals.by_script = True
    assert totals.news(clock) is None


def first(comeback: RecoveryTimer) -> tuple[int, int, int, int, float] | None:
    told = comeback.told(100.0)["resumed"]
    return None if told is None else (told["term"], told["start"], told["from"], told["step"], told["age"])


def test_the_first_step_of_a_job_is_told_and_undoes_nothing() -> None:
    comeback = RecoveryTimer()
    assert first(comeback) is None
    comeback.interrupted(0)
    comeback.passed(1, term=1, start=1, wall=90.0)
    comeback.passed(2, term=1, start=1, wall=95.0)
    assert first(comeback) == (1, 1, 0, 1, 10.0) and comeback.steps_lost == 0


def test_steps_undone_count_once_all_have_passed_a_step_again() -> None:
    comeback = RecoveryTimer()
    comeback.passed(1, 1, 1, 10.0)
    comeback.undone(150, 100)
    assert comeback.steps_lost == 0
    comeback.interrupted(100)
    comeback.passed(100, 2, 1, 19.0)  # nothing new: where the checkpoint was
    assert comeback.steps_lost == 0 and first(comeback) == (1, 1, 0, 1, 90.0)
    comeback.passed(101, 2, 1, 20.0)
    assert comeback.steps_lost == 50 and first(comeback) == (2, 1, 100, 101, 80.0)


def test_a_new_coordinator_learns_from_workers_how_far_they_were() -> None:
    comeback = RecoveryTimer()
    comeback.undone(0, 100)
    comeback.heard(149)
    comeback.heard(150)
    comeback.undone(100, 100)
    comeback.passed(101, 2, 1, 20.0)
    assert comeback.steps_lost == 50
    comeback.heard(400)  # a stream that breaks while training continues
    comeback.interrupted(300)
    comeback.passed(301, 2, 2, 30.0)
    assert comeback.steps_lost == 50 and first(comeback) == (2, 2, 300, 301, 70.0)


def test_a_second_loss_before_the_first_step_belongs_to_the_same_interruption() -> None:
    comeback = RecoveryTimer()
    comeback.passed(1, 1, 1, 1.0)
    comeback.undone(150, 100)
    comeback.undone(100, 50)
    comeback.passed(51, 3, 1, 9.0)
    assert comeback.steps_lost == 100


def test_counts_of_all_shards_are_summed_over_their_attempts() -> None:
    counts = JobCounts()
    counts.heard(0, Counters(bytes=10).word(1))
    counts.heard(1, Counters(bytes=5, lost=1).word(1))
    counts.heard(1, Counters(bytes=7, lost=1).word(1))
    assert counts.told() == {"pushBytes": 17, "updatesLost": 1}
    counts.heard(1, Counters(bytes=2, lost=3).word(2))
    counts.heard(1, Counters(bytes=70, lost=70).word(1))  # one that was cut off
    assert counts.told() == {"pushBytes": 19, "updatesLost": 4}


@pytest.mark.parametrize("body", [{}, {"attempt": 1}, {"attempt": 1, "pushBytes": "x", "updatesLost": 0}, {"attempt": 1, "pushBytes": 3}])
def test_what_is_no_count_is_refused(body: dict[str, object]) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        JobCounts().heard(1, body)


def test_counts_that_fall_are_refused() -> None:
    counts = JobCounts()
    counts.heard(1, Counters(bytes=9).word(1))
    with pytest.raises(ValueError, match="never fall"):
        counts.heard(1, Counters(bytes=8).word(1))
