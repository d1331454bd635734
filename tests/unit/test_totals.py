"""How many steps a script will make in all is estimated by its epochs and its data."""

from __future__ import annotations

import pytest

from psjob.api.datacursor import Totals


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
    totals.begin_epoch(5, 2, 260)  # 130 steps an epoch, of which this one made 0 and goes on at batch 40, clock 300
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
