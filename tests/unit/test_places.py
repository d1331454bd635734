"""Where a script stands in its data, and what it is given after a restart."""

from __future__ import annotations

import json
from typing import Any

import pytest

from psjob.api.places import START, Places
from psjob.process.errors import Refused


def again(places: Places) -> Places:
    """Those of a script that was started again."""
    made = Places()
    made.load(json.loads(json.dumps(places.state)))
    return made


def walk(places: Places, number: int, begin: Any, rounds: int) -> None:
    for turn in range(begin["round"], rounds):
        places.ask(number, {"round": turn})
        places.give(False)
        places.step()


def test_passes_that_were_over_give_nothing_and_the_open_one_goes_on() -> None:
    places = Places()
    for _ in range(2):
        number, begin = places.begin()
        walk(places, number, begin, 4)
        places.ask(number, {"round": 4})
        places.end(number, False)
    number, begin = places.begin()
    walk(places, number, begin, 3)
    places.ask(number, {"round": 3})
    restarted = again(places)
    assert [restarted.begin() for _ in range(4)] == [(0, None), (1, None), (2, {"round": 3}), (3, START)]
    assert restarted.ask(2, {"round": 3}) and not restarted.ask(2, {"round": 4}), "there its record is put back, once"


def test_a_pass_that_was_left_gives_nothing_more() -> None:
    """Until the next begins it is where the record is put back."""
    places = Places()
    number, begin = places.begin()
    walk(places, number, begin, 3)
    places.end(number, False)
    restarted = again(places)
    number, begin = restarted.begin()
    assert begin == {"round": 2, "left": True} and restarted.ask(number, begin)
    places.begin()
    assert again(places).begin() == (0, None)


def test_two_passes_side_by_side_keep_a_place_each() -> None:
    places = Places()
    (one, _), (other, _) = places.begin(), places.begin()
    for turn in range(3):
        places.ask(one, {"round": turn})
        places.give(False)
        if turn == 2:
            break
        places.ask(other, {"round": turn})
        places.give(False)
        places.step()
    restarted = again(places)
    assert restarted.begin() == (one, {"round": 2}) and restarted.begin() == (other, {"round": 1})


def test_a_look_at_one_batch_is_given_again() -> None:
    places = Places()
    number, _ = places.begin()
    places.ask(number, START)
    places.give(False)
    places.end(number, again=True)
    number, begin = places.begin()
    walk(places, number, begin, 2)
    restarted = again(places)
    assert restarted.begin() == (0, START) and restarted.begin() == (1, {"round": 1})
    assert not restarted.ask(0, START), "nothing is put back while the script looks"
    restarted.end(0, again=True)
    assert again(restarted).begin() == (0, START)


def test_a_step_of_nothing_but_batches_given_again_counts_for_nothing() -> None:
    places = Places()
    number, _ = places.begin()
    places.ask(number, START)
    places.give(False)
    assert not places.step()
    places.give(True)
    assert places.step() and places.step(), "as many steps as the script makes of it"
    places.give(False)
    places.give(True)
    assert not places.step(), "a step of several batches counts where one of them is its own"
    places.give(True)
    places.give(True)
    assert places.step()


def test_a_step_beside_all_passes_makes_the_place_unknown() -> None:
    """What the steps were made of is not known, so after a restart they are all made again."""
    places = Places()
    assert places.state is None
    number, _ = places.begin()
    places.ask(number, START)
    places.give(False)
    places.end(number, False)
    places.step()
    assert places.state is not None, "the rest of an accumulation, after the loop"
    places.step()
    assert places.state is None


@pytest.mark.parametrize("state", [{}, {"begun": 1, "asking": 0, "open": [[0, {}]]}, {"begun": "x", "asking": 0, "open": []}])
def test_a_damaged_place_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="damaged"):
        Places().load(state)


def test_a_loop_that_counts_by_itself_goes_on_at_the_pass_under_way() -> None:
    before = Places()
    for _ in range(3):
        number, _ = before.begin()
        before.ask(number, {"round": 4})
        before.give(False)
        if number < 2:
            before.end(number, False)
    state = before.state
    assert state is not None
    places = Places()
    places.load(state)
    places.go_on()
    assert places.begin() == (2, {"round": 4})
    assert places.begin() == (3, START)


def test_what_stands_in_for_a_batch_makes_no_step() -> None:
    places = Places()
    places.skip()
    assert places.skipping
    places.give(False)
    assert not places.skipping
