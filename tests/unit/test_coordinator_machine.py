"""The coordinator's machine by itself: what voids a snapshot and what does not, how many messages it needs, what it refuses."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from psjob import contract
from psjob.modes import Async, Sync
from psjob.protocol import messages
from psjob.protocol.coordinator import checkpoints
from psjob.protocol.coordinator import events as e
from psjob.protocol.coordinator.events import StreamFacts
from psjob.protocol.coordinator.schedule import SILENCE_SECONDS, Snapshot
from psjob.wire.frame import Kind
from tests.unit.coordinator_world import World, saved


def current(world: World) -> Snapshot:
    snapshot = world.c.snapshots.current
    assert snapshot is not None
    return snapshot


def moved(world: World, snapshot: int, done: int, shard: int = 0) -> None:
    world.post(messages.BytesMoved(shard, "writing", snapshot, done, 1000))


# -- evidence, not time ----------------------------------------------------------------------------


def at_a_snapshot(world: World) -> Snapshot:
    """A snapshot is ordered, every shard has come to its step, and every record is there; the shards still write."""
    world.writes = False
    world.snapshot()
    snapshot = current(world)
    world.go(snapshot.step or 0)
    for shard in range(world.job.shards):
        world.post(messages.SnapshotHeld(shard, snapshot.number))
    return snapshot


def test_a_checkpoint_that_takes_an_hour_to_write_commits() -> None:
    world = World().begun()
    snapshot = at_a_snapshot(world)
    for second in range(3600):
        world.tick(1.0)
        for shard in range(2):
            moved(world, snapshot.number, second // 4, shard)
    assert current(world) is snapshot and world.c.progress.checkpoint_problem is None
    told = world.machine.status(world.now, 0.0)["checkpointProgress"]
    assert told == {
        "doing": "writing", "done": 1798, "total": 2000,
        "shards": [{"index": index, "doing": "writing", "done": 899, "total": 1000} for index in range(2)],
    }  # fmt: skip
    for shard in range(2):
        world.wrote(shard, snapshot.number, snapshot.step or 0)
    world.post()
    assert world.manifests[-1].step == snapshot.step and world.machine.status(world.now, 0.0)["checkpointProgress"] is None


def test_a_shard_that_tells_nothing_of_its_writing_voids_the_snapshot() -> None:
    world = World().begun()
    snapshot = at_a_snapshot(world)
    world.tick(SILENCE_SECONDS - 1)
    moved(world, snapshot.number, 0, shard=1)
    world.tick(2.0)
    assert world.c.snapshots.current is None and world.sent["void"] == 2
    assert "shard 0 has not reported on its writing" in str(world.c.progress.checkpoint_problem)
    assert world.sent["voided"] == 2, "each shard deletes what it wrote"


def test_before_it_is_held_a_snapshot_waits_for_a_long_step() -> None:
    world = World().begun()
    world.writes = False
    world.snapshot()
    snapshot = current(world)
    for _ in range(100):
        world.tick(60.0)
    assert current(world) is snapshot, "somebody computes for an hour and a half"


def test_workers_hold_for_a_mark_only_so_long_and_later_longer() -> None:
    world = World(mode=Async()).begun()
    world.snapshot()
    first = current(world)
    assert [heard.count(Kind.MARK) for heard in world.heard.values()] == [1, 1]
    world.post(e.WorkerMarked(world._stream(0), first.number, 0))
    world.tick(world.c.snapshots.MARK_SECONDS + 1)
    assert world.c.snapshots.current is None and world.heard[0][-1] is Kind.RELEASE
    assert "workers [1] did not come to the end of their step" in str(world.c.progress.checkpoint_problem)
    world.tick(2 * world.c.snapshots.MARK_SECONDS + 1)
    second = current(world)
    assert second.number > first.number
    world.tick(world.c.snapshots.MARK_SECONDS + 1)
    assert current(world) is second, "this time it is waited for longer"
    for shard in range(2):
        world.post(messages.SnapshotHeld(shard, second.number))
    for _ in range(20):
        world.tick(15.0)
        moved(world, second.number, 1, 0)
        moved(world, second.number, 1, 1)
    assert current(world) is second, "all have copied: nobody holds, and the disk may be slow"


def test_a_worker_that_dies_before_all_had_its_mark_voids_the_snapshot() -> None:
    world = World(mode=Async()).begun()
    world.snapshot()
    snapshot = current(world)
    world.post(messages.SnapshotHeld(0, snapshot.number))
    world.post(e.WorkerStreamEnded(world._stream(1)))
    assert world.c.snapshots.current is None and world.heard[0][-1] is Kind.RELEASE
    world.tick()
    assert world.c.snapshots.current is None, "nobody holds for a checkpoint that cannot be"
    world.hello(1, start=2)
    world.tick(1.0)
    after = current(world)
    for shard in range(2):
        world.post(messages.SnapshotHeld(shard, after.number))
    world.post(e.WorkerStreamEnded(world._stream(1)))
    assert current(world) is after, "held: the copy is there, whoever dies now"


def test_a_shard_whose_stream_ends_voids_the_snapshot() -> None:
    world = World().begun()
    at_a_snapshot(world)
    world.post(e.ShardLost(1, world.c.peers[1].link))
    assert world.c.snapshots.current is None and world.c.progress.checkpoint_problem is None
    world.tick(6.0)
    world.post(e.ShardLost(1, world.c.peers[1].link))
    assert "shard 1 is out of reach" in str(world.c.progress.checkpoint_problem), "twice in a row is worth a word"


def test_shards_that_hold_different_clocks_of_a_worker_make_no_checkpoint() -> None:
    world = World(mode=Async()).begun()
    world.snapshot()
    snapshot, committed = current(world), len(world.manifests)
    for rank in range(2):
        world.post(e.WorkerMarked(world._stream(rank), snapshot.number, 3))
        world.record(rank, 3)
    for shard, complete in enumerate((3, 2)):
        world.held(shard, snapshot.number)
        world.wrote(shard, snapshot.number, complete)
    world.post()
    assert len(world.manifests) == committed and world.c.snapshots.current is None
    assert "shards disagree on worker 0's step at a snapshot, a stream broke in it: [2, 3]" in str(world.c.progress.checkpoint_problem)


# -- the disk --------------------------------------------------------------------------------------


def test_files_of_the_newest_eight_void_snapshots_are_swept_when_every_shard_has_let_go() -> None:
    world = World().begun()
    world.writes = False
    world.deaf = {"void"}
    numbers = []
    for _ in range(10):
        world.snapshot()
        numbers.append(current(world).number)
        checkpoints.drop(world.c, "a test")
    world.slow = True
    for number in numbers:
        world.post(messages.SnapshotVoided(0, number))
        before = len(world.disk)
        world.post(messages.SnapshotVoided(1, number))
        assert len(world.disk) - before == (number in numbers[-8:])
    assert [swept.before for swept in world.disk if isinstance(swept, e.SweepOrphans)] == [number + 1 for number in numbers[-8:]]


def test_a_manifest_that_is_being_written_cannot_be_voided() -> None:
    """Its files would be deleted under it: only the disk says what becomes of it."""
    world = World().begun()
    snapshot = at_a_snapshot(world)
    world.slow = True
    for shard in range(2):
        world.wrote(shard, snapshot.number, snapshot.step or 0)
    world.post()
    assert snapshot.committing
    world.post(e.ShardLost(1, world.c.peers[1].link))
    world.shard(1, attempt=2, term=2)
    assert world.sent["void"] == 0 and not world.c.open
    world.slow = False
    world.work()
    assert world.manifests[-1].step == snapshot.step and world.c.open, "and it is what the new shard is restored from"
    assert [type(job).__name__ for job in world.left] == []


def test_workers_that_left_while_a_manifest_was_written_wait_for_the_final_one() -> None:
    """It says of both that they have left. Were they let go by it, nobody would ask for a final one."""
    world = World().begun()
    snapshot = at_a_snapshot(world)
    step, world.slow = snapshot.step or 0, True
    for shard in range(2):
        world.wrote(shard, snapshot.number, step, {"0": step, "1": step})
    world.post()
    for rank in range(2):
        world.post(e.WorkerLeft(world._stream(rank), step))
    world.slow, world.writes = False, True
    world.work()
    assert not any(Kind.LEFT in heard for heard in world.heard.values())
    world.tick()
    assert world.manifests[-1].final and [heard[-1] for heard in world.heard.values()] == [Kind.FINISHED] * 2


def test_a_full_volume_pauses_checkpoints_with_a_sentence() -> None:
    world = World(interval=60.0).begun()
    snapshot = at_a_snapshot(world)
    moved(world, snapshot.number, 10, 0)
    moved(world, snapshot.number, 10, 1)
    world.post(messages.SnapshotUnwritten(1, snapshot.number, "cannot write f in /runs/run-1: ENOSPC", True))
    said = str(world.c.progress.checkpoint_problem)
    assert "checkpoints pause, the volume of /runs/run-1 is full" in said
    assert "needs about 2000 bytes" in said and "12345 are free" in said and "in 5 s" in said
    world.tick(6.0)
    again = current(world)
    world.post(messages.SnapshotUnwritten(0, again.number, "ENOSPC", True))
    world.tick(30.0)
    assert world.c.snapshots.current is None and "in 60 s" in str(world.c.progress.checkpoint_problem)
    world.writes = True
    world.tick(31.0)
    world.go(world.step + 4)
    assert world.manifests[-1].step > 0 and world.c.progress.checkpoint_problem is None and not world.left


def test_a_full_volume_at_the_start_is_waited_for() -> None:
    world = World()
    world.slow = True
    world.post(e.Started())
    world.disk.clear()
    world.post(e.TermUnclaimed(1, "cannot write CLAIM-000001 in /runs/run-1: ENOSPC, the volume is full", True))
    told = world.machine.status(world.now, 0.0)
    assert "ENOSPC" in str(told["waiting"]) and "ENOSPC" in str(told["checkpointProblem"]) and not world.left
    world.slow = False
    world.tick(2.1)
    assert world.c.phase == "electing" and world.machine.status(world.now, 0.0)["checkpointProblem"] is None
    world.shard(1)
    assert world.c.phase == "fresh"


def test_a_view_that_cannot_be_claimed_for_another_reason_ends_this_process() -> None:
    world = World()
    world.slow = True
    world.post(e.Started(), e.TermUnclaimed(1, "cannot create CLAIM-000001: EROFS", False))
    assert world.left == [e.Leave(1, "cannot create CLAIM-000001: EROFS")]


def test_a_damaged_checkpoint_gives_way_to_the_one_before() -> None:
    world = World(must_find=True)
    world.manifests = [saved(10, 2), saved(20, 2)]
    world.deaf = {"restore"}
    world.post(e.Started())
    world.shard(1)
    assert world.c.restoring
    recovery = world.c.restore_id
    world.post(messages.Unrestored(1, recovery, "checkpoint file v1 is damaged", True))
    assert "manifest-20 is passed over: checkpoint file v1 is damaged" in str(world.c.progress.checkpoint_problem)
    world.manifests, world.deaf = world.manifests[:1], set()  # what the disk gives where manifest-20 is passed over
    world.tick(1.1)
    assert world.c.open and world.c.source is not None and world.c.source.step == 10


def test_what_an_earlier_coordinator_commits_too_late_is_passed_over() -> None:
    """It stood still between its look for a successor and its rename; the shards have continued from the checkpoint before."""
    world = World(term=2, must_find=True, mode=Async())
    world.manifests = [saved(10, 2)]
    world.post(e.Started())
    world.shard(1, term=2)
    assert world.c.open
    world.manifests.append(saved(20, 2))
    world.shard(1, attempt=3, term=3)
    source = world.c.source
    assert source is not None and source.step == 10
    world.manifests.append(dataclasses.replace(saved(15, 2), term=2))
    world.shard(1, attempt=4, term=4)
    source = world.c.source
    assert source is not None and source.step == 15, "this one's own checkpoint is newer than both"


def test_a_run_that_an_earlier_coordinator_ends_after_the_first_look_is_over() -> None:
    """Its rename of the final manifest comes between this one's two looks: what was trained whole is not trained again."""
    world = World(term=2, must_find=True, mode=Async())
    world.manifests = [saved(10, 2)]
    world.post(e.Started())
    world.manifests.append(dataclasses.replace(saved(20, 2), final=True))
    world.hello(0)
    world.shard(1, term=2)
    assert world.c.phase == "finished"
    assert world.sent["restore"] == 0 and world.sent["finish"] == 2
    world.hello(1)
    assert world.heard == {0: [Kind.FINISHED], 1: [Kind.FINISHED]}


