"""When a snapshot is due, at which step, and how it is tried again."""

from __future__ import annotations

from psjob.layout.blocks import TensorSpec
from psjob.protocol.coordinator.events import WorkerFacts
from psjob.protocol.coordinator.members import Members, State
from psjob.protocol.coordinator.membership import first_difference, resume_async, resume_sync
from psjob.protocol.coordinator.schedule import SILENCE_SECONDS, SnapshotSchedule
from psjob.protocol.messages import ShardPosition


def test_a_snapshot_by_steps_is_named_ahead_on_a_multiple() -> None:
    snapshots = SnapshotSchedule(None, 10, marks=False)
    snapshots.restart(0, 0.0)
    assert not snapshots.due(7, 1.0)
    assert snapshots.due(8, 1.0)
    assert snapshots.begin(8, 1.0).step == 10
    assert not snapshots.due(9, 1.0)
    snapshots.committed(10, 2.0)
    assert not snapshots.due(11, 3.0) and snapshots.due(18, 3.0)


def test_a_late_snapshot_is_named_further_ahead_next_time() -> None:
    snapshots = SnapshotSchedule(1.0, None, marks=False)
    snapshots.restart(0, 0.0)
    first = snapshots.begin(5, 1.0)
    assert first.step == 7
    snapshots.late(1.0)
    assert snapshots.due(9, 1.0)
    assert snapshots.begin(9, 1.0).step == 13


def test_a_snapshot_by_time_waits_for_memory_but_not_for_long() -> None:
    snapshots = SnapshotSchedule(10.0, None, marks=False)
    snapshots.restart(0, 0.0)
    assert not snapshots.prepares(3, 9.0)
    assert snapshots.prepares(5, 10.0) and not snapshots.prepares(5, 10.1), "asked once a snapshot"
    assert snapshots.due(5, 10.1) and snapshots.waits(5, 2, 10.1)
    snapshots.prepared = {0}
    assert snapshots.waits(5, 2, 11.0)
    snapshots.prepared = {0, 1}
    assert not snapshots.waits(5, 2, 11.0)
    snapshots.prepared = {0}
    assert snapshots.waits(5, 2, 9.5 + snapshots.PREPARE_SECONDS) and not snapshots.waits(5, 2, 10.0 + snapshots.PREPARE_SECONDS)
    snapshots.begin(5, 11.0)
    snapshots.committed(7, 12.0)
    assert not snapshots.prepares(9, 22.0) and not snapshots.waits(9, 2, 22.0), "memory stays"
    snapshots.restart(7, 23.0)
    assert snapshots.prepares(9, 33.0), "what was restored has none"


def test_a_snapshot_by_steps_asks_for_memory_ahead_and_stands_on_its_multiple() -> None:
    snapshots = SnapshotSchedule(None, 20, marks=False)
    snapshots.restart(0, 0.0)
    assert not snapshots.prepares(7, 1.0) and snapshots.prepares(8, 1.0)
    assert not snapshots.due(8, 1.0) and snapshots.due(18, 2.0) and not snapshots.waits(18, 2, 2.0)
    assert snapshots.begin(18, 2.0).step == 20


def test_a_failed_write_waits_before_it_is_tried_again() -> None:
    snapshots = SnapshotSchedule(1.0, None, marks=False)
    snapshots.restart(0, 0.0)
    snapshots.begin(5, 1.0)
    snapshots.failed(2.0)
    assert not snapshots.due(9, 6.9)
    assert snapshots.due(9, 7.1)


def test_marked_snapshots_name_no_step_and_expire() -> None:
    snapshots = SnapshotSchedule(1.0, None, marks=True)
    snapshots.restart(0, 0.0)
    snapshot = snapshots.begin(5, 1.0)
    assert snapshot.step is None and not snapshots.expired(1000.0), "nobody holds before all shards are ready"
    snapshot.ready, snapshot.asked = {0, 1}, 1.0
    assert not snapshots.expired(1.0 + snapshots.MARK_SECONDS)
    assert snapshots.expired(1.1 + snapshots.MARK_SECONDS)
    snapshot.held = {0: 2.0, 1: 3.0}
    assert not snapshots.expired(1000.0), "all have copied, and nobody holds any more"
    snapshot.held = {0: 2.0}
    snapshots.timed_out(20.0)
    assert snapshots.current is None and not snapshots.due(5, 21.0)


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
    assert first_difference(1, table, same) is None
    other = [same[0], TensorSpec("b", (5,), "float32", 0)]
    assert "b [5] float32" in str(first_difference(1, table, other))
    assert "b [4] is missing" in str(first_difference(1, table, same[:1]))


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


