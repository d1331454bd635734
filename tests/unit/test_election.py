"""Who takes turns: the rules, as tables.

- Operators that want one Lease, by seeds: never two that believe to hold it, and soon one.
- Operators that want one Lease, on virtual time: the shipped driver over a register with compare-and-swap.
A process can be frozen between any two of its steps: its timers and replies then come late, all at once, while its clock continues. Clocks
differ and run at different rates. Requests and replies are late or lost.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
import selectors
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

import pytest

from psjob_operator.cluster import leader_election as election
from psjob_operator.cluster.client import ApiError
from psjob_operator.cluster.leader_election import Do, Lease, LeaseMove, Standing, Timing
from psjob_operator.cluster.lease import Candidate
from tests.support.soaking import rotating

TIMING = Timing(12)  # a holder stops after 8 s, renews and looks each 2 s
THEIRS = Lease(holder="b", seconds=12, renewed="r1", acquired="a1", transitions=3, version="7")
MINE = replace(THEIRS, holder="a")
NOBODYS = replace(THEIRS, holder="", seconds=1)
NEW = Standing("a", TIMING)


def standing(
    lease: Lease | None, seen_at: float, looked_at: float, renewed_at: float | None = None, tried_at: float = -math.inf
) -> Standing:
    return Standing("a", TIMING, lease, True, seen_at, looked_at, renewed_at, tried_at)


@pytest.mark.parametrize(("case", "known", "now", "move"), [
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
    ("held, renewal failed: not at once", standing(MINE, 100.0, 100.0, renewed_at=100.0, tried_at=104.5), 105.0, LeaseMove(Do.WAIT, 106.5)),
    ("held, renewal failed late", standing(MINE, 100.0, 100.0, renewed_at=100.0, tried_at=107.0), 107.5, LeaseMove(Do.WAIT, 108.0)),
    ("held, renewed too long ago", standing(MINE, 100.0, 100.0, renewed_at=100.0), 108.0, LeaseMove(Do.STEP_DOWN)),
    ("held, then frozen for an hour", standing(MINE, 100.0, 100.0, renewed_at=100.0), 3700.0, LeaseMove(Do.STEP_DOWN)),
    ("held, another write came before ours", election.lease_lost(standing(MINE, 100.0, 100.0, renewed_at=100.0)), 102.0,
        LeaseMove(Do.LOOK)),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
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


@pytest.mark.parametrize(("old", "bid"), [
    (None, Lease("a", 12, "now", "now", 0, "")),
    (THEIRS, Lease("a", 12, "now", "now", 4, "7")),
    (NOBODYS, Lease("a", 12, "now", "now", 4, "7")),
    (MINE, Lease("a", 12, "now", "a1", 3, "7")),
], ids=["none", "theirs", "nobody's", "mine"])  # fmt: skip
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


OWNER: contextvars.ContextVar[str] = contextvars.ContextVar("owner", default="")


class _Jumps(selectors.DefaultSelector):
    """Waits by moving the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nobody will ever do anything again"
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is virtual, and in which the steps of one owner can be held back."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        self.frozen: dict[str, float] = {}
        self.faults: list[str] = []
        self.after: Callable[[], None] = lambda: None
        """Called after each step."""
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_soon(self._step, callback, args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_at(when, self._step, callback, args, context=context)

    def _step(self, callback: Any, args: tuple[Any, ...]) -> None:
        thaw = self.frozen.get(OWNER.get(), 0.0)
        if thaw > self.time():
            super().call_at(thaw, self._step, callback, args)
            return
        callback(*args)
        self.after()


class Register:
    """One Lease, as an API server keeps it."""

    def __init__(self) -> None:
        self.version = 0
        self.spec: dict[str, Any] | None = None

    def get(self) -> dict[str, Any]:
        if self.spec is None:
            raise ApiError(404, "NotFound", "no such Lease")
        return {"metadata": {"resourceVersion": str(self.version)}, "spec": dict(self.spec)}

    def put(self, spec: Mapping[str, Any], version: str | None) -> dict[str, Any]:
        if version is None and self.spec is not None:
            raise ApiError(409, "AlreadyExists", "it is there")
        if version is not None and (self.spec is None or version != str(self.version)):
            raise ApiError(409, "Conflict", "it has changed") if self.spec is not None else ApiError(404, "NotFound", "no such Lease")
        self.version += 1
        self.spec = dict(spec)
        return self.get()


class Wire:
    """What `lease.Candidate` asks of a client, over a network of this temper."""

    def __init__(self, register: Register, dice: random.Random) -> None:
        self._register, self._dice = register, dice
        self.loss = 0.0
        self.slowest = 0.05
        self.cut_until = 0.0
        self._parcels: set[asyncio.Task[None]] = set()

    async def get(self, *_: Any) -> dict[str, Any]:
        return await self._carry(self._register.get)

    async def create(self, _kind: Any, _namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._carry(lambda: self._register.put(body["spec"], None))

    async def patch(self, _kind: Any, _namespace: str, _name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._carry(lambda: self._register.put(body["spec"], body["metadata"]["resourceVersion"]))

    async def _carry(self, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[dict[str, Any]] = loop.create_future()
        # The network continues while the process is frozen, and when it has given up waiting.
        parcel = loop.create_task(self._deliver(call, reply), context=contextvars.Context())
        self._parcels.add(parcel)
        parcel.add_done_callback(self._parcels.discard)
        return await reply

    async def _deliver(self, call: Callable[[], dict[str, Any]], reply: asyncio.Future[dict[str, Any]]) -> None:
        if self._lost():
            return
        await asyncio.sleep(self._dice.uniform(0.0, self.slowest))
        try:
            answer: dict[str, Any] | ApiError = call()
        except ApiError as error:
            answer = error
        if self._lost():
            return
        await asyncio.sleep(self._dice.uniform(0.0, self.slowest))
        if reply.done():
            return
        if isinstance(answer, ApiError):
            reply.set_exception(answer)
        else:
            reply.set_result(answer)

    def _lost(self) -> bool:
        return asyncio.get_running_loop().time() < self.cut_until or self._dice.random() < self.loss


class Replica:
    """One operator: when it acts is noted."""

    def __init__(self, name: str, register: Register, dice: random.Random, timing: Timing, acts: list[tuple[float, str]]) -> None:
        self.name, self.acts = name, acts
        self.wire = Wire(register, dice)
        self._offset, self._rate = dice.uniform(-1e6, 1e6), dice.uniform(0.9, 1.1)
        self.candidate = Candidate(self.wire, "ns", "lease", name, timing, self.clock)  # type: ignore[arg-type]
        self.task: asyncio.Task[None] | None = None

    def clock(self) -> float:
        return self._offset + self._rate * asyncio.get_running_loop().time()

    def start(self) -> None:
        context = contextvars.Context()
        context.run(OWNER.set, self.name)
        self.task = asyncio.get_running_loop().create_task(self.candidate.run(self.term), context=context)

    async def term(self) -> None:
        """What an operator does: ask, then write."""
        while True:
            try:
                self.candidate.check()
            except ApiError:
                pass
            else:
                self.acts.append((asyncio.get_running_loop().time(), self.name))
            await asyncio.sleep(0.25)
