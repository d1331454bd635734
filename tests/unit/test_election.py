"""Who takes turns: the rules, as tables."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from psjob_operator.cluster import leader_election as election
from psjob_operator.cluster.leader_election import Do, Lease, Move, Standing, Timing

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
        ("nothing known: look", NEW, 100.0, Move(Do.LOOK)),
        ("nothing known, and the last try failed: wait", election.failed(NEW, 100.0), 101.0, Move(Do.WAIT, 102.0)),
        ("there is none: take it", standing(None, -math.inf, 100.0), 100.0, Move(Do.WRITE)),
        ("given back: take it", standing(NOBODYS, 100.0, 100.0), 100.0, Move(Do.WRITE)),
        ("held by another: look again each 2 s", standing(THEIRS, 100.0, 100.0), 101.0, Move(Do.WAIT, 102.0)),
        ("held by another: look", standing(THEIRS, 100.0, 100.0), 102.0, Move(Do.LOOK)),
        ("about to run out: not later than that", standing(THEIRS, 100.0, 111.0), 111.5, Move(Do.WAIT, 112.0)),
        ("run out: take it", standing(THEIRS, 100.0, 111.0), 112.0, Move(Do.WRITE)),
        ("run out, but the last try failed", standing(THEIRS, 100.0, 111.0, tried_at=111.5), 112.0, Move(Do.WAIT, 113.5)),
        ("ours, without knowing why: take it", standing(MINE, 100.0, 100.0), 100.0, Move(Do.WRITE)),
        ("held: rest", standing(MINE, 100.0, 100.0, renewed_at=100.0), 101.0, Move(Do.WAIT, 102.0)),
        ("held: renew", standing(MINE, 100.0, 100.0, renewed_at=100.0), 102.0, Move(Do.WRITE)),
        ("held, renewal failed: not at once", standing(MINE, 100.0, 100.0, renewed_at=100.0, tried_at=104.5), 105.0, Move(Do.WAIT, 106.5)),
        ("held, renewal failed late", standing(MINE, 100.0, 100.0, renewed_at=100.0, tried_at=107.0), 107.5, Move(Do.WAIT, 108.0)),
        ("held, renewed too long ago", standing(MINE, 100.0, 100.0, renewed_at=100.0), 108.0, Move(Do.STEP_DOWN)),
        ("held, then frozen for an hour", standing(MINE, 100.0, 100.0, renewed_at=100.0), 3700.0, Move(Do.STEP_DOWN)),
        (
            "held, another write came before ours",
            election.lost(standing(MINE, 100.0, 100.0, renewed_at=100.0)),
            102.0,
            Move(Do.LOOK),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_to_do(case: str, known: Standing, now: float, move: Move) -> None:
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
    assert election.decide(gone, 103.0) == Move(Do.WAIT, 105.0)
    assert election.decide(replace(gone, looked_at=112.0), 112.0) == Move(Do.WRITE)
    assert election.bid(gone, "now").version == "", "it is to be created"


def test_a_holder_counts_from_when_it_sent_its_renewal() -> None:
    bid = election.bid(standing(NOBODYS, 99.0, 99.0), "now")
    late = election.wrote(standing(NOBODYS, 99.0, 99.0), replace(bid, version="8"), sent_at=100.0, now=103.0)
    assert election.leads(late, 107.9) and not election.leads(late, 108.0)
    too_late = election.wrote(standing(NOBODYS, 99.0, 99.0), replace(bid, version="8"), sent_at=100.0, now=109.0)
    assert not election.leads(too_late, 109.0) and election.decide(too_late, 109.0) == Move(Do.STEP_DOWN)


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
