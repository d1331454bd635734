"""Sets of indexes as text: `0-2,5`."""

from __future__ import annotations

from collections.abc import Iterable


def to_text(indexes: Iterable[int]) -> str:
    """Ranges in rising order; empty text for no index."""
    ranges: list[list[int]] = []
    for index in sorted(set(indexes)):
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def to_set(text: str, below: int) -> frozenset[int]:
    """The indexes under `below` that the text names; parts that are not ranges name none (status can be edited by hand)."""
    found: set[int] = set()
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        if low.isdecimal() and (not high or high.isdecimal()):
            found.update(range(int(low), min(int(high or low), below - 1) + 1))
    return frozenset(index for index in found if index < below)