def test_a_checkpoint_that_cannot_be_read_now_is_tried_again_and_never_given_up_for_good() -> None:
    world = World(must_find=True)
    world.manifests = [saved(20, 2)]
    world.deaf = {"restore"}
    world.post(e.Started())
    world.shard(1)
    for _ in range(20):
        world.post(messages.Unrestored(0, world.c.restore_id, "cannot read v1: EIO", False))
        world.tick(6.0)
    assert not world.left
    world.deaf = set()
    for _ in range(3):
        world.post(messages.Unrestored(0, world.c.restore_id, "cannot read v1: EIO", False))
        world.tick(6.0)
    assert world.c.open


def test_a_run_without_any_checkpoint_left_says_so() -> None:
    world = World(must_find=True)
    world.post(e.Started())
    (left,) = world.left
    assert left.code == contract.EXIT_CHECKPOINT_LOST and "no valid manifest" in str(left.why)


# -- growth ----------------------------------------------------------------------------------------

SHARDS, WORKERS = 64, 1000


@pytest.fixture(scope="module")
def large() -> World:
    return World(WORKERS, SHARDS).begun()


def spent(world: World) -> int:
    return sum(world.sent.values())


def test_messages_of_a_recovery_grow_with_workers_plus_shards(large: World) -> None:
    """A shard comes back, all rewind, and every worker is placed though they come one by one."""
    before, began = spent(large), time.process_time()
    large.shard(5, attempt=2, term=2)
    for rank in range(WORKERS):
        large.hello(rank, rewinds=1)
    assert large.c.open and all(member.welcomed for member in large.c.members.all.values())
    assert time.process_time() - began <= 2.0
    assert spent(large) - before <= 4 * (WORKERS + SHARDS)
    assert large.sent["where"] <= 2 * SHARDS, "the shards told all of it when they were restored"


