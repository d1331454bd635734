"""When a cut is due, at which step, and how it is tried again."""

from __future__ import annotations

from psjob.layout.blocks import TensorSpec
from psjob.protocol.coordinator.events import WorkerFacts
from psjob.protocol.coordinator.members import Members, State
from psjob.protocol.coordinator.membership import difference, resume_async, resume_sync
from psjob.protocol.coordinator.schedule import SILENCE_SECONDS, Cuts
from psjob.protocol.messages import ShardPosition


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
    assert cuts.waits(5, 2, 9.5 + cuts.PREPARE_SECONDS) and not cuts.waits(5, 2, 10.0 + cuts.PREPARE_SECONDS)
    cuts.begin(5, 11.0)
    cuts.committed(7, 12.0)
    assert not cuts.prepares(9, 22.0) and not cuts.waits(9, 2, 22.0), "memory stays"
    cuts.restart(7, 23.0)
    assert cuts.prepares(9, 33.0), "what was restored has none"


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
    cut = cuts.begin(5, 1.0)
    assert cut.step is None and not cuts.expired(1000.0), "nobody holds before all shards are ready"
    cut.ready, cut.asked = {0, 1}, 1.0
    assert not cuts.expired(1.0 + cuts.MARK_SECONDS)
    assert cuts.expired(1.1 + cuts.MARK_SECONDS)
    cut.held = {0: 2.0, 1: 3.0}
    assert not cuts.expired(1000.0), "all have copied, and nobody holds any more"
    cut.held = {0: 2.0}
    cuts.timed_out(20.0)
    assert cuts.current is None and not cuts.due(5, 21.0)


def test_a_sync_worker_returns_only_where_the_job_waits() -> None:
    at = [ShardPosition(7, 7, 2, 7), ShardPosition(7, 7, 1, 7)]
    assert resume_sync(at, {5, 6, 7}) == 7
    assert resume_sync(at, {5, 6}) is None
    assert resume_sync([*at, ShardPosition(7, 8, 1, 7)], {7}) is None
    assert resume_sync([ShardPosition(0, 0, 1, 0)], set()) == 0


def test_an_async_worker_goes_on_after_the_highest_clock() -> None:
    assert resume_async([4, 4]) == 4
    assert resume_async([4, 3]) == 3
    assert resume_async([9, 3]) == 9
    assert resume_async([9, 3, 8]) == 8
    assert resume_async([]) == 0


def test_the_first_difference_of_two_tables_is_named() -> None:
    table = [TensorSpec("a", (2, 3), "float32", 0), TensorSpec("b", (4,), "float32", 0)]
    same = [TensorSpec("a", (2, 3), "float32", 0), TensorSpec("b", (4,), "float32", 0)]
    assert difference(1, table, same) is None
    other = [same[0], TensorSpec("b", (5,), "float32", 0)]
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
    members.rewound([WorkerFacts(5), WorkerFacts(5)], {1: b"five"})
    assert members[0].state is State.LOST and members[0].left_at is None
    assert members[1].records == {5: b"five"}
    assert members.fences() == {1: (1, 1)}
    members.rewound([WorkerFacts(5), WorkerFacts(5, record=3)], {1: b"three"})
    assert (members[1].clock, members[1].records) == (5, {3: b"three"})


def test_numbers_of_cuts_rise_with_the_view_and_have_32_bits() -> None:
    numbers = [Cuts(1.0, None, marks=False, term=term).number for term in (0, 1, (1 << 15) - 1, 1 << 15, (1 << 15) + 2)]
    assert numbers == [0, 1 << 16, (1 << 31) - (1 << 16), 0, 2 << 16]


def test_a_shard_that_holds_a_cut_is_silent_when_it_tells_nothing() -> None:
    cuts = Cuts(1.0, None, marks=False)
    cut = cuts.begin(5, 1.0)
    assert cut.silent(1e6) is None, "before it holds, a cut waits for workers, who may take long"
    cut.held = {0: 10.0, 1: 15.0}
    assert cut.silent(10.0 + SILENCE_SECONDS) is None and cut.silent(10.1 + SILENCE_SECONDS) == 0
    cut.held[0] = 20.0
    assert cut.silent(15.1 + SILENCE_SECONDS) == 1


def test_a_full_volume_is_tried_soon_and_then_once_an_interval() -> None:
    cuts = Cuts(60.0, None, marks=False)
    cuts.begin(5, 1.0)
    assert cuts.full(2.0) == cuts.FAILED_SECONDS
    assert not cuts.due(5, 6.9) and cuts.due(5, 7.1)
    cuts.begin(5, 7.1)
    assert cuts.full(8.0) == 60.0 and not cuts.due(5, 67.9) and cuts.due(5, 68.1)
    cuts.ask(20.0)
    assert cuts.due(5, 20.0), "someone asks: perhaps there is room now"
    cuts.begin(5, 20.0, final=True)
    assert cuts.full(21.0) == cuts.FAILED_SECONDS, "the last one is what everybody waits for"
    cuts.begin(5, 30.0)
    cuts.committed(7, 31.0)
    cuts.begin(9, 91.0)
    assert cuts.full(92.0) == cuts.FAILED_SECONDS


def test_a_cut_that_was_asked_for_and_dropped_is_still_asked_for() -> None:
    cuts = Cuts(None, None, marks=False)
    cuts.ask(0.0)
    cuts.begin(5, 1.0)
    assert not cuts.requested
    cuts.drop()
    assert cuts.requested and cuts.current is None


def test_marks_that_came_late_once_are_waited_for_as_before() -> None:
    cuts = Cuts(1.0, None, marks=True)
    cuts.restart(0, 0.0)
    cuts.begin(5, 1.0)
    cuts.timed_out(20.0)
    cut = cuts.begin(6, 60.0)
    cut.ready, cut.asked = {0}, 60.0
    assert not cuts.expired(60.1 + cuts.MARK_SECONDS), "twice as long after a first try"
    cuts.committed(6, 80.0)
    cut = cuts.begin(7, 100.0)
    cut.ready, cut.asked = {0}, 100.0
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
