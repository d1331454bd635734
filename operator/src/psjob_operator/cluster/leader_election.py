"""Who of several operators takes turns, decided from a Lease: the rules of client-go's leader election, pure.

Times are of this process's own monotonic clock, in seconds. What other machines wrote as a time is compared for a change and never
read as one. A holder counts from when it *sent* its last stored renewal, a candidate from when it *saw* it. So the holder gives up first,
as long as no machine's clock runs 1.5 times as fast as another's."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

GONE_SECONDS = 1
"""Duration of a Lease that its holder has given back."""


@dataclass(frozen=True)
class Timing:
    """How long a Lease holds, how long a holder continues without a renewal, and how often it is renewed or looked at."""

    lease: int = 12

    @property
    def renew(self) -> float:
        """Seconds after its last renewal at which a holder stops."""
        return self.lease * 2 / 3

    @property
    def retry(self) -> float:
        """Seconds between two renewals, and between two looks."""
        return self.lease / 6

    @property
    def call(self) -> float:
        """Most seconds for one call."""
        return self.renew / 2


@dataclass(frozen=True)
class Lease:
    """As it is stored. `holder` is empty where it was given back; `version` is empty where it must be created."""

    holder: str
    seconds: int
    renewed: str = ""
    acquired: str = ""
    transitions: int = 0
    version: str = ""

    def same(self, other: Lease) -> bool:
        """Nobody has renewed, taken or given back: the version may differ, as after an edit of labels."""
        return replace(self, version="") == replace(other, version="")


@dataclass(frozen=True)
class Standing:
    """What one operator knows."""

    me: str
    timing: Timing
    lease: Lease | None = None
    """As last read or written; None: it was never seen."""
    known: bool = False
    """Whether it was looked at: a Lease that was never seen may be there."""
    seen_at: float = -math.inf
    """When it was last seen to change."""
    looked_at: float = -math.inf
    renewed_at: float | None = None
    """When our last stored renewal was sent; None: we do not hold it."""
    tried_at: float = -math.inf
    """When a call last failed."""


class Do(enum.Enum):
    """What to do next."""

    LOOK = "look"
    WRITE = "write"
    WAIT = "wait"
    STEP_DOWN = "step down"


@dataclass(frozen=True)
class LeaseMove:
    """`until` is when to decide again, where there is nothing to do before."""

    do: Do
    until: float = 0.0


def decide(standing: Standing, now: float) -> LeaseMove:
    """Acquire or renew (both are a write), look, wait, or step down."""
    timing = standing.timing
    if standing.renewed_at is not None and not leads(standing, now):
        return LeaseMove(Do.STEP_DOWN)
    end = math.inf if standing.renewed_at is None else standing.renewed_at + timing.renew
    if now < standing.tried_at + timing.retry:
        return LeaseMove(Do.WAIT, min(standing.tried_at + timing.retry, end))
    if not standing.known:
        return LeaseMove(Do.LOOK)
    if standing.renewed_at is not None:
        due = standing.renewed_at + timing.retry
        return LeaseMove(Do.WRITE) if now >= due else LeaseMove(Do.WAIT, min(due, end))
    free = free_at(standing)
    if now >= free:
        return LeaseMove(Do.WRITE)
    due = standing.looked_at + timing.retry
    return LeaseMove(Do.LOOK) if now >= due else LeaseMove(Do.WAIT, min(due, free))


def leads(standing: Standing, now: float) -> bool:
    """We hold the Lease, and may act."""
    return standing.renewed_at is not None and now < standing.renewed_at + standing.timing.renew


def free_at(standing: Standing) -> float:
    """From when on we may take the Lease."""
    lease = standing.lease
    if lease is None or lease.holder in ("", standing.me):
        return -math.inf
    return standing.seen_at + lease.seconds


def saw(standing: Standing, lease: Lease | None, now: float) -> Standing:
    """The Lease was read; None: there is none. One that was deleted under its holder is free only when it would have run out."""
    standing = replace(standing, known=True, looked_at=now)
    if lease is None:
        return replace(standing, lease=replace(standing.lease, version="") if standing.lease is not None else None)
    fresh = standing.lease is None or not lease.same(standing.lease)
    held = standing.renewed_at if lease.holder == standing.me else None
    return replace(standing, lease=lease, seen_at=now if fresh else standing.seen_at, renewed_at=held)


def bid(standing: Standing, stamp: str) -> Lease:
    """What to store to acquire or renew; its version is the one that it must replace."""
    old, seconds = standing.lease, standing.timing.lease
    if old is None:
        return Lease(standing.me, seconds, stamp, stamp)
    if old.holder == standing.me:
        return replace(old, seconds=seconds, renewed=stamp)
    return Lease(standing.me, seconds, stamp, stamp, old.transitions + 1, old.version)


def wrote(standing: Standing, lease: Lease, sent_at: float, now: float) -> Standing:
    """Our bid, sent then, was stored as `lease`."""
    return replace(standing, lease=lease, known=True, seen_at=now, looked_at=now, renewed_at=sent_at, tried_at=-math.inf)


def lease_lost(standing: Standing) -> Standing:
    """Another write came before ours: look anew, at once."""
    return replace(standing, known=False, looked_at=-math.inf)


def renewal_failed(standing: Standing, now: float) -> Standing:
    """A call brought no answer, or no use: it may have been carried out."""
    return replace(standing, tried_at=now)


def step_down(standing: Standing) -> Standing:
    """We act no longer; the Lease is looked at next, its holder too."""
    return replace(standing, known=False, renewed_at=None, looked_at=-math.inf)


def given_back(standing: Standing, stamp: str) -> Lease | None:
    """What to store so that another may take it at once; None where it is not ours."""
    if standing.lease is None or standing.lease.holder != standing.me:
        return None
    return replace(standing.lease, holder="", seconds=GONE_SECONDS, renewed=stamp)
