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
    places._loose = False
    restarted = again(places)
    assert restarted.begin() == (number, {"round": 1}) and restarted.ask(number, {"round": 1}) and restarted.trains
    places.end(number, False)
    assert not places.trains
    assert places.begin_epoch()["begun"] == 1 and not places.reads_ahead(number) and places.state is not None, "an epoch begins anew"


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


def test_batches_of_an_evaluation_within_a_pass_are_no_accumulation() -> None:
    places = Places()
    (outer, _), (inner, _) = places.begin(), places.begin()
    places.ask(outer, START)
    assert not places.only_within
    places.give(False, {"round": 1})
    places.ask(inner, START)
    places.give(False, {"round": 1})
    places.ask(outer, {"round": 1})
    assert not places.only_within, "a batch of the pass itself waits for its step"
    places.step()
    places.ask(inner, {"round": 1})
    places.give(False, {"round": 2})
    places.end(inner, False)
    places.ask(outer, {"round": 1})
    assert places.only_within


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


SITE = "train.py: main: 12"


def test_a_pass_goes_on_from_epoch_to_epoch() -> None:
    """One epoch for each step, over an iterator that was made before; a look before the loop is over."""
    places = Places()
    look, _ = places.begin()
    places.ask(look, START, True, "train.py: main: 3")
    places.give(False, {"round": 1})
    assert places.begin_epoch()["begun"] == 1
    number, _ = places.begin(SITE, goes_on=True)
    for turn in range(3):
        places.ask(number, {"round": turn}, True, SITE)
        places.give(False, {"round": turn + 1})
        places.step()
        at_epoch = places.begin_epoch()
        assert (at_epoch["begun"], at_epoch["open"]) == (2, [[0, {"round": 1}], [1, {"round": turn + 1}]])
    places.ask(number, {"round": 3}, True, SITE)
    for kept, stands in ((places.state, True), (at_epoch, False)):
        restarted = Places()
        restarted.load(json.loads(json.dumps(kept)))
        assert restarted.begin("train.py: main: 3", goes_on=True) == (look, START), "it runs again"
        restarted.begun = 2
        restarted.begin_epoch()
        assert restarted.begin("train.py: evaluate: 30", goes_on=True) == (2, START)
        assert restarted.begin(SITE, goes_on=True) == (number, {"round": 3})
        assert restarted.ask(number, {"round": 3}, True, SITE) == stands
        assert restarted.begin(SITE, goes_on=True) == (3, START)


def test_an_iterator_that_is_made_in_the_loop_is_a_new_pass() -> None:
    places = Places()
    places.begin_epoch()
    number, _ = places.begin(SITE)
    places.ask(number, START, True, SITE)
    places.give(False, {"round": 1})
    places.step()
    restarted = Places()
    restarted.load(places.begin_epoch())
    restarted.begun = 1
    restarted.begin_epoch()
    assert restarted.begin(SITE) == (1, START)


def test_which_iterator_goes_on_is_known_by_its_line_or_its_function() -> None:
    places = Places()
    places.begin_epoch()
    for number in range(2):
        places.begin()
        places.ask(number, {"round": number}, True, f"train.py: main: {number}")
        places.give(False, {"round": number + 1})
        places.step()
    at_epoch = places.begin_epoch()

    def restarted() -> Places:
        made = Places()
        made.load(at_epoch)
        made.begun = 2
        made.begin_epoch()
        return made

    made = restarted()
    assert made.begin("train.py: main: 1", True) == (1, {"round": 2})
    assert made.begin("train.py: main: 9", True) == (0, {"round": 1}), "no other is left"
    with pytest.raises(Refused, match=r"2 iterators over ps\.shard go on"):
        restarted().begin("train.py: main: 9", True)


def test_an_iterator_that_was_asked_before_and_in_the_loop_is_refused() -> None:
    places = Places()
    number, _ = places.begin()
    places.ask(number, START, True, SITE)
    places.give(False, {"round": 1})
    places.begin_epoch()
    with pytest.raises(Refused, match=r"train.py: main: 12: this iterator over ps.shard was asked before"):
        places.ask(number, {"round": 1}, True, SITE)


def test_what_was_read_for_the_next_epoch_is_refused() -> None:
    places = Places()
    number, _ = places.begin()
    places.ask(number, START)
    places.give(False, {"round": 1})
    places.lose(ahead=number)
    with pytest.raises(Refused, match=r"begin the pass over ps.shard\(loader\) within the epoch"):
        places.begin_epoch()


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"begun": 1, "asking": 0, "open": [[0, {}]], "called": [], "trained": [], "sites": [], "behind": []},
        {"begun": "x", "asking": 0, "open": [], "called": [], "trained": [], "sites": [], "behind": []},
    ],
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