def test_messages_of_a_snapshot_grow_with_workers_plus_shards(large: World) -> None:
    large.go(large.step + 8)
    large.snapshot()
    large.go(large.step + 4)
    before, began = large.sent.copy(), time.process_time()
    step = large.step
    large.snapshot()
    large.go(large.step + 4)
    assert time.process_time() - began <= 2.0
    assert large.c.snapshots.current is None and large.manifests[-1].step > step
    assert sum((large.sent - before).values()) <= 4 * SHARDS + WORKERS


def test_messages_of_an_async_snapshot_grow_with_workers_plus_shards() -> None:
    world = World(WORKERS, SHARDS, Async()).begun()
    world.snapshot()
    marked(world)
    before = world.sent.copy()
    world.snapshot()
    marked(world)
    assert len(world.manifests) == 3
    counted = world.sent - before
    assert counted["MARK"] == WORKERS and counted["prepare"] == 0, "memory is made once a restore, not once a snapshot"
    assert sum(counted.values()) <= 4 * SHARDS + WORKERS


def marked(world: World) -> None:
    """Every worker marks the snapshot, every shard holds and writes it."""
    snapshot = current(world)
    for rank in range(world.job.workers):
        world.record(rank, 0)
        world.post(e.WorkerMarked(world._stream(rank), snapshot.number, 0))
    for shard in range(world.job.shards):
        world.held(shard, snapshot.number)
        world.wrote(shard, snapshot.number, 0)
    world.post()
    assert world.c.snapshots.current is None


