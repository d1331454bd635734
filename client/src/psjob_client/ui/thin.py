"""Fewer points of a curve, such that it looks the same. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def thin(values: Sequence[float], most: int) -> list[int]:
    """Rising indexes of at most `most` (4 or more) values: the first, the last, and of each equal stretch the least and the largest.

    A spike of one point is kept, which a mean or every n-th point would lose. Source: the min-max reduction of M4 (Jugel et al. 2014).
    """
    count = len(values)
    if count <= most:
        return list(range(count))
    stretches = (most - 2) // 2
    kept = {0, count - 1}
    for place in range(stretches):
        begin, end = 1 + place * (count - 2) // stretches, 1 + (place + 1) * (count - 2) // stretches
        stretch = [at for at in range(begin, end) if math.isfinite(values[at])] or [begin]
        kept.add(min(stretch, key=values.__getitem__))
        kept.add(max(stretch, key=values.__getitem__))
    return sorted(kept)
