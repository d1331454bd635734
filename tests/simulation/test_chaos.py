"""Any order of faults, deaths, late events and time: the promises hold at every step, and the job still ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from psjob_operator.api.status import TERMINAL
from psjob_operator.contract import EXIT_FENCED, EXIT_RETRY
from psjob_operator.plan.observed_state import Process
from tests.simulation.brain import Brain, Died, settle, stored
from tests.simulation.world import World, make_spec

SEATS = [("shard", 0), ("shard", 1), ("worker", 0), ("worker", 1), ("worker", 2)]
seat = st.sampled_from(SEATS)
step = st.one_of(
    st.tuples(st.just("turn")),
    st.tuples(st.just("tick"), st.sampled_from([1.0, 2.0, 15.0])),
    st.tuples(st.just("exit"), seat, st.sampled_from([1, 137, EXIT_RETRY, EXIT_FENCED])),
    st.tuples(st.just("delete"), seat),
    st.tuples(st.just("vanish"), seat),
    st.tuples(st.just("lag")),
    st.tuples(st.just("catch-up")),
    st.tuples(st.just("die"), st.integers(1, 4), st.booleans()),
    st.tuples(st.just("another")),
    st.tuples(st.just("suspend"), st.booleans()),
    st.tuples(st.just("zombie"), seat, st.integers(1, 3)),
)


steps_of_chaos = st.lists(step, max_size=40)


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(steps_of_chaos)
def test_promises_hold_and_the_job_ends(steps: list[tuple[object, ...]]) -> None:
    live_through(steps)


@pytest.mark.rotating
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(steps_of_chaos)
def test_promises_hold_through_more_chaos(steps: list[tuple[object, ...]]) -> None:
    live_through(steps)


def live_through(steps: list[tuple[object, ...]]) -> None:
    world = World(make_spec(runPolicy={"backoffLimit": 1000}))
    brains = [Brain(world)]
    for this in steps:
        disturb(world, brains, this)
        for brain in brains:
            turn(world, brains, brain)
        promises(world)
    world.spec = world.spec.model_copy(update={"suspend": None})
    last = Brain(world)
    for _ in range(400):
        settle(last)
        promises(world)
        if stored(world).phase in TERMINAL:
            break
        world.tick(5.0)
    assert stored(world).phase == "Complete"
    settle(last)
    assert not last.turn(), "a finished job asks for nothing"


def turn(world: World, brains: list[Brain], brain: Brain) -> None:
    try:
        brain.turn()
    except Died:
        brains[brains.index(brain)] = Brain(world)


def disturb(world: World, brains: list[Brain], this: tuple[object, ...]) -> None:
    match this:
        case ("tick", float(seconds)):
            world.tick(seconds)
        case ("exit", (str(role), int(index)), int(code)):
            pod = world.current(role, index)
            if pod is not None and not (code == EXIT_FENCED and role == "worker"):
                message = f'{{"fenced": {{"term": {(stored(world).internal.term or 0) + 2}}}}}' if code == EXIT_FENCED else ""
                world.end(pod.name, code, message=message)
        case ("delete", (str(role), int(index))):
            pod = world.current(role, index)
            if pod is not None:
                world.delete(pod.name, pod.uid, None)
        case ("vanish", (str(role), int(index))):
            for pod in world.pods_of(role, index):
                del world.pods[pod.name]
        case ("lag",):
            brains[0].stale = tuple(world.pods.values())
        case ("catch-up",):
            brains[0].stale = None
        case ("die", int(write), bool(lost)):
            brains[0] = Brain(world, dies_at=write, reply_lost=lost)
        case ("another",):
            if len(brains) < 2:
                brains.append(Brain(world))
        case ("suspend", bool(wanted)):
            world.spec = world.spec.model_copy(update={"suspend": wanted})
            world.generation += 1
            world.version += 1
        case ("zombie", (str(role), int(index)), int(ahead)):
            zombie(world, role, index, ahead)


def zombie(world: World, role: str, index: int, ahead: int) -> None:
    """A pod that the status knows nothing of: the API server was restored from a backup between two starts."""
    if world.status is None or not world.status.shards:
        return
    number = (world.status.shards[index].attempt if role == "shard" else world.status.internal.worker_start) + ahead
    word = f"{world.name}-shard-{index}-a{number}" if role == "shard" else f"{world.name}-worker-{index}-r{number}"
    assert role in ("shard", "worker")
    pod = Process(
        word, f"{word}-z", "shard" if role == "shard" else "worker", index, number, world.uid, "Running", world.now, started=world.now
    )
    world.pods[word] = replace(pod)


def promises(world: World) -> None:
    assert all(count == 1 for count in world.created.values()), "a name was created twice"
    for role, index in SEATS:
        # Of a seat's pods that run and were not told to go, at most one is the newest; older ones are being replaced.
        numbers = [pod.number for pod in world.pods_of(role, index)]
        assert len(numbers) == len(set(numbers))
