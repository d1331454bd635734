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
        if turn == 2:
            break
        places.give(False, {"round": turn + 1})
        places.ask(other, {"round": turn})
        places.give(False, {"round": turn + 1})
        places.step()
    restarted = again(places)
    assert restarted.begin() == (one, {"round": 2}) and restarted.ask(one, {"round": 2})
    assert restarted.begin() == (other, {"round": 2}), "steps have used what it gave"


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


def test_a_pass_that_calls_ask_for_makes_the_place_unknown_when_it_ends() -> None:
    """A restart could not answer `next` with the end of a pass. Until then it goes on."""
    places = Places()
    number, _ = places.begin()
    for turn in range(3):
        places.ask(number, {"round": turn}, called=True)
        places.give(False, {"round": turn + 1})
        places.step()
    assert again(places).begin() == (0, {"round": 2})
    places.end(number, False)
    assert places.state is None


def test_a_pass_for_each_step_makes_the_place_unknown() -> None:
    """`next(iter(loader))` is a look at a batch, until a step is made of it."""
    places = Places()
    number, _ = places.begin()
    places.ask(number, START, called=True)
    places.give(False, {"round": 1})
    places.end(number, again=True)
    assert places.state is not None
    places.step()
    assert places.state is None
    places.begin()
    assert not places._open, "records do not grow"


def test_batches_that_are_read_ahead_make_the_place_unknown() -> None:
    places = Places()
    number, _ = places.begin()
    places.ask(number, START)
    assert not places.holds(number)
    places.give(False, {"round": 1})
    assert places.holds(number) and not places.trains
    assert places.lose(ahead=number) and not places.lose() and places.reads_ahead(number) and places.state is None
    places.step()
    places.ask(number, {"round": 1})
    assert places.trains and not places.holds(number)
    places.end(number, False)
    assert not places.trains
    assert places.begin_epoch() == (1, {}) and not places.reads_ahead(number) and places.state is not None, "an epoch begins anew"


def test_passes_within_a_pass_that_is_over_are_not_begun_again() -> None:
    """As those of `zip`, which ends with the first of its loaders, and of an evaluation in the body of the loop."""
    places = Places()
    for _ in range(2):
        number, begin = places.begin()
        walk(places, number, begin, 2)
        inner, begin = places.begin()
        walk(places, inner, begin, 2)
        places.end(inner, False)
        walk(places, number, {"round": 2}, 3)
        places.end(number, False)
        after, begin = places.begin()
        assert after == number + 2
        walk(places, after, begin, 1)
        places.end(after, False)
    restarted = again(places)
    assert [restarted.begin() for _ in range(5)] == [(0, None), (2, None), (3, None), (5, {"round": 0, "left": True}), (6, START)]


def test_the_next_pass_after_the_place_is_the_open_one_or_a_new_one() -> None:
    places = Places()
    (outer, _), (over, _) = places.begin(), places.begin()
    places.ask(outer, START)
    places.give(False, {"round": 1})
    places.ask(over, {"round": 3})
    assert places.inner
    places.end(over, False)
    beside, _ = places.begin()
    places.ask(beside, {"round": 1})
    assert places.inner
    places.give(False, {"round": 2})
    places.step()
    places.ask(outer, {"round": 4})
    assert not places.inner
    restarted = again(places)
    number, begin = restarted.begin()
    assert begin == {"round": 4} and restarted.ask(number, begin)
    assert restarted.begin() == (beside, {"round": 2}) and restarted.begin() == (3, START)


def test_a_pass_goes_on_from_epoch_to_epoch() -> None:
    """One epoch for each step, over an iterator that was made before; a look before the loop is over."""
    places = Places()
    look, _ = places.begin()
    places.ask(look, START, called=True)
    places.give(False, {"round": 1})
    assert places.begin_epoch() == (1, {0: {"round": 1}}) and places.continued == []
    number, _ = places.begin()
    for turn in range(3):
        places.ask(number, {"round": turn}, called=True)
        places.give(False, {"round": turn + 1})
        places.step()
        assert places.continued == ([(0, 1)] if turn else [])
        assert places.begin_epoch() == (2, {0: {"round": 1}, 1: {"round": turn + 1}})
    places.ask(number, {"round": 3}, called=True)
    kept = places.state
    assert kept is not None
    restarted = Places()
    restarted.load(kept)
    assert restarted.begin() == (look, START)
    restarted.begun = 2
    restarted.begin_epoch(places.continued)
    assert restarted.begin() == (number, {"round": 3}) and restarted.ask(number, {"round": 3})
    assert restarted.continued == [(0, 1)] and restarted.begin() == (2, START)


def test_the_order_in_which_passes_go_on_within_an_epoch_is_kept() -> None:
    places = Places()
    samples, _ = places.begin()
    places.ask(samples, {"round": 0}, called=True)
    places.give(False, {"round": 1})
    _, at_epoch = places.begin_epoch()
    number, _ = places.begin()
    walk(places, number, START, 2)
    places.end(number, False)
    places.ask(samples, {"round": 1}, called=True)
    assert places.continued == [(1, 0)]
    restarted = Places()
    restarted.load({"begun": 1, "asking": -1, "open": list(at_epoch.items()), "behind": []})
    restarted.begun = 1
    restarted.begin_epoch(places.continued)
    assert [restarted.begin() for _ in range(3)] == [(1, START), (0, {"round": 1}), (2, START)]


def test_what_was_read_for_the_next_epoch_is_refused() -> None:
    places = Places()
    number, _ = places.begin()
    places.ask(number, START)
    places.give(False, {"round": 1})
    places.lose(ahead=number)
    with pytest.raises(Refused, match=r"begin the pass over ps.shard\(loader\) within the epoch"):
        places.begin_epoch()


@pytest.mark.parametrize(
    "state", [{}, {"begun": 1, "asking": 0, "open": [[0, {}]], "behind": []}, {"begun": "x", "asking": 0, "open": [], "behind": []}]
)
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