def test_numbers_of_snapshots_rise_with_the_view_and_have_32_bits() -> None:
    numbers = [SnapshotSchedule(1.0, None, marks=False, term=term).number for term in (0, 1, (1 << 15) - 1, 1 << 15, (1 << 15) + 2)]
    assert numbers == [0, 1 << 16, (1 << 31) - (1 << 16), 0, 2 << 16]


def test_a_shard_that_holds_a_snapshot_is_silent_when_it_tells_nothing() -> None:
    snapshots = SnapshotSchedule(1.0, None, marks=False)
    snapshot = snapshots.begin(5, 1.0)
    assert snapshot.silent(1e6) is None, "before it holds, a snapshot waits for workers, who may take long"
    snapshot.held = {0: 10.0, 1: 15.0}
    assert snapshot.silent(10.0 + SILENCE_SECONDS) is None and snapshot.silent(10.1 + SILENCE_SECONDS) == 0
    snapshot.held[0] = 20.0
    assert snapshot.silent(15.1 + SILENCE_SECONDS) == 1


def test_a_full_volume_is_tried_soon_and_then_once_an_interval() -> None:
    snapshots = SnapshotSchedule(60.0, None, marks=False)
    snapshots.begin(5, 1.0)
    assert snapshots.full(2.0) == snapshots.FAILED_SECONDS
    assert not snapshots.due(5, 6.9) and snapshots.due(5, 7.1)
    snapshots.begin(5, 7.1)
    assert snapshots.full(8.0) == 60.0 and not snapshots.due(5, 67.9) and snapshots.due(5, 68.1)
    snapshots.ask(20.0)
    assert snapshots.due(5, 20.0), "someone asks: perhaps there is room now"
    snapshots.begin(5, 20.0, final=True)
    assert snapshots.full(21.0) == snapshots.FAILED_SECONDS, "the last one is what everybody waits for"
    snapshots.begin(5, 30.0)
    snapshots.committed(7, 31.0)
    snapshots.begin(9, 91.0)
    assert snapshots.full(92.0) == snapshots.FAILED_SECONDS


def test_a_snapshot_that_was_asked_for_and_dropped_is_still_asked_for() -> None:
    snapshots = SnapshotSchedule(None, None, marks=False)
    snapshots.ask(0.0)
    snapshots.begin(5, 1.0)
    assert not snapshots.requested
    snapshots.drop()
    assert snapshots.requested and snapshots.current is None


def test_marks_that_came_late_once_are_waited_for_as_before() -> None:
    snapshots = SnapshotSchedule(1.0, None, marks=True)
    snapshots.restart(0, 0.0)
    snapshots.begin(5, 1.0)
    snapshots.timed_out(20.0)
    snapshot = snapshots.begin(6, 60.0)
    snapshot.ready, snapshot.asked = {0}, 60.0
    assert not snapshots.expired(60.1 + snapshots.MARK_SECONDS), "twice as long after a first try"
    snapshots.committed(6, 80.0)
    snapshot = snapshots.begin(7, 100.0)
    snapshot.ready, snapshot.asked = {0}, 100.0
    assert snapshots.expired(100.1 + snapshots.MARK_SECONDS)


def test_nothing_begins_beside_a_snapshot_or_too_soon_after_a_failed_one() -> None:
    snapshots = SnapshotSchedule(1.0, None, marks=False)
    assert snapshots.may_begin(0.0)
    snapshots.begin(5, 1.0, final=True)
    assert not snapshots.may_begin(100.0)
    snapshots.failed(100.0)
    assert not snapshots.may_begin(104.9) and snapshots.may_begin(105.1)


def test_a_snapshot_without_a_step_waits_for_the_one_that_is_being_written() -> None:
    """It is late for no step; begun again at once it would be late a thousand times."""
    snapshots = SnapshotSchedule(interval=None, every=None, marks=True)
    snapshots.begin(5, now=10.0, final=True, still=True)
    snapshots.late(10.0)
    assert not snapshots.may_begin(10.1) and snapshots.may_begin(10.0 + SnapshotSchedule.WRITING_SECONDS)


def test_marked_snapshots_by_steps_are_due_on_the_multiple() -> None:
    """They snapshot where the workers stand, so there is nothing to be early for."""
    snapshots = SnapshotSchedule(interval=None, every=7, marks=True)
    snapshots.restart(0, now=0.0)
    assert [step for step in range(10) if snapshots.due(step, now=1.0)] == [7, 8, 9]
    snapshots.begin(7, now=1.0)
    snapshots.committed(7, now=1.0)
    assert not snapshots.due(13, now=2.0) and snapshots.due(14, now=2.0)
