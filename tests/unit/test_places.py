"""If a script stands in its data, and what it is given after a restart.

- Loops of `ps.epochs` that begin again: where each continues.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from psjob.api.data_cursor import AFTER, NOWHERE, START, DataCursor, EpochLoops
from psjob.process.errors import Refused


def again(places: DataCursor) -> DataCursor:
    """Those of a script that was started again."""
    made = DataCursor()
    made.load(json.loads(json.dumps(places.state)))
    return made


def walk(places: DataCursor, number: int, begin: Any, rounds: int) -> None:
    for turn in range(begin["round"], rounds):
        places.ask(number, {"round": turn})
        places.give(False)
        places.step()


def test_passes_that_were_over_give_nothing_and_the_open_one_goes_on() -> None:
    places = DataCursor()
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
    places = DataCursor()
    number, begin = places.begin()
    walk(places, number, begin, 3)
    places.end(number, False)
    places.begin()
    assert again(places).begin() == (0, None)


ZIP = "train.py: main: 12+8"


def side_by_side(places: DataCursor, rounds: int) -> None:
    """As `zip` asks, each in its turn; the first is asked once more."""
    for turn in range(rounds + 1):
        if turn == 0:
            places.begin(ZIP)
        places.ask(0, {"round": turn}, site=ZIP)
        if turn == rounds:
            return
        places.give(False, {"round": turn + 1})
        if turn == 0:
            places.begin(ZIP)
        places.ask(1, {"round": turn}, site=ZIP)
        assert places.inner and places.is_beside
        places.give(False, {"round": turn + 1})
        places.step()


def test_two_passes_side_by_side_keep_a_place_each() -> None:
    places = DataCursor()
    side_by_side(places, 2)
    assert not places.inner
    for _ in range(2):  # the record of a script that has not asked the second one yet holds it too
        places = again(places)
        assert places.begin(ZIP) == (0, {"round": 2}) and places.ask(0, {"round": 2}, site=ZIP)
    places.give(False, {"round": 3})
    assert places.begin("train.py: main: 13+4") == (2, START), "an evaluation in the body"
    places.end(2, False)
    assert places.begin(ZIP) == (1, {"round": 2}), "steps have used what it gave"


def test_a_zip_that_comes_to_its_end_takes_the_second_pass_with_it() -> None:
    places = DataCursor()
    side_by_side(places, 2)
    restarted = again(places)
    restarted.begin(ZIP)
    assert restarted.ask(0, {"round": 2}, site=ZIP)
    restarted.end(0, False)
    number, begin = restarted.begin(ZIP)
    assert (number, begin) == (2, START)
    restarted.ask(number, START, site=ZIP)
    restarted.give(False, {"round": 1})
    assert restarted.begin(ZIP) == (3, START)


def test_a_look_at_one_batch_is_given_again() -> None:
    places = DataCursor()
    number, _ = places.begin()
    places.ask(number, START)
    places.give(False)
    places.end(number, look=True)
    number, begin = places.begin()
    assert begin is not None
    walk(places, number, begin, 2)
    restarted = again(places)
    assert restarted.begin() == (0, START)
    assert not restarted.ask(0, START), "nothing is put back while the script looks"
    restarted.end(0, look=True)
    assert restarted.begin() == (1, {"round": 1})
    restarted.ask(1, {"round": 1})
    assert again(restarted).begin() == (0, START)


def test_a_look_in_the_body_of_a_loop_is_forgotten() -> None:
    """The lines before the place do not run again, and those behind it look anew."""
    places = DataCursor()
    outer, begin = places.begin()
    assert begin is not None
    walk(places, outer, begin, 1)
    for turn in range(1, 3):
        look, _ = places.begin("train.py: look: 3+0")
        places.ask(look, START, site="train.py: look: 3+0")
        places.give(False, {"round": 1})
        places.end(look, look=True)
        places.ask(outer, {"round": turn})
        assert places.only_within and not places.goes_on_within(outer)
        places.give(False, {"round": turn + 1})
        places.step()
    assert places.state is not None and places.state["looks"] == []
    restarted = again(places)
    assert restarted.begin() == (outer, {"round": 2}) and restarted.ask(outer, {"round": 2})
    restarted.give(False, {"round": 3})
    assert restarted.begin("train.py: look: 3+0") == (3, START)


def test_a_step_of_nothing_but_batches_given_again_counts_for_nothing() -> None:
    places = DataCursor()
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
    places = DataCursor()
    assert places.state is None
    number, _ = places.begin()
    places.ask(number, START)
    places.give(False)
    places.end(number, False)
    places.step()
    assert places.state is not None, "the rest of an accumulation, after the loop"
    places.step()
    assert places.state is None


def test_a_pass_that_calls_ask_for_is_begun_again_or_makes_the_place_unknown() -> None:
    """The lines between passes run again, so a first call is answered again. Whether a later one is, depends on where the script is."""
    places = DataCursor()
    number, _ = places.begin()
    places.ask(number, START, called=True)
    places.give(False, {"round": 1})
    places.ask(number, {"round": 1}, called=True)
    assert not places.goes_on_by_calls(number), "an evaluation by calls"
    places.give(False, {"round": 2})
    places.step()
    assert places.goes_on_by_calls(number)
    training, begin = places.begin()
    assert begin is not None
    walk(places, training, begin, 2)
    restarted = again(places)
    assert restarted.begin() == (number, START) and restarted.begin() == (training, {"round": 1})
    places.end(number, False)
    assert places.state is None, "it was trained on, and a call could not be answered with the end of it"


def test_a_pass_that_is_read_whole_before_its_steps_is_no_look() -> None:
    """As `list(loader)`, whose batches are trained on when it is over."""
    places = DataCursor()
    number, _ = places.begin()
    for turn in range(2):
        places.ask(number, {"round": turn}, called=True)
        places.give(False, {"round": turn + 1})
        places.lose(ahead=number)
    places.end(number, False)
    places.step()
    assert not places._looks


def test_a_pass_that_the_body_of_a_loop_calls_for_goes_on_within() -> None:
    places = DataCursor()
    outer, begin = places.begin()
    assert begin is not None
    walk(places, outer, begin, 1)
    inner, _ = places.begin("train.py: main: 5+9")
    places.ask(inner, START, called=True, site="train.py: main: 5+9")
    places.give(False, {"round": 1})
    assert places.goes_on_within(outer) and not places.goes_on_within(inner)
    places.end(inner, False)
    assert not places.goes_on_within(outer)


def test_a_pass_for_each_step_makes_the_place_unknown() -> None:
    """`next(iter(loader))` is a look at a batch, until a step is made of it."""
    places = DataCursor()
    number, _ = places.begin()
    places.ask(number, START, called=True)
    places.give(False, {"round": 1})
    places.end(number, look=True)
    assert places.state is not None
    places.step()
    assert places.state is None


def test_batches_that_are_read_ahead_make_the_place_unknown() -> None:
    places = DataCursor()
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
    assert places.begin_epoch(0)["begun"] == 1 and places.state is not None, "an epoch begins anew"


def test_passes_within_a_pass_that_is_over_are_not_begun_again() -> None:
    """As those of `zip`, which ends with the first of its loaders, and of an evaluation in the body of the loop."""
    places = DataCursor()
    for _ in range(2):
        number, begin = places.begin()
        walk(places, number, begin, 2)
        inner, begin = places.begin("train.py: evaluate: 30+4")
        walk(places, inner, begin, 2)
        places.end(inner, False)
        walk(places, number, {"round": 2}, 3)
        places.end(number, False)
        after, begin = places.begin()
        assert after == number + 2
        walk(places, after, begin, 1)
        places.end(after, False)
    last, begin = places.begin()
    walk(places, last, begin, 1)
    restarted = again(places)
    assert [restarted.begin() for _ in range(6)] == [(0, None), (2, None), (3, None), (5, None), (6, {"round": 0}), (7, START)]


def test_a_script_that_comes_to_its_place_by_other_passes_is_refused() -> None:
    """A `while` loop around passes counts what those give, and those that were over give nothing."""
    places = DataCursor()
    for line in (3, 3, 9):
        number, begin = places.begin(f"train.py: main: {line}+4")
        assert begin is not None
        places.ask(number, START, site=f"train.py: main: {line}+4")
        if line == 3:
            places.end(number, False)
    restarted = again(places)
    assert restarted.begin("train.py: main: 3+4") == (0, None)
    assert restarted.begin("train.py: main: 9+4") == (1, None) and restarted.begin("train.py: main: 9+4") == (2, START)
    with pytest.raises(Refused, match="main: 9: after its restart the script comes to its place by other passes"):
        restarted.ask(2, START, site="train.py: main: 9+4")


def test_batches_of_an_evaluation_within_a_pass_are_no_accumulation() -> None:
    places = DataCursor()
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


SITE = "train.py: main: 12+4 < train.py: <module>: 30+0"


def test_a_pass_goes_on_from_epoch_to_epoch() -> None:
    """One epoch for each step, over an iterator that was made before; a look before the loop is over."""
    places = DataCursor()
    look, _ = places.begin("train.py: main: 3+4")
    places.ask(look, START, True, "train.py: main: 3+4")
    places.give(False, {"round": 1})
    assert places.begin_epoch(0)["begun"] == 1
    number, _ = places.begin(SITE, goes_on=True)
    for turn in range(3):
        assert not places.goes_on_by_calls(number), "once in an epoch"
        places.ask(number, {"round": turn}, True, SITE)
        places.give(False, {"round": turn + 1})
        places.step()
        assert places.goes_on_by_calls(number)
        at_epoch = places.begin_epoch(1, follows=True)
        assert (at_epoch["begun"], at_epoch["looks"]) == (2, [look])
        assert [(one["number"], one["place"]) for one in at_epoch["open"]] == [(number, {"round": turn + 1})]
    places.ask(number, {"round": 3}, True, SITE)
    for kept, stands in ((places.state, True), (at_epoch, False)):
        restarted = DataCursor()
        restarted.load(json.loads(json.dumps(kept)))
        assert restarted.begin("train.py: main: 3+4", goes_on=True) == (look, START), "it runs again"
        restarted.begun = 2
        restarted.begin_epoch(0)
        if not stands:
            assert restarted.begin("train.py: evaluate: 30+4", goes_on=True) == (2, START)
        assert restarted.begin(SITE, goes_on=True) == (number, {"round": 3})
        assert restarted.ask(number, {"round": 3}, True, SITE) == stands
        assert restarted.begin(SITE, goes_on=True) == (2 if stands else 3, START)


def look(places: DataCursor) -> int:
    number, _ = places.begin()
    places.ask(number, START)
    places.give(False, {"round": 1})
    places.end(number, look=True)
    return number


def test_looks_of_epochs_that_are_over_are_forgotten() -> None:
    places = DataCursor()
    before = look(places)
    for epoch in range(3):
        places.begin_epoch(epoch, follows=epoch > 0)
        inside = look(places)
    assert places._looks == {before, inside}
    places.begin_epoch(-1)
    between = look(places)
    state = places.begin_epoch(0)
    assert state is not None and {before, between} <= set(state["looks"]), "lines between two loops run again"


def test_lines_before_the_epochs_are_given_their_data_again_if_they_make_no_steps() -> None:
    places = DataCursor()
    outer, begin = places.begin()
    assert begin is not None
    for turn in range(2):
        places.ask(outer, {"round": turn})
        places.give(False, {"round": turn + 1})
        inner, _ = places.begin("train.py: look: 3+0")
        places.ask(inner, START)
        places.end(inner, False)
    places.ask(outer, {"round": 2})
    places.end(outer, False)
    state = places.begin_epoch(0)
    assert state is not None and (state["looks"], state["behind"]) == ([0, 1, 2], [])
    restarted = DataCursor()
    restarted.load(state)
    assert [restarted.begin() for _ in range(4)] == [(0, START), (1, START), (2, START), (3, START)]


def test_lines_before_the_epochs_that_make_steps_of_what_is_not_known_run_again_as_a_whole() -> None:
    places = DataCursor()
    number, begin = places.begin()
    assert begin is not None
    walk(places, number, begin, 2)
    places.lose()
    places.end(number, False)
    assert places.begin_epoch(0) is None and places.begin_epoch(1, follows=True) is None and places.begin_epoch(-1) is None
    assert places.state is None and places.epoch == -1


def test_an_endless_generator_does_not_take_the_pass_of_another_one() -> None:
    places = DataCursor()
    places.begin_epoch(0)
    for number in range(2):
        site = f"train.py: endless: 7+8 < train.py: main: 12+{number}"
        places.begin(site, goes_on=True)
        places.ask(number, {"round": number}, site=site)
        places.give(False, {"round": number + 1})
        places.step()
    at_epoch = places.begin_epoch(1, follows=True)
    restarted = DataCursor()
    restarted.load(at_epoch)
    restarted.begun = 2
    restarted.begin_epoch(1, follows=True)
    first, second = (f"train.py: endless: 7+8 < train.py: main: 12+{number}" for number in range(2))
    assert restarted.begin(first, goes_on=True) == (0, {"round": 1})
    restarted.end(0, False)
    assert restarted.begin(first, goes_on=True) == (2, START), "its next pass"
    assert restarted.begin(second, goes_on=True) == (1, {"round": 2})


def test_an_iterator_that_is_made_in_the_loop_is_a_new_pass() -> None:
    places = DataCursor()
    places.begin_epoch(0)
    number, _ = places.begin(SITE)
    places.ask(number, START, True, SITE)
    places.give(False, {"round": 1})
    places.step()
    restarted = DataCursor()
    restarted.load(places.begin_epoch(0))
    restarted.begun = 1
    restarted.begin_epoch(0)
    assert restarted.begin(SITE) == (1, START)


def test_which_iterator_goes_on_is_known_by_its_line_or_its_function() -> None:
    places = DataCursor()
    places.begin_epoch(0)
    for number in range(2):
        places.begin()
        places.ask(number, {"round": number}, True, f"train.py: main: {number}+4")
        places.give(False, {"round": number + 1})
        places.step()
    at_epoch = places.begin_epoch(0)

    def restarted() -> DataCursor:
        made = DataCursor()
        made.load(at_epoch)
        made.begun = 2
        made.begin_epoch(0)
        return made

    made = restarted()
    assert made.begin("train.py: main: 1+4", True) == (1, {"round": 2})
    assert made.begin("train.py: main: 9+4", True) == (0, {"round": 1}), "no other is left"
    with pytest.raises(Refused, match=r"2 iterators over ps\.shard continue"):
        restarted().begin("train.py: main: 9+4", True)


def test_an_iterator_that_was_asked_before_and_in_the_loop_is_refused() -> None:
    places = DataCursor()
    number, _ = places.begin()
    places.ask(number, START, True, SITE)
    places.give(False, {"round": 1})
    places.begin_epoch(0)
    with pytest.raises(Refused, match=r"train.py: main: 12: this iterator over ps.shard was asked before"):
        places.ask(number, {"round": 1}, True, SITE)


def test_an_epoch_that_may_use_what_was_read_before_has_no_place_of_its_own() -> None:
    places = DataCursor()
    places.begin_epoch(0)
    number, begin = places.begin(SITE)
    assert begin is not None
    walk(places, number, begin, 2)
    places.lose(ahead=number)
    assert places.begin_epoch(1, follows=True) is None and places.state is None
    assert places.ask(number, {"round": 2}, True, SITE) is False, "it continues, since a restart begins at the first epoch"
    places.end(number, False)
    assert places.begin_epoch(2, follows=True) is not None, "the pass is over"


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"begun": 1, "asking": 0, "open": [{"number": 0}], "looks": [], "behind": [], "stepped": False, "trail": [0, 0]},
        {"begun": 1, "asking": 0, "open": [], "looks": [], "behind": [], "stepped": False, "trail": [0, 0]},
        {"begun": "x", "asking": -1, "open": [], "looks": [], "behind": [], "stepped": False, "trail": [0, 0]},
    ],
)
def test_a_damaged_place_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="damaged"):
        DataCursor().load(state)


@pytest.mark.parametrize(("edited", "site", "refused"), [
    (False, "train.py: main: 12+8", False), (False, "train.py: main: 13+8", True), (False, "train.py: tune: 12+8", True),
    (True, "train.py: main: 12+8", False), (True, "train.py: main: 13+8", False), (True, "train.py: tune: 12+8", True),
])  # fmt: skip
def test_the_passes_before_are_told_by_line_and_those_of_an_edited_script_by_function(edited: bool, site: str, refused: bool) -> None:
    before, after = DataCursor(), DataCursor(edited)
    for places, where in ((before, "train.py: main: 12+8"), (after, site)):
        if places is after:
            after.load(json.loads(json.dumps(before.state)))
        number, begin = places.begin(where, over="64 batches")
        if begin is not None:
            places.ask(number, {"round": 0})
            places.give(False)
            places.end(number, False)
        number, _ = places.begin("train.py: main: 20+8")
        if refused and places is after:
            with pytest.raises(Refused, match="by other passes over the data than before"):
                places.ask(number, {"round": 0})
        else:
            assert places.ask(number, {"round": 0}) is (places is after)


def test_a_loop_that_counts_by_itself_goes_on_at_the_pass_under_way() -> None:
    before = DataCursor()
    for _ in range(3):
        number, _ = before.begin()
        before.ask(number, {"round": 4})
        before.give(False)
        if number < 2:
            before.end(number, False)
    state = before.state
    assert state is not None
    places = DataCursor()
    places.load(state)
    places.go_on()
    assert places.begin() == (2, {"round": 4})
    assert places.begin() == (3, START)


def test_what_stands_in_for_a_batch_makes_no_step() -> None:
    places = DataCursor()
    number, _ = places.begin()
    places.ask(number, START)
    places.skip()
    assert places.skipping
    places.give(False)
    assert not places.skipping


def at(passes: int) -> dict[str, Any]:
    """Where the places are after so many passes."""
    return {**NOWHERE, "begun": passes}


def followed(loops: EpochLoops) -> EpochLoops:
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
    follows = followed(loops)
    assert follows.begin(0) == 0 and follows.was_over(0) is None and follows.was_at(0) == (2, 4)


def test_a_loop_that_was_over_gives_nothing_and_the_next_goes_on() -> None:
    loops = EpochLoops()
    loops.give(loops.begin(0), 0, 0, at(0))
    loops.give(0, AFTER, 3, at(3))
    loops.give(loops.begin(3), 0, 3, at(3))
    follows = followed(loops)
    assert follows.begin(0) == 0 and follows.was_over(0) == 3 and follows.was_at(0) is None
    follows.give(0, AFTER, 3, at(3))
    assert follows.begin(3) == 1 and follows.was_over(1) is None and follows.was_at(1) == (0, 3)
    assert follows.begin(9) == 2 and follows.was_at(2) is None, "a later loop begins at its beginning"


def test_a_loop_that_was_left_is_over_when_the_next_begins() -> None:
    loops = EpochLoops()
    loops.give(loops.begin(0), 4, 8, at(8))
    loops.give(loops.begin(9), 0, 9, at(9))
    assert followed(loops).was_over(0) == 9


def test_a_record_between_two_loops_has_none_under_way() -> None:
    loops = EpochLoops()
    loops.give(loops.begin(0), 0, 0, at(0))
    assert loops.under_way == 0
    loops.give(0, AFTER, 2, at(2))
    assert loops.under_way == -1
    follows = followed(loops)
    assert follows.was_over(0) == 2 and follows.was_at(0) == (AFTER, 2), "what follows the loop continues there"
    assert follows.was_at(1) is None and follows.was_over(1) is None


def test_the_places_are_those_of_the_epochs_beginning() -> None:
    loops = EpochLoops()
    number = loops.begin(0)
    assert followed(loops).kept_at == NOWHERE
    loops.give(number, 3, 2, at(2))
    assert followed(loops).kept_at == at(2)


@pytest.mark.parametrize(
    "state", [{}, {"loop": "x", "epoch": 0, "at": {"begun": 0}, "ends": []}, {"loop": 0, "epoch": 0, "at": {"begun": 0}, "ends": 5}]
)
def test_a_damaged_place_of_a_loop_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(Refused, match="its place in the epochs is not in shape"):
        EpochLoops().load(state)


def test_where_a_restart_cannot_go_on_the_beginning_before_counts() -> None:
    loops = EpochLoops()
    number = loops.begin(0)
    loops.give(number, 0, 0, at(0))
    loops.give(number, 1, 1, None)
    assert followed(loops).was_at(number) == (0, 0)
    loops.give(number, AFTER, 2, None)
    assert loops.under_way == -1 and followed(loops).was_at(number) == (0, 0) and followed(loops).was_over(number) is None
