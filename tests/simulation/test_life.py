"""Whole lives of a job: undisturbed, and with the operator dying at each of its writes."""

from __future__ import annotations

import pytest

from tests.simulation.brain import Brain, Died, settle, stored
from tests.simulation.world import World, describe, make_spec


def live(world: World, brain: Brain, limit: int = 400) -> Brain:
    """Run to the end; a dead operator is followed by a new one."""
    for _ in range(limit):
        try:
            settle(brain)
        except Died:
            brain = Brain(world)
            continue
        if stored(world).phase in ("Complete", "Failed"):
            settle(brain)
            return brain
        world.tick()
    raise AssertionError(f"not done after {limit} ticks: {world.status}")


def undisturbed() -> tuple[World, Brain]:
    world = World(make_spec())
    brain = Brain(world)
    live(world, brain)
    return world, brain


REFERENCE, FIRST = undisturbed()


def test_an_undisturbed_life() -> None:
    status = stored(REFERENCE)
    assert status.phase == "Complete"
    assert status.view == 1
    assert status.workers.succeeded_indexes == "0-2"
    assert status.restarts.total == 0 and status.restarts.causes == {}
    assert all(count == 1 for count in REFERENCE.created.values())
    assert sum(REFERENCE.created.values()) == 5


def test_few_requests() -> None:
    # Progress apart: at most one request a pod and fifteen a job.
    moving = [status for status in REFERENCE.history if status.progress is not None]
    assert FIRST.writes <= 5 + 15, (FIRST.writes, len(moving))


@pytest.mark.parametrize("reply_lost", [False, True])
@pytest.mark.parametrize("write", range(1, FIRST.writes + 1))
def test_the_operator_dies_at_each_write(write: int, reply_lost: bool) -> None:
    world = World(make_spec())
    live(world, Brain(world, dies_at=write, reply_lost=reply_lost))
    assert describe(world.status) == describe(REFERENCE.status)
    assert set(world.created.values()) == {1}, "no name is ever created twice"
    # At most the pods that were granted and never made, or made and not known, were raised again.
    assert sum(world.created.values()) <= 5 + 5
    assert stored(world).restarts.total == 0