def test_who_comes_alone_is_asked_for_at_once_and_a_crowd_together() -> None:
    world = World(100, 8, Async()).begun()
    world.tick(1.0)
    asked = world.sent["where"]
    world.hello(0, start=2)
    assert world.sent["where"] - asked == 16 and world.welcomes[0].acked == 0
    for rank in range(1, 100):
        world.hello(rank, start=2)
    assert world.sent["where"] - asked == 16
    world.tick(0.3)
    assert world.sent["where"] - asked == 32 and sum(w.acked == 0 for w in world.welcomes.values()) == 100


# -- records ---------------------------------------------------------------------------------------


def test_a_worker_keeps_two_records_and_that_of_the_snapshot() -> None:
    world = World().begun()
    world.writes = False
    world.snapshot()
    step = current(world).step or 0
    world.go(step + 5)
    assert sorted(world.c.members[0].records) == [step, step + 4, step + 5]


def test_an_older_record_comes_without_its_residual() -> None:
    """What that left out went into pushes that count: fed in again, it would count twice."""
    world = World(mode=Async()).begun()
    world.record(1, 4)
    world.step = 5
    world.tick(1.0)
    world.hello(1, start=2)
    welcome = world.welcomes[1]
    assert (welcome.acked, welcome.record, welcome.body["residual"]) == (5, b"record", False)
    world.tick(1.0)
    world.record(0, 5)
    world.hello(0, start=2)
    assert world.welcomes[0].body["residual"] is True


