"""When an object counts as written by two, and for how long it is left alone."""

from __future__ import annotations

import pytest

from psjob_operator.cluster.cache import REST_SECONDS, Contests

LABEL = "NetworkPolicy/job-ps"


def after(*times: float) -> Contests:
    made = Contests()
    for at in times:
        made.correct(LABEL, at)
    return made


@pytest.mark.parametrize(
    ("times", "now", "rests"),
    [
        ((), 0.0, False),
        ((0.0,), 0.1, False),
        ((0.0, 0.1), 0.2, False),
        ((0.0, 0.1, 0.2), 0.3, True),
        ((0.0, 60.0, 119.0), 130.0, True),
        ((0.0, 60.0, 121.0), 130.0, False),
        ((0.0, 0.1, 0.2), 0.2 + REST_SECONDS, False),
        ((0.0, 0.1, 0.2), REST_SECONDS, True),
        ((0.0, 300.0, 300.1, 300.2), 301.0, True),
    ],
)
def test_three_corrections_in_two_minutes_are_a_contest(times: tuple[float, ...], now: float, rests: bool) -> None:
    contests = after(*times)
    until = contests.rests_until(LABEL, now)
    assert (until is not None) == rests
    assert bool(contests.words(now)) == rests
    if rests:
        assert until == times[-1] + REST_SECONDS and LABEL in contests.words(now)


def test_each_object_counts_by_itself_and_one_more_correction_renews_the_rest() -> None:
    contests = after(0.0, 0.1, 0.2)
    assert contests.rests_until("Service/job-ps", 0.3) is None
    contests.correct(LABEL, 700.0)
    assert contests.rests_until(LABEL, 701.0) is None, "it may be over"
    contests.correct(LABEL, 700.1)
    contests.correct(LABEL, 700.2)
    assert contests.rests_until(LABEL, 701.0) == 700.2 + REST_SECONDS
