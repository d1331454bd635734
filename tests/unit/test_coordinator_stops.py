"""A job that is asked to stop while workers are gone: the last checkpoint holds all that was made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from psjob.modes import Async, ServedMode, Sync
from psjob.protocol.coordinator import actions as a
from psjob.protocol.coordinator import events as e
from psjob.wire.frame import Kind
from tests.unit.coordinator_world import World

MADE = 30


class Strict(World):
    """Its shards write a cut at a step only when they are there, and are late for one that is behind. Who is told to go hangs up."""

    def _carry_out(self, action: a.Action) -> None:
        super()._carry_out(action)
        if isinstance(action, a.Tell) and action.kind is Kind.STOPPED:
            self._queue.append(e.StreamEnded(action.stream))

    def order(self, shard: int, body: Mapping[str, Any]) -> None:
        if body["do"] == "cut" and body["step"] > self.step:
            self.answer(shard, {"did": "ready", "cut": body["cut"]})
        elif body["do"] == "cut" and 0 <= body["step"] < self.step:
            self.answer(shard, {"did": "late", "cut": body["cut"], "why": "beyond"})
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
    assert world.sent["cut"] < 300