# -- the border ------------------------------------------------------------------------------------

GOOD: list[dict[str, Any]] = [
    {"did": "restored", "restore_id": 3, "lo": 1, "hi": 1, "owned": 1, "stored": 1, "complete": [1, 2]},
    {"did": "where", "ask": 1, "lo": 1, "hi": 1, "owned": 1, "stored": 1, "rows": [[0, 3, 1], [1, 3, 0]]},
    {"did": "written", "snapshot": 1, "file": None, "blocks": [{"index": 0, "n": 4}], "rows": {"versions": [7]},
     "table": {"file": {}, "complete": [4, 4], "left": {"1": 4}}},
    {"did": "unwritten", "snapshot": 1, "why": "x", "full": True},
    {"did": "progress", "doing": "writing", "snapshot": 1, "done": 1, "total": 2},
    {"did": "arrived", "restore_id": 1, "push": [0, 3], "base": None, "carried": 0},
]  # fmt: skip


@pytest.mark.parametrize("body", GOOD, ids=lambda body: str(body["did"]))
def test_each_field_of_an_answer_is_checked_where_it_comes_in(body: dict[str, Any]) -> None:
    assert messages.decode_message(1, body, 2, lambda content: content) is not None
    for key in body.keys() - {"did", "full", "file", "complete", "rows"}:
        for wrong in (-1, "x", None, 1.5, [], {}, 1 << 70, True):
            if (
                wrong == body[key]
                or (key == "blocks" and wrong in ([], {}))
                or (key == "base" and wrong is None)
                or (key == "why" and wrong == "x")
            ):
                continue
            with pytest.raises(messages.Malformed):
                messages.decode_message(1, body | {key: wrong}, 2, lambda content: content)


def test_clocks_of_another_number_of_workers_are_refused() -> None:
    for clocks in ([1], [1, 2, 3], [1, -1], "12", {"0": 1}):
        with pytest.raises(messages.Malformed):
            messages.decode_message(1, GOOD[0] | {"complete": clocks}, 2, lambda content: content)
    with pytest.raises(messages.Malformed, match="worker 2 is not one of this job's 2"):
        messages.decode_message(1, GOOD[1] | {"rows": [[2, 0, 0]]}, 2, lambda content: content)


def test_what_another_version_says_is_left() -> None:
    assert messages.decode_message(1, {"did": "something newer"}, 2, lambda content: content) is None


def test_a_bug_in_the_machine_is_not_swallowed() -> None:
    world = World().begun()
    world.c.members.all.pop(1)
    with pytest.raises(KeyError):
        world.post(e.WorkerHello(StreamFacts(999, 1, (2, 0), True, "sync", rule="sgd")))


def test_nothing_follows_the_end_of_the_process() -> None:
    world = World().begun()
    world.post(e.TermFenced(7, "term 7 is claimed by another"))
    assert world.left == [e.LeaveFenced(7, "term 7 is claimed by another")]
    assert world.machine.handle(e.Tick(), 1e9) == [] and world.machine.handle(e.StopAsked(), 1e9) == []


def test_time_never_runs_back() -> None:
    world = World(mode=Sync()).begun()
    world.machine.handle(e.Tick(), 100.0)
    world.machine.handle(e.Tick(), 50.0)
    assert world.c.now == 100.0
