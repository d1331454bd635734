"""Loops of `ps.epochs` that begin again: where each continues."""

from __future__ import annotations

from typing import Any

import pytest

from psjob.api.datacursor import AFTER, NOWHERE, EpochLoops
from psjob.process.errors import Refused


def at(passes: int) -> dict[str, Any]:
    """Where the places are after so many passes."""
    return {**NOWHERE, "begun": passes}


def again(loops: EpochLoops) -> EpochLoops:
    """Those of a process that continues from a record of this moment."""
    state = loops.state
    assert state is not None
    follows = EpochLoops()
    follows.load(state)
    return follows


def test_a_script_without_such_loops_has_no_state() -> None:
    assert EpochLoops().state is None


def test_the_loop_under_way_goes_on_at_its_epoch() -> None:
    loops = EpochLoops()
    number = loops.begin(0)
    for epoch, passes in ((0, 0), (1, 2), (2, 4)):
        loops.give(number, epoch, passes, at(passes))
    follows = again(loops)
    assert follows.begin(0) == 0 and follows.was_over(0) is None and follows.was_at(0) == (2, 4)


def test_a_loop_that_was_over_gives_nothing_and_the_next_goes_on() -> None:
    loops = EpochLoops()
    loops.give(loops.begin(0), 0, 0, at(0))
    loops.give(0, AFTER, 3, at(3))
    loops.give(loops.begin(3), 0, 3, at(3))
    follows = again(loops)
    assert follows.begin(0) == 0 and follows.was_over(0) == 3 and follows.was_at(0) is None
    follows.give(0, AFTER, 3, at(3))
    assert follows.begin(3) == 1 and follows.was_over(1) is None and follows.was_at(1) == (0, 3)
    assert follows.begin(9) == 2 and follows.was_at(2) is None, "a later loop begins at its beginning"


def test_a_loop_that_was_left_is_over_when_the_next_begins() -> None:
    loops = EpochLoops()
    loops.give(loops.begin(0), 4, 8, at(8))
    loops.give(loops.begin(9), 0, 9, at(9))
    assert again(loops).was_over(0) == 9


def test_a_record_between_two_loops_has_none_under_way() -> None:
    loops = EpochLoops()
    loops.give(loops.begin(0), 0, 0, at(0))
    assert loops.under_way == 0
    loops.give(0, AFTER, 2, at(2))
    assert loops.under_way == -1
    follows = again(loops)
    assert follows.was_over(0) == 2 and follows.was_at(0) == (AFTER, 2), "what follows the loop continues there"
    assert follows.was_at(1) is None and follows.was_over(1) is None


def test_the_places_are_those_of_the_epochs_beginning() -> None:
    loops = EpochLoops()
    number = loops.begin(0)
    assert again(loops).kept_at == NOWHERE
    loops.give(number, 3, 2, at(2))
    assert again(loops).kept_at == at(2)


@pytest.mark.parametrize(
    "state", [{}, {"loop": "x", "epoch": 0, "at": {"begun": 0}, "ends": []}, {"loop": 0, "epoch": 0, "at": {"begun": 0}, "ends": 5}]
)
def test_a_damaged_place_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(Refused, match="its place in the epochs is not in shape"):
        EpochLoops().load(state)


def test_where_a_restart_cannot_go_on_the_beginning_before_counts() -> None:
    loops = EpochLoops()
    number = loops.begin(0)
    loops.give(number, 0, 0, at(0))
    loops.give(number, 1, 1, None)
    assert again(loops).was_at(number) == (0, 0)
    loops.give(number, AFTER, 2, None)
    assert loops.under_way == -1 and again(loops).was_at(number) == (0, 0) and again(loops).was_over(number) is None
