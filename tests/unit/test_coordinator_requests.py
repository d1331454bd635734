"""checkpoint.request: which checkpoint answers which number, and that no request is lost when shard 0 starts again.

- A job that is asked to stop while workers are gone: the last checkpoint holds all that was made.

Which workers hang: nobody who is only slow, only for who is waited for, told once, named a moment later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from psjob.modes import Async, ServedMode, Sync
from psjob.protocol import messages
from psjob.protocol.coordinator import events as e
from psjob.protocol.coordinator import membership
from psjob.protocol.coordinator.ending import CONFIG_SECONDS
from psjob.protocol.coordinator.events import CheckpointFacts, JobFacts, StreamFacts, Tell
from psjob.protocol.coordinator.membership import HUNG_SECONDS, REPORT_SECONDS
from psjob.protocol.coordinator.schedule import Snapshot
from psjob.protocol.coordinator.state import CoordinatorState
from psjob.protocol.messages import WorkersAwaited
from psjob.wire.frame import Kind
from tests.unit.coordinator_world import World, saved


def told(world: World) -> int | None:
    """What the status port says is answered."""
    kept = world.machine.status(world.now, 0.0)["checkpoint"]
    answered: int | None = kept and kept["observedRequest"]
    return answered


def ask(world: World, number: int | None) -> None:
    """The config names another number, and shard 0 reads it."""
    world.request = number
    world.tick(CONFIG_SECONDS + 0.1)


def passes(world: World, steps: int = 4) -> None:
    """Some steps, and time for whatever is due."""
    world.go(world.step + steps)
    for _ in range(3):
        world.tick()
    world.go(world.step + steps)


def again(made: list[CheckpointFacts], term: int = 2, request: int | None = None, shards: int = 2, **more: object) -> World:
    """Shard 0 and all others start again, and find these checkpoints."""
    world = World(term=term, must_find=True, shards=shards, request=request, **more)
    world.manifests = made
    world.post(e.Started())
    for index in range(1, shards):
        world.shard(index, term=term, attempt=term)
    assert world.c.open
    for rank in range(world.job.workers):
        world.hello(rank, start=term)
    return world


def test_a_request_is_answered_by_a_checkpoint_that_is_begun_later() -> None:
    world = World().begun()
    assert told(world) is None
    ask(world, 7)
    assert told(world) is None, "nothing is committed yet"
    passes(world)
    assert told(world) == 7 and len(world.manifests) == 2
    ask(world, 7)
    assert not world.c.snapshots.requested, "it has been met"


def test_a_checkpoint_under_way_answers_what_was_asked_before_it_began() -> None:
    world = World().begun()
    ask(world, 7)
    for _ in range(2):
        world.tick()
    first = world.c.snapshots.current
    assert first is not None
    world.request = 9
    world.post(e.ModeWished(None, "no mode of that name", request=9))  # a look that was asked for before the snapshot began
    world.go(first.step or 0)
    assert told(world) == 7, "it was begun before 9 was read"
    passes(world)
    assert told(world) == 9 and len(world.manifests) == 3, "and another follows at once"


def after_no_answer(world: World) -> None:
    """The snapshot is ordered; nobody writes it."""


def after_a_void_snapshot(world: World) -> None:
    """A shard could not write the first one."""
    snapshot = world.c.snapshots.current
    assert snapshot is not None
    world.post(messages.SnapshotUnwritten(1, snapshot.number, "no permission", False))


def in_the_commit(world: World) -> None:
    """Everything is written, and the rename is still to come."""
    world.slow = True
    passes(world)
    assert any(isinstance(job, e.CommitSnapshot) for job in world.disk)


@pytest.mark.parametrize("dies", [after_no_answer, after_a_void_snapshot, in_the_commit])
@pytest.mark.parametrize("seen", [True, False], ids=["found in the config", "comes later"])
def test_a_request_is_not_lost_with_shard_0(dies: Callable[[World], None], seen: bool) -> None:
    """`seen`: the process that starts again finds the number in its config; the first look of the coordinator does too."""
    world = World().begun()
    ask(world, 7)
    for _ in range(2):
        world.tick()
    dies(world)
    assert told(world) is None
    world = again(world.manifests, request=7 if seen else None)
    assert told(world) is None
    ask(world, 7)
    passes(world)
    assert told(world) == 7


def test_what_is_answered_is_not_asked_again() -> None:
    world = World().begun()
    ask(world, 7)
    passes(world)
    world = again(world.manifests, request=7)
    assert told(world) == 7, "the checkpoint says so before anything is committed"
    made = len(world.manifests)
    ask(world, 7)
    passes(world)
    assert len(world.manifests) == made and told(world) == 7


@pytest.mark.parametrize("before", [None, 5])
def test_what_was_asked_while_nothing_ran_is_answered_soon_after_the_start(before: int | None) -> None:
    """As after a suspension; `before` None: a checkpoint of a psjob that kept no answers, or of a run that was never asked."""
    world = again([dataclasses.replace(saved(20, 2), request=before)], request=9)
    assert told(world) == before
    ask(world, 9)
    passes(world)
    assert told(world) == 9 and len(world.manifests) == 2


def test_the_first_checkpoint_of_a_new_run_answers_what_its_manifest_asks() -> None:
    world = World(request=3).begun()
    assert told(world) == 3 and [made.step for made in world.manifests] == [0]
    ask(world, 3)
    passes(world)
    assert len(world.manifests) == 1


def test_answers_of_another_run_are_not_this_ones() -> None:
    other = dataclasses.replace(saved(20, 2), folder="/runs/run-0", run="run-0", request=7)
    world = World(term=1, request=7, resume_from="/runs/run-0")
    world.manifests = [other]
    world.post(e.Started())
    world.shard(1)
    for rank in range(2):
        world.hello(rank)
    ask(world, 7)
    passes(world)
    assert told(world) == 7 and world.manifests[-1].folder == world.job.folder


@pytest.mark.parametrize("taken_away", [False, True])
def test_an_answer_stays_in_every_later_checkpoint(taken_away: bool) -> None:
    world = World(every=8).begun()
    ask(world, 7)
    passes(world)
    ask(world, None if taken_away else 7)
    passes(world, 20)
    assert len(world.manifests) > 2 and told(world) == 7
    world = again(world.manifests, request=None if taken_away else 7)
    ask(world, None)
    world.snapshot()
    passes(world)
    assert world.manifests[-1].term == 2 and told(world) == 7


def test_a_lower_number_is_another_number() -> None:
    world = World().begun()
    for number in (7, 2):
        ask(world, number)
        passes(world)
        assert told(world) == number


def test_a_config_that_is_older_than_the_checkpoint_takes_no_answer_back() -> None:
    """A process that stood ready in reserve has read its config long ago."""
    world = again([dataclasses.replace(saved(20, 2), request=9)], request=5)
    ask(world, 9)
    passes(world)
    assert told(world) == 9 and len(world.manifests) == 1


def test_the_last_checkpoint_of_a_job_answers_too() -> None:
    world = World(mode=Async()).begun()
    world.deaf = {"snapshot"}  # no shard comes to the one that is asked for
    ask(world, 7)
    world.deaf = set()
    for rank in range(2):
        world.post(e.WorkerLeft(world._stream(rank), 0))
    for _ in range(40):
        world.tick(0.1)
    assert world.manifests[-1].final and told(world) == 7


MADE = 30


class Strict(World):
    """Its shards write a snapshot at a step only when they are there, and are late for one that is behind. Who is told to go hangs up."""

    def _carry_out(self, action: e.Action) -> None:
        super()._carry_out(action)
        if isinstance(action, e.Tell) and action.kind is Kind.STOPPED:
            self._queue.append(e.WorkerStreamEnded(action.stream))

    def order(self, shard: int, body: Mapping[str, Any]) -> None:
        if body["do"] == "snapshot" and body["step"] > self.step:
            self.answer(shard, messages.SnapshotReady(shard, body["snapshot"]))
        elif body["do"] == "snapshot" and 0 <= body["step"] < self.step:
            self.answer(shard, messages.SnapshotLate(shard, body["snapshot"], "beyond"))
        else:
            super().order(shard, body)


def running(mode: ServedMode, workers: int = 2) -> Strict:
    """A job that stands at MADE, and has checkpoints by request only."""
    world = Strict(workers, mode=mode, interval=None, every=None)
    world.begun()
    world.go(MADE)
    return world


def over(world: World) -> bool:
    """Did shard 0 end, with a last checkpoint of MADE?"""
    return any(isinstance(action, e.Leave) for action in world.left) and world.manifests[-1].step == MADE


@pytest.mark.parametrize("mode", [Sync(), Async()])
@pytest.mark.parametrize("told", [True, False])
def test_all_workers_went_before_the_job_was_asked(mode: ServedMode, told: bool) -> None:
    world = running(mode)
    streams = [world._stream(rank) for rank in range(2)]
    for rank in range(2):
        if told:
            world.post(e.WorkerStops(streams[rank]))
            world.tick(1.1)
            assert world.heard[rank][-1] is Kind.STOPPED, "a worker that is drained need not wait for others"
        else:
            world.post(e.WorkerStreamEnded(streams[rank]))
    world.post(e.StopAsked())
    for _ in range(20):
        world.tick(0.1)
    assert over(world)


@pytest.mark.parametrize("mode", [Sync(), Async()])
@pytest.mark.parametrize("late", [True, False])
def test_one_worker_is_gone_and_the_other_stands(mode: ServedMode, late: bool) -> None:
    world = running(mode)
    if not late:
        world.post(e.WorkerStreamEnded(world._stream(1)))
    world.post(e.StopAsked())
    world.tick(0.1)
    if late:
        world.post(e.WorkerStreamEnded(world._stream(1)))
        world.tick(0.1)
    assert Kind.STOP in world.heard[0]
    if mode.marks():
        assert not world.manifests[-1].step, "worker 0 is within a step, and its blocks may move"
    world.post(e.WorkerStops(world._stream(0)))
    for _ in range(20):
        world.tick(0.1)
    assert over(world) and world.heard[0][-1] is Kind.STOPPED


def test_a_worker_that_is_ahead_of_one_that_is_gone_is_not_waited_for() -> None:
    world = running(Sync())
    world.record(0, MADE + 1)
    world.post(e.WorkerStreamEnded(world._stream(1)), e.StopAsked())
    for _ in range(20):
        world.tick(0.1)
    assert over(world)


def test_a_step_that_only_the_worker_that_is_gone_has_a_record_before_is_not_asked_for_without_end() -> None:
    world = running(Sync())
    world.step = MADE + 1
    world.post(e.WorkerStreamEnded(world._stream(1)), e.StopAsked())
    for _ in range(400):
        world.tick(0.1)
    assert any(isinstance(action, e.Leave) for action in world.left) and world.manifests[-1].step < MADE
    assert world.sent["snapshot"] < 300


LIMIT = 5.0


class Job(CoordinatorState):
    """Three workers that were all let in, and a limit."""

    def __init__(self, limit: float | None = LIMIT) -> None:
        super().__init__(JobFacts("run", "/run", Sync(), 3, 1, 1, 1, step_timeout=limit), 100.0)
        for rank in range(3):
            self.members.came(StreamFacts(rank + 1, rank, (1, 0), True, "sync"))
            self.members[rank].welcomed = True

    @property
    def told(self) -> list[tuple[int, Kind]]:
        """Who was told what."""
        return [(action.stream - 1, action.kind) for action in self.out if isinstance(action, Tell)]

    def hung(self) -> list[dict[str, Any]]:
        """Who is named in the status."""
        return membership.hung(self, self.now)

    def after(self, seconds: float, waits: dict[int, float] | None = None, clocks: dict[int, int] | None = None, shard: int = 0) -> None:
        """So much later a shard tells, and the time is looked at."""
        self.now += seconds
        if waits is not None:
            membership.awaited(self, WorkersAwaited(shard, waits, clocks or {}))
        membership.tick(self)


def test_who_keeps_others_waiting_for_too_long_is_told_once_and_then_named() -> None:
    job = Job()
    job.after(0.0, {1: 0.5})
    job.after(4.0, {1: 4.5})
    assert job.told == []
    job.after(0.6, {1: 5.1})
    assert job.told == [(1, Kind.HUNG)] and job.hung() == []
    job.after(HUNG_SECONDS, {1: 5.1 + HUNG_SECONDS})
    assert job.told == [(1, Kind.HUNG)]
    assert [(entry["rank"], entry["start"]) for entry in job.hung()] == [(1, 1)]


def test_without_a_limit_nobody_is_told() -> None:
    job = Job(None)
    for _ in range(10):
        job.after(10.0, {1: 1000.0})
    assert job.told == [] and job.hung() == []


def test_a_step_begins_the_time_anew() -> None:
    job = Job()
    job.after(0.0, {1: 4.0}, {1: 7})
    job.after(2.0, {1: 6.0}, {1: 8})
    job.after(4.0, {1: 10.0}, {1: 8})
    assert job.told == []
    job.after(1.5, {1: 11.5}, {1: 8})
    assert job.told == [(1, Kind.HUNG)]


def test_a_step_that_pushes_nothing_counts_too() -> None:
    job = Job()
    for _ in range(8):
        membership.heartbeat(job, 1)
        job.after(1.0, {1: 100.0})
    assert job.told == []


def test_who_is_not_waited_for_is_left_alone_however_long_it_takes() -> None:
    job = Job()
    for _ in range(20):
        job.after(1.0, {}, {0: 3, 1: 3, 2: 3})
    assert job.told == []


def test_a_shard_that_has_told_nothing_lately_tells_nothing() -> None:
    job = Job()
    job.after(0.0, {1: 4.0})
    job.after(REPORT_SECONDS + 0.1)
    assert job.told == []


def test_each_shard_tells_for_itself() -> None:
    """A worker may hang between the pushes of one step: only one shard waits then."""
    job = Job()
    job.after(0.0, {}, shard=0)
    job.after(1.0, {2: 5.2}, shard=1)
    assert job.told == [(2, Kind.HUNG)]
    job.after(1.0, {}, shard=0)
    assert job.hung()


@pytest.mark.parametrize("event", ["came", "left"])
def test_a_new_process_and_one_that_is_through_are_not_named(event: str) -> None:
    job = Job()
    job.after(0.0, {1: 6.0})
    job.after(HUNG_SECONDS, {1: 7.0})
    assert job.hung()
    if event == "came":
        job.members.came(StreamFacts(9, 1, (2, 0), True, "sync"))
    else:
        job.members.left(1, 5)
    assert job.hung() == []


def test_who_does_not_mark_while_others_hold_for_a_snapshot_is_told() -> None:
    job = Job()
    snapshot = Snapshot(1, None, True, job.now, pins={0: 4, 2: 4}, asked=job.now)
    job.snapshots.current = snapshot
    job.after(4.8, {})
    assert job.told == []
    job.after(0.3, {})
    assert job.told == [(1, Kind.HUNG)]


def test_who_keeps_one_that_is_through_waiting_is_told_unless_it_steps() -> None:
    job = Job()
    job.members.left(0, 9)
    job.after(0.0, {}, {1: 9, 2: 9})
    job.after(3.0, {}, {1: 9, 2: 10})
    job.after(3.0, {}, {1: 9, 2: 11})
    assert job.told == [(1, Kind.HUNG)]
