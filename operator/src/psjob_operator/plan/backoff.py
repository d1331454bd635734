"""How long the next start waits after counted failures, and when they are forgotten."""

from __future__ import annotations

from psjob_operator.plan.facts import Facts, Seat
from psjob_operator.plan.progress import last_commit
from psjob_operator.plan.times import unix

FIRST_SECONDS = 10.0
LONGEST_SECONDS = 360.0
FORGET_SECONDS = 600.0
"""Commits for so long after the last counted failure set the count back to 0."""
SPACING_SECONDS = 10.0
"""Starts of one seat that end by no fault of theirs are so far apart, or a node that refuses pods would be asked without end."""
TOGETHER_SECONDS = 3.0
"""Failures so soon after a counted one are of the same event, such as a node that dies with several processes,"""
LIVED_SECONDS = 5.0
"""where the process had run for so long: one that was only just started again is a crash loop."""
AT_ONCE = ("Deleted", "Fenced")
"""Causes that happen once: a person's deletion, a view that is passed by the next start."""


def again_at(facts: Facts, seat: Seat) -> float:
    """Unix time before which the loss of `seat` is not answered."""
    if seat.fate.counted:
        return 0.0 if _failed_together(facts, seat) else not_before(facts)
    if seat.fate.kind != "lost" or seat.process is None or seat.fate.cause in AT_ONCE:
        return 0.0
    return seat.process.created + SPACING_SECONDS


def _failed_together(facts: Facts, seat: Seat) -> bool:
    """Did the seat fail with the process whose failure was counted last?"""
    last = unix(facts.stored.restarts.last_counted)
    soon = last is not None and facts.now - last <= TOGETHER_SECONDS
    return soon and seat.process is not None and facts.now - seat.process.created >= LIVED_SECONDS


def counted(facts: Facts) -> int:
    """Failures that count now: none, once commits went on for ten minutes after the last of them."""
    last = unix(facts.stored.restarts.last_counted)
    commit = last_commit(facts)
    if last is not None and commit is not None and commit - last >= FORGET_SECONDS:
        return 0
    return facts.stored.restarts.counted


def not_before(facts: Facts) -> float:
    """Unix time before which a counted failure is not answered: the first is at once, then 10 s, 20 s, … up to 6 minutes."""
    last = unix(facts.stored.restarts.last_counted)
    failures = counted(facts)
    if last is None or failures == 0:
        return 0.0
    return last + min(FIRST_SECONDS * 2.0 ** min(failures - 1, 10), LONGEST_SECONDS)
