"""Curves for a chart: where on its axis each value lies, its smoothed values, and no more points than are seen. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from psjob_client.compare.outcome import smooth
from psjob_client.ui.thin import thin

Point = tuple[float, float, float]
"""(time, step, value)"""
STEP, TIME = "step", "time"
AXES = (STEP, TIME)
FEW = 10
"""A curve of fewer points, such as one an epoch, is not smoothed: its mean would be far behind what was reported."""
MOST, LEAST, ALL = 600, 100, 12_000
"""Points of one curve: at most and at least; and of all that are drawn over one another together."""


def points_each(curves: int) -> int:
    """Points of each of so many curves."""
    return min(MOST, max(LEAST, ALL // max(1, curves)))


def curve(points: Sequence[Point], axis: str, smoothing: float, most: int = MOST) -> dict[str, Any]:
    """{"x", "y"} and, if `smoothing` is above 0, "smooth": the exponential mean with this weight of what came before.

    All points are smoothed, and then at most `most` are kept.
    """
    ordered = unwound(points) if axis == STEP else list(points)
    kept = thin([value for _, _, value in ordered], most)
    place = 1 if axis == STEP else 0
    found = {"x": [ordered[at][place] for at in kept], "y": [ordered[at][2] for at in kept]}
    if smoothing > 0 and len(ordered) >= FEW:
        smoothed = smooth(ordered, 1 - smoothing)
        found["smooth"] = [smoothed[at][2] for at in kept]
    return found


def unwound(points: Iterable[Point]) -> list[Point]:
    """In order of steps: a restart goes back some steps, and what was told of those that it undid is left out."""
    found: list[Point] = []
    for point in points:
        while found and found[-1][1] >= point[1]:
            found.pop()
        found.append(point)
    return found
