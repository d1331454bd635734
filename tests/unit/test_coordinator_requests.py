"""checkpoint.request: which checkpoint answers which number, and that no request is lost when shard 0 starts again.

- A job that is asked to stop while workers are gone: the last checkpoint holds all that was made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from psjob.modes import Async, ServedMode, Sync
from psjob.protocol import messages
from psjob.protocol.coordinator import actions as a
from psjob.protocol.coordinator import events as e
from psjob.protocol.coordinator.ending import CONFIG_SECONDS
from psjob.protocol.coordinator.events import CheckpointFacts
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
    world.post(e.ModeWished(None, request=9))  # a look that was asked for before the snapshot began
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
    assert any(isinstance(job, a.CommitSnapshot) for job in world.disk)


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

    def _carry_out(self, action: a.Action) -> None:
        super()._carry_out(action)
        if isinstance(action, a.Tell) and action.kind is Kind.STOPPED:
            self._queue.append(e.StreamEnded(action.stream))

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
    return any(isinstance(action, a.Leave) for action in world.left) and world.manifests[-1].step == MADE


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
            world.post(e.StreamEnded(streams[rank]))
    world.post(e.StopAsked())
    for _ in range(20):
        world.tick(0.1)
    assert over(world)


@pytest.mark.parametrize("mode", [Sync(), Async()])
@pytest.mark.parametrize("late", [True, False])
def test_one_worker_is_gone_and_the_other_stands(mode: ServedMode, late: bool) -> None:
    world = running(mode)
    if not late:
        world.post(e.StreamEnded(world._stream(1)))
    world.post(e.StopAsked())
    world.tick(0.1)
    if late:
        world.post(e.StreamEnded(world._stream(1)))
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
    world.post(e.StreamEnded(world._stream(1)), e.StopAsked())
    for _ in range(20):
        world.tick(0.1)
    assert over(world)


def test_a_step_that_only_the_worker_that_is_gone_has_a_record_before_is_not_asked_for_without_end() -> None:
    world = running(Sync())
    world.step = MADE + 1
    world.post(e.StreamEnded(world._stream(1)), e.StopAsked())
    for _ in range(400):
        world.tick(0.1)
    assert any(isinstance(action, a.Leave) for action in world.left) and world.manifests[-1].step < MADE
    assert world.sent["snapshot"] < 300
