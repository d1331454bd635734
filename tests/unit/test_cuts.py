"""When a cut is due, at which step, and how it is tried again."""

from __future__ import annotations

from psjob.protocol.coordinator.cuts import Cuts
from psjob.protocol.coordinator.joining import difference, resume_async, resume_sync
from psjob.protocol.coordinator.members import Members, State
from psjob.layout.blocks import TensorSpec


def test_a_cut_by_steps_is_named_ahead_on_a_multiple() -> None:
    cuts = Cuts(None, 10, marks=False)
    cuts.restart(0, 0.0)
    assert not cuts.due(7, 1.0)
    assert cuts.due(8, 1.0)
    assert cuts.begin(8, 1.0).step == 10
    assert not cuts.due(9, 1.0)
    cuts.committed(10, 2.0)
    assert not cuts.due(11, 3.0) and cuts.due(18, 3.0)


def test_a_late_cut_is_named_further_ahead_next_time() -> None:
    cuts = Cuts(1.0, None, marks=False)
    cuts.restart(0, 0.0)
    first = cuts.begin(5, 1.0)
    assert first.step == 7
    cuts.late(1.0)
    assert cuts.due(9, 1.0)
    assert cuts.begin(9, 1.0).step == 13


def test_a_cut_by_time_waits_for_memory_but_not_for_long() -> None:
    cuts = Cuts(10.0, None, marks=False)
    cuts.restart(0, 0.0)
    assert not cuts.prepares(3, 9.0)
    assert cuts.prepares(5, 10.0) and not cuts.prepares(5, 10.1), "asked once a cut"
    assert cuts.due(5, 10.1) and cuts.waits(5, 2, 10.1)
    cuts.prepared = {0}
    assert cuts.waits(5, 2, 11.0)
    cuts.prepared = {0, 1}
    assert not cuts.waits(5, 2, 11.0)
    cuts.prepared = {0}
    assert not cuts.waits(5, 2, 10.0 + cuts.PREPARE_SECONDS)
    cuts.begin(5, 11.0)
    cuts.committed(7, 12.0)
    assert not cuts.prepares(8, 13.0) and cuts.prepares(9, 22.0)


def test_a_cut_by_steps_asks_for_memory_ahead_and_stands_on_its_multiple() -> None:
    cuts = Cuts(None, 20, marks=False)
    cuts.restart(0, 0.0)
    assert not cuts.prepares(7, 1.0) and cuts.prepares(8, 1.0)
    assert not cuts.due(8, 1.0) and cuts.due(18, 2.0) and not cuts.waits(18, 2, 2.0)
    assert cuts.begin(18, 2.0).step == 20


def test_a_failed_write_waits_before_it_is_tried_again() -> None:
    cuts = Cuts(1.0, None, marks=False)
    cuts.restart(0, 0.0)
    cuts.begin(5, 1.0)
    cuts.failed(2.0)
    assert not cuts.due(9, 6.9)
    assert cuts.due(9, 7.1)


def test_marked_cuts_name_no_step_and_expire() -> None:
    cuts = Cuts(1.0, None, marks=True)
    cuts.restart(0, 0.0)
    assert cuts.begin(5, 1.0).step is None
    assert not cuts.expired(1.0 + cuts.MARK_SECONDS)
    assert cuts.expired(1.1 + cuts.MARK_SECONDS)
    cuts.timed_out(20.0)
    assert cuts.current is None and not cuts.due(5, 21.0)


def test_a_sync_worker_returns_only_where_the_job_waits() -> None:
    at = [{"lo": 7, "hi": 7, "owned": 2}, {"lo": 7, "hi": 7, "owned": 1}]
    assert resume_sync(at, {5, 6, 7}) == 7
    assert resume_sync(at, {5, 6}) is None
    assert resume_sync([*at, {"lo": 7, "hi": 8}], {7}) is None
    assert resume_sync([{"lo": 0, "hi": 0}], set()) == 0


def test_an_async_worker_goes_on_after_the_highest_clock() -> None:
    assert resume_async([{"complete": 4, "open": 0}, {"complete": 4, "open": 2}]) == 4
    assert resume_async([{"complete": 4, "open": 0}, {"complete": 3, "open": 1}]) == 3
    assert resume_async([{"complete": 9, "open": 0}, {"complete": 3, "open": 0}]) == 9
    assert resume_async([{"complete": 9, "open": 0}, {"complete": 3, "open": 0}, {"complete": 8, "open": 0}]) == 8
    assert resume_async([]) == 0


