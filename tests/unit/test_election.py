"""Who takes turns: the rules, as tables.

- Operators that want one Lease, by seeds: never two that believe to hold it, and soon one.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from psjob_operator.cluster import leader_election as election
from psjob_operator.cluster.client import ApiError
from psjob_operator.cluster.leader_election import Do, Lease, LeaseMove, Standing, Timing
from tests.support.soaking import rotating
from tests.unit.election_world import Register, Replica, VirtualLoop

TIMING = Timing(12)  # a holder stops after 8 s, renews and looks each 2 s
THEIRS = Lease(holder="b", seconds=12, renewed="r1", acquired="a1", transitions=3, version="7")
MINE = replace(THEIRS, holder="a")
NOBODYS = replace(THEIRS, holder="", seconds=1)
NEW = Standing("a", TIMING)


def standing(
    lease: Lease | None, seen_at: float, looked_at: float, renewed_at: float | None = None, tried_at: float = -math.inf
) -> Standing:
    return Standing("a", TIMING, lease, True, seen_at, looked_at, renewed_at, tried_at)


@pytest.mark.parametrize(
    ("case", "known", "now", "move"),
    [
        ("nothing known: look", NEW, 100.0, LeaseMove(Do.LOOK)),
        ("nothing known, and the last try failed: wait", election.renewal_failed(NEW, 100.0), 101.0, LeaseMove(Do.WAIT, 102.0)),
        ("there is none: take it", standing(None, -math.inf, 100.0), 100.0, LeaseMove(Do.WRITE)),
        ("given back: take it", standing(NOBODYS, 100.0, 100.0), 100.0, LeaseMove(Do.WRITE)),
        ("held by another: look again each 2 s", standing(THEIRS, 100.0, 100.0), 101.0, LeaseMove(Do.WAIT, 102.0)),
        ("held by another: look", standing(THEIRS, 100.0, 100.0), 102.0, LeaseMove(Do.LOOK)),
        ("about to run out: not later than that", standing(THEIRS, 100.0, 111.0), 111.5, LeaseMove(Do.WAIT, 112.0)),
        ("run out: take it", standing(THEIRS, 100.0, 111.0), 112.0, LeaseMove(Do.WRITE)),
        ("run out, but the last try failed", standing(THEIRS, 100.0, 111.0, tried_at=111.5), 112.0, LeaseMove(Do.WAIT, 113.5)),
        ("ours, without knowing why: take it", standing(MINE, 100.0, 100.0), 100.0, LeaseMove(Do.WRITE)),
        ("held: rest", standing(MINE, 100.0, 100.0, renewed_at=100.0), 101.0, LeaseMove(Do.WAIT, 102.0)),
        ("held: renew", standing(MINE, 100.0, 100.0, renewed_at=100.0), 102.0, LeaseMove(Do.WRITE)),
        (
            "held, renewal failed: not at once",
            standing(MINE, 100.0, 100.0, renewed_at=100.0, tried_at=104.5),
            105.0,
            LeaseMove(Do.WAIT, 106.5),
        ),
        ("held, renewal failed late", standing(MINE, 100.0, 100.0, renewed_at=100.0, tried_at=107.0), 107.5, LeaseMove(Do.WAIT, 108.0)),
        ("held, renewed too long ago", standing(MINE, 100.0, 100.0, renewed_at=100.0), 108.0, LeaseMove(Do.STEP_DOWN)),
        ("held, then frozen for an hour", standing(MINE, 100.0, 100.0, renewed_at=100.0), 3700.0, LeaseMove(Do.STEP_DOWN)),
        (
            "held, another write came before ours",
            election.lease_lost(standing(MINE, 100.0, 100.0, renewed_at=100.0)),
            102.0,
            LeaseMove(Do.LOOK),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_to_do(case: str, known: Standing, now: float, move: LeaseMove) -> None:
    assert election.decide(known, now) == move, case


def test_the_time_that_counts_is_when_a_change_was_seen_not_what_the_lease_says() -> None:
    seen = election.saw(NEW, replace(THEIRS, renewed="2001-01-01T00:00:00.000000Z"), 100.0)
    assert election.free_at(seen) == 112.0
    again = election.saw(seen, replace(THEIRS, renewed="2001-01-01T00:00:00.000000Z", version="8"), 105.0)
    assert election.free_at(again) == 112.0, "an edit of labels is no renewal"
    assert again.lease is not None and again.lease.version == "8", "and yet the next write must replace it"
    assert election.free_at(election.saw(again, replace(THEIRS, renewed="1999-01-01T00:00:00.000000Z"), 107.0)) == 119.0


def test_the_holders_own_duration_holds() -> None:
    assert election.free_at(election.saw(NEW, replace(THEIRS, seconds=30), 100.0)) == 130.0


def test_a_lease_deleted_under_its_holder_is_free_only_when_it_would_have_run_out() -> None:
    gone = election.saw(election.saw(NEW, THEIRS, 100.0), None, 103.0)
    assert election.decide(gone, 103.0) == LeaseMove(Do.WAIT, 105.0)
    assert election.decide(replace(gone, looked_at=112.0), 112.0) == LeaseMove(Do.WRITE)
    assert election.bid(gone, "now").version == "", "it is to be created"


def test_a_holder_counts_from_when_it_sent_its_renewal() -> None:
    bid = election.bid(standing(NOBODYS, 99.0, 99.0), "now")
    late = election.wrote(standing(NOBODYS, 99.0, 99.0), replace(bid, version="8"), sent_at=100.0, now=103.0)
    assert election.leads(late, 107.9) and not election.leads(late, 108.0)
    too_late = election.wrote(standing(NOBODYS, 99.0, 99.0), replace(bid, version="8"), sent_at=100.0, now=109.0)
    assert not election.leads(too_late, 109.0) and election.decide(too_late, 109.0) == LeaseMove(Do.STEP_DOWN)


def test_a_holder_that_reads_another_name_holds_it_no_longer() -> None:
    held = standing(MINE, 100.0, 100.0, renewed_at=100.0)
    assert not election.leads(election.saw(held, THEIRS, 101.0), 101.0)
    assert election.leads(election.saw(held, replace(MINE, renewed="r2", version="9"), 101.0), 101.0), "ours, whose reply was lost"


@pytest.mark.parametrize(
    ("old", "bid"),
    [
        (None, Lease("a", 12, "now", "now", 0, "")),
        (THEIRS, Lease("a", 12, "now", "now", 4, "7")),
        (NOBODYS, Lease("a", 12, "now", "now", 4, "7")),
        (MINE, Lease("a", 12, "now", "a1", 3, "7")),
    ],
    ids=["none", "theirs", "nobody's", "mine"],
)
def test_what_is_stored(old: Lease | None, bid: Lease) -> None:
    assert election.bid(standing(old, 100.0, 100.0), "now") == bid


def test_only_what_is_ours_is_given_back() -> None:
    assert election.given_back(standing(MINE, 100.0, 100.0, renewed_at=100.0), "now") == Lease("", 1, "now", "a1", 3, "7")
    assert election.given_back(standing(THEIRS, 100.0, 100.0), "now") is None
    assert election.given_back(NEW, "now") is None


@pytest.mark.parametrize("seconds", [3, 12, 15, 300])
def test_a_holder_gives_up_before_another_may_take_over(seconds: int) -> None:
    timing = Timing(seconds)
    assert timing.renew * 1.5 <= timing.lease and timing.retry + timing.call <= timing.renew
    assert timing.retry * 3 <= timing.renew, "one lost renewal is no end"


DEFAULT_TIMING = Timing()
SOON = DEFAULT_TIMING.lease * 1.12 + 2 * DEFAULT_TIMING.retry
"""A look, the Lease's time on a clock that is a tenth slow, a try that comes to nothing."""


def play(world: Coroutine[Any, Any, None], loop: VirtualLoop) -> None:
    try:
        loop.run_until_complete(world)
        assert not loop.faults, loop.faults[0]
    finally:
        loop.close()


def replicas(count: int, dice: random.Random, loop: VirtualLoop) -> tuple[list[Replica], list[tuple[float, str]], Register]:
    register, acts = Register(), list[tuple[float, str]]()
    made = [Replica(f"r{number}", register, dice, DEFAULT_TIMING, acts) for number in range(count)]

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
        assert not own or own[-1] - since <= DEFAULT_TIMING.renew * 1.12, "it stops before another begins"
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
        await asyncio.sleep(DEFAULT_TIMING.retry * 1.12 + 0.5)
        first = next(at for at, who in acts if who == other.name)
        assert first - since <= DEFAULT_TIMING.retry * 1.12 + 0.3
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
