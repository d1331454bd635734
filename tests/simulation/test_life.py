"""Whole lives of a job, undisturbed or with a fault, and with the operator dying at each of its writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from psjob_operator.contract import EXIT_RETRY
from tests.simulation.brain import Brain, Died, settle, stored
from tests.simulation.world import World, describe, make_spec
from tests.support.soaking import rotating

Story = Callable[[World, int], None]


def quiet(world: World, tick: int) -> None:
    """Nothing happens."""


def crash(world: World, tick: int) -> None:
    """A shard and a worker fail, another worker is deleted by hand."""
    shard, worker, deleted = world.current("shard", 1), world.current("worker", 0), world.current("worker", 2)
    if tick == 15 and shard is not None and worker is not None and deleted is not None:
        world.end(shard.name, 137, "OOMKilled")
        world.end(worker.name, EXIT_RETRY)
        world.delete(deleted.name, deleted.uid, None)


def pause(world: World, tick: int) -> None:
    """The job is suspended for a while."""
    if tick in (15, 30):
        world.spec = world.spec.model_copy(update={"suspend": tick == 15})
        world.generation += 1
        world.version += 1


def late(world: World, tick: int) -> None:
    """A worker has left and crashes then: the one that follows it comes when the shards have gone."""
    worker = world.current("worker", 1)
    if world.final and worker is not None and not any(pod.exit for pod in world.pods_of("worker", 1)):
        world.end(worker.name, 5)


STORIES: dict[str, Story] = {"quiet": quiet, "crash": crash, "pause": pause, "late": late}


def live(world: World, brain: Brain, story: Story, limit: int = 400) -> Brain:
    """Run to the end; a dead operator is followed by a new one."""
    tick = 0
    while tick < limit:
        try:
            settle(brain)
        except Died:
            brain = Brain(world)
            continue
        if stored(world).phase in ("Complete", "Failed"):
            return brain
        world.tick()
        tick += 1
        story(world, tick)
    raise AssertionError(f"not done after {limit} ticks: {world.status}")


def reference(story: Story) -> tuple[World, Brain]:
    world = World(make_spec())
    brain = Brain(world)
    live(world, brain, story)
    return world, brain


REFERENCES = {name: reference(story) for name, story in STORIES.items()}
EACH = 4
"""`make test` takes every fourth write; with an answer that was lost or came, in turn."""
DEATHS = [
    (name, write, lost) if write % EACH == lost else rotating(name, write, lost)
    for name, (_, brain) in REFERENCES.items()
    for write in range(1, brain.writes + 1)
    for lost in (False, True)
]


def test_an_undisturbed_life() -> None:
    world, brain = REFERENCES["quiet"]
    status = stored(world)
    assert status.phase == "Complete" and status.internal.term == 1
    assert status.workers.succeeded_indexes == "0-2"
    assert status.restarts.total == 0 and status.restarts.causes == {}
    assert sum(world.created.values()) == 5 and set(world.created.values()) == {1}
    # At most one request a pod and fifteen a job; progress, though it is in here, is counted apart.
    assert brain.writes <= 5 + 15


def test_a_life_with_failures() -> None:
    world, brain = REFERENCES["crash"]
    status = stored(world)
    assert status.phase == "Complete"
    assert status.restarts.causes == {"Deleted": 1, "OOMKilled": 1, "Retry": 1} and status.restarts.counted == 1
    assert [shard.attempt for shard in status.shards] == [1, 2] and status.internal.term == 2 and status.internal.worker_start == 2
    assert sum(world.created.values()) == 8
    assert brain.writes <= 5 + 15 + 3 * 4, "four more for each restart"
    assert [event.reason for event in brain.events] == ["Running", "Restarted", "Completed"]


def test_a_suspended_life() -> None:
    world, brain = REFERENCES["pause"]
    status = stored(world)
    assert status.phase == "Complete" and status.restarts.total == 0
    assert [shard.attempt for shard in status.shards] == [2, 2] and status.internal.term == 2 and status.internal.worker_start == 2
    assert [event.reason for event in brain.events] == ["Running", "Suspending", "Suspended", "Resumed", "Running", "Completed"]


def test_a_worker_that_crashes_after_it_has_left_is_told_soon() -> None:
    world, _ = REFERENCES["late"]
    status = stored(world)
    assert status.phase == "Complete" and status.workers.succeeded_indexes == "0-2"
    assert status.restarts.causes == {"Error": 1, "Finished": 2} and status.restarts.counted == 1
    assert [shard.attempt for shard in status.shards] == [2, 2] and status.internal.worker_start == 2
    assert world.now < 1_000_000.0 + world.steps + 120, "nobody looked for the shards in vain for ten minutes"


@pytest.mark.parametrize(("story", "write", "reply_lost"), DEATHS)
def test_the_operator_dies_at_each_write(story: str, write: int, reply_lost: bool) -> None:
    undisturbed, _ = REFERENCES[story]
    world = World(make_spec())
    live(world, Brain(world, dies_at=write, reply_lost=reply_lost), STORIES[story])
    assert describe(world.status) == describe(undisturbed.status)
    assert set(world.created.values()) == {1}, "no name is ever created twice"
    # What was granted and not yet made, or made and not yet known, is raised again; nothing else is.
    assert sum(world.created.values()) <= sum(undisturbed.created.values()) + 5
    failures = {cause: number for cause, number in stored(world).restarts.causes.items() if cause != "Missing"}
    assert failures == stored(undisturbed).restarts.causes, "a failure counts once"
    assert stored(world).restarts.counted == stored(undisturbed).restarts.counted
