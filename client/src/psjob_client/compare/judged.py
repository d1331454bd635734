"""A comparison in a line: who was first at the loss that is compared, and by how much. Says only what the numbers say. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from psjob_client.compare.outcome import DIVERGED, LEARNED, LOSS, Comparison, SideOutcome

SMALL = 1.1
"""Times of single runs that differ by less than this factor may be chance."""
MOST = 3
"""Sides that are named."""


def judged(comparison: Comparison) -> str:
    """One to three sentences; empty if there is one side only."""
    sides = comparison.sides
    if len(sides) < 2:
        return ""
    if not any(one.verdict for one in sides):
        return "No side reported a loss twice, so that none can be said to be better."
    learned = [one for one in sides if one.verdict == LEARNED]
    if not learned:
        return "No side has learned: in none of them did the smoothed loss fall."
    reached = sorted(
        ((at, number) for number, one in enumerate(sides) if (at := comparison.time_to(one)) is not None), key=lambda pair: pair
    )
    loss = f"{comparison.target:.3g}"
    if not reached:
        return " ".join(filter(None, (f"No side came down to loss {loss}.", _lowest(learned, None))))
    if len(reached) == 1:
        (at, number), others = reached[0], [one for one in sides if one is not sides[reached[0][1]]]
        missed = _missed(others)
        return f"Only {sides[number].title} came down to loss {loss}, after {_time(at, comparison.unit)}.{missed}"
    return " ".join(filter(None, (_race(comparison, reached, loss), _chance(comparison, reached), _lowest(learned, sides[reached[0][1]]))))


def _race(comparison: Comparison, reached: Sequence[tuple[float, int]], loss: str) -> str:
    sides, unit = comparison.sides, comparison.unit
    (best, fastest), *rest = reached
    level = [fastest, *(number for at, number in rest if at == best)]
    if len(level) == len(reached):
        return f"{_names([sides[number] for number in level])} came down to loss {loss} at the same time: {_time(best, unit)}."
    later = [(at, number) for at, number in rest if at > best]
    told = [f"{sides[number].title} {_time(at, unit)}" + (f" ({at / best:.2g} times as long)" if best > 0 else "") for at, number in later]
    more = f" and {len(told) - MOST} more later" if len(told) > MOST else ""
    first = f"First at loss {loss}: {_names([sides[number] for number in level])}, after {_time(best, unit)}"
    return f"{first}; then {', '.join(told[:MOST])}{more}."


def _chance(comparison: Comparison, reached: Sequence[tuple[float, int]]) -> str:
    """Simulated runs say the same each time."""
    (best, first), (second, other) = reached[:2]
    close = best < second <= best * SMALL
    single = comparison.unit == "s" and max(comparison.sides[first].repeats, comparison.sides[other].repeats) == 1
    return "The first two are too close for one run each: --repeat 3 tells how far runs differ." if close and single else ""


def _lowest(learned: Sequence[SideOutcome], first: SideOutcome | None) -> str:
    """Of the last loss, if one side has it by itself."""
    finals = sorted((value, number) for number, one in enumerate(learned) if math.isfinite(value := one.final.get(LOSS, math.nan)))
    if len(finals) < 2 or finals[0][0] == finals[1][0]:
        return ""
    lowest = learned[finals[0][1]]
    return f"{lowest.title} {'also ' if lowest is first else ''}ended at the lowest loss, {finals[0][0]:.3g}."


def _missed(others: Sequence[SideOutcome]) -> str:
    bad = [one for one in others if one.verdict == DIVERGED]
    return f" {_names(bad)} diverged." if bad else ""


def _names(sides: Sequence[SideOutcome]) -> str:
    titles = [one.title for one in sides]
    titles = titles if len(titles) <= MOST + 1 else [*titles[:MOST], f"{len(titles) - MOST} more"]
    return titles[0] if len(titles) == 1 else f"{', '.join(titles[:-1])} and {titles[-1]}"


def _time(at: float, unit: str) -> str:
    return f"{at:.3g} {unit}"