def test_the_first_difference_of_two_tables_is_named() -> None:
    table = [TensorSpec("a", (2, 3), "float32", 0), TensorSpec("b", (4,), "float32", 0)]
    same = [{"name": "a", "shape": [2, 3], "dtype": "float32", "group": 0}, {"name": "b", "shape": [4], "dtype": "float32", "group": 0}]
    assert difference(1, table, same) is None
    other = [same[0], same[1] | {"shape": [5]}]
    assert "b [5] float32" in str(difference(1, table, other))
    assert "b [4] is missing" in str(difference(1, table, same[:1]))


def test_the_success_policies_look_at_who_left() -> None:
    members = Members(2)
    assert not members.finished("AllWorkers") and not members.finished("FirstWorker")
    members.left(0, 10)
    assert members.finished("FirstWorker") and not members.finished("AllWorkers")
    members.left(1, 10)
    assert members.finished("AllWorkers")


def test_a_rewind_brings_leavers_of_later_steps_back() -> None:
    members = Members(2)
    members.left(0, 10)
    members[1].incarnation = (1, 0)
    members[1].keep(9, b"x", None)
    members.rewound(5, {"0": {"clock": 5, "leftAt": None}, "1": {"clock": 5, "leftAt": None}}, {1: b"five"})
    assert members[0].state is State.LOST and members[0].left_at is None
    assert members[1].records == {5: b"five"}
    assert members.fences() == {1: [1, 1]}


def test_a_cut_that_training_has_long_passed_is_stuck() -> None:
    cuts = Cuts(1.0, None, marks=False)
    cuts.restart(0, 0.0)
    cut = cuts.begin(5, 1.0)
    assert cut.step == 7
    late = 1.1 + cuts.STUCK_SECONDS
    assert cuts.stuck(8, late)
    assert not cuts.stuck(7, late), "training stands at the step: it waits for a worker, and so does the cut"
    assert not cuts.stuck(8, late - 1.0)
    cuts.failed(late)
    assert not cuts.stuck(8, late)
    cuts.begin(9, late, still=True)
    assert not cuts.stuck(100, late + 1000.0), "one that copies as it stands names no step"


def test_marks_that_came_late_once_are_waited_for_as_before() -> None:
    cuts = Cuts(1.0, None, marks=True)
    cuts.restart(0, 0.0)
    cuts.begin(5, 1.0)
    cuts.timed_out(20.0)
    cuts.begin(6, 60.0)
    assert not cuts.expired(60.1 + cuts.MARK_SECONDS), "twice as long after a first try"
    cuts.committed(6, 80.0)
    cuts.begin(7, 100.0)
    assert cuts.expired(100.1 + cuts.MARK_SECONDS)


def test_nothing_begins_beside_a_cut_or_too_soon_after_a_failed_one() -> None:
    cuts = Cuts(1.0, None, marks=False)
    assert cuts.may_begin(0.0)
    cuts.begin(5, 1.0, final=True)
    assert not cuts.may_begin(100.0)
    cuts.failed(100.0)
    assert not cuts.may_begin(104.9) and cuts.may_begin(105.1)


def test_a_cut_without_a_step_waits_for_the_one_that_is_being_written() -> None:
    """It is late for no step; begun again at once it would be late a thousand times."""
    cuts = Cuts(interval=None, every=None, marks=True)
    cuts.begin(5, now=10.0, final=True, still=True)
    cuts.late(10.0)
    assert not cuts.may_begin(10.1) and cuts.may_begin(10.0 + Cuts.WRITING_SECONDS)


def test_marked_cuts_by_steps_are_due_on_the_multiple() -> None:
    """They cut where the workers stand, so there is nothing to be early for."""
    cuts = Cuts(interval=None, every=7, marks=True)
    cuts.restart(0, now=0.0)
    assert [step for step in range(10) if cuts.due(step, now=1.0)] == [7, 8, 9]
    cuts.begin(7, now=1.0)
    cuts.committed(7, now=1.0)
    assert not cuts.due(13, now=2.0) and cuts.due(14, now=2.0)
