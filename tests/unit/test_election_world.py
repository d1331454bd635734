"""Operators that want one Lease, by seeds: never two that believe to hold it, and soon one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from psjob_operator.cluster.client import ApiError
from psjob_operator.cluster.leader_election import Timing
from tests.soaking import rotating
from tests.unit.election_world import Register, Replica, VirtualLoop

TIMING = Timing()
SOON = TIMING.lease * 1.12 + 2 * TIMING.retry
"""A look, the Lease's time on a clock that is a tenth slow, a try that comes to nothing."""


def play(world: Coroutine[Any, Any, None], loop: VirtualLoop) -> None:
    try:
        loop.run_until_complete(world)
        assert not loop.faults, loop.faults[0]
    finally:
        loop.close()


def replicas(count: int, dice: random.Random, loop: VirtualLoop) -> tuple[list[Replica], list[tuple[float, str]], Register]:
    register, acts = Register(), list[tuple[float, str]]()
    made = [Replica(f"r{number}", register, dice, TIMING, acts) for number in range(count)]

    def never_two() -> None:
        believers = [replica.name for replica in made if replica.candidate.leads]
        if len(believers) > 1:
            loop.faults.append(f"at {loop.time():.2f} s {believers} believe to hold it: {register.spec}")

    loop.after = never_two
    return made, acts, register


async def end(made: list[Replica], loop: VirtualLoop) -> None:
    loop.frozen.clear()
    for replica in made:
        if replica.task is not None:
            replica.task.cancel()
    await asyncio.gather(*(replica.task for replica in made if replica.task is not None), return_exceptions=True)


@pytest.mark.parametrize("seed", [*range(8), *map(rotating, range(8, 20))])
def test_never_two_and_soon_one(seed: int) -> None:
    """Freezes, cuts, losses and delays beyond every deadline; then quiet, in which one must act before long."""
    dice, loop = random.Random(seed), VirtualLoop()
    made, acts, _ = replicas(dice.randint(2, 4), dice, loop)

    async def world() -> None:
        for replica in made:
            replica.start()
        for _ in range(4):
            for _ in range(dice.randint(3, 10)):
                replica = dice.choice(made)
                match dice.randrange(4):
                    case 0:
                        loop.frozen[replica.name] = loop.time() + dice.choice([0.5, 3.0, 9.0, 14.0, 40.0])
                    case 1:
                        replica.wire.cut_until = loop.time() + dice.choice([1.0, 7.0, 20.0])
                    case 2:
                        replica.wire.loss = dice.choice([0.1, 0.5])
                    case 3:
                        replica.wire.slowest = dice.choice([1.0, 6.0, 20.0])
                await asyncio.sleep(dice.choice([0.1, 1.0, 5.0, 13.0]))
            for replica in made:
                replica.wire.loss, replica.wire.slowest, replica.wire.cut_until = 0.0, 0.05, 0.0
            loop.frozen.clear()
            # What was held back or is on its way comes first.
            await asyncio.sleep(40.0 + SOON)
            before = len(acts)
            await asyncio.sleep(2.0)
            assert len(acts) >= before + 7, f"nobody acts at {loop.time():.1f} s"
            assert len({who for _, who in acts[before:]}) == 1
        for replica in made:
            assert replica.task is not None and not replica.task.done(), replica.task
        await end(made, loop)

    play(world(), loop)


@pytest.mark.parametrize("how", ["killed", "frozen", "cut off"])
@pytest.mark.parametrize("seed", range(5))
def test_another_acts_soon(seed: int, how: str) -> None:
    dice, loop = random.Random(seed), VirtualLoop()
    made, acts, _ = replicas(3, dice, loop)

    async def world() -> None:
        for replica in made:
            replica.start()
        await asyncio.sleep(30.0 + dice.uniform(0.0, 4.0))
        leader = next(replica for replica in made if replica.candidate.leads)
        since = loop.time()
        if how == "cut off":
            leader.wire.cut_until = since + 60.0
        else:
            loop.frozen[leader.name] = since + (60.0 if how == "frozen" else 200.0)
        await asyncio.sleep(50.0)
        others = [at for at, who in acts if at > since and who != leader.name]
        assert others and others[0] - since <= SOON, (others[:1], since)
        own = [at for at, who in acts if at > since and who == leader.name]
        assert not own or own[-1] - since <= TIMING.renew * 1.12, "it stops before another begins"
        await asyncio.sleep(40.0)
        assert {who for at, who in acts if at > since + 70.0} == {acts[-1][1]} and acts[-1][1] != leader.name, "who comes back stands by"
        if how != "killed":
            assert not leader.candidate.leads and leader.task is not None and not leader.task.done()
        await end(made, loop)

    play(world(), loop)


def test_what_is_given_back_is_taken_at_the_next_look() -> None:
    dice, loop = random.Random(1), VirtualLoop()
    made, acts, register = replicas(2, dice, loop)

    async def world() -> None:
        for replica in made:
            replica.start()
        await asyncio.sleep(20.0)
        leader = next(replica for replica in made if replica.candidate.leads)
        other = next(replica for replica in made if replica is not leader)
        assert leader.task is not None and register.spec is not None
        transitions, since = register.spec["leaseTransitions"], loop.time()
        leader.task.cancel()
        await asyncio.sleep(TIMING.retry * 1.12 + 0.5)
        first = next(at for at, who in acts if who == other.name)
        assert first - since <= TIMING.retry * 1.12 + 0.3
        assert register.spec["leaseTransitions"] == transitions + 1
        await end([other], loop)
        assert register.spec["holderIdentity"] == "" and register.spec["leaseDurationSeconds"] == 1

    play(world(), loop)


def test_who_may_not_have_it_acts_alone_and_asks_again() -> None:
    """A right that comes a few seconds late is waited for; one that is missing is not; one that is given later is used."""
    dice, loop = random.Random(2), VirtualLoop()
    (only,), acts, register = replicas(1, dice, loop)
    may = False
    get = register.get

    def guarded() -> dict[str, Any]:
        if not may:
            raise ApiError(403, "Forbidden", "leases.coordination.k8s.io is forbidden")
        return get()

    register.get = guarded  # type: ignore[method-assign]

    async def world() -> None:
        nonlocal may
        only.start()
        await asyncio.sleep(5.0)
        assert only.candidate.role() == "standby" and not acts
        await asyncio.sleep(10.0)
        assert only.candidate.role() == "alone" and acts
        may = True
        await asyncio.sleep(40.0)
        assert only.candidate.role() == "leader" and register.spec is not None
        await end([only], loop)

    play(world(), loop)
