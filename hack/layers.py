"""A graph without circles, laid out in layers from top to bottom: each arrow leads down, and long ones go around the boxes between.

The steps are those of Sugiyama, Tagawa and Toda 1981: layers, places for long arrows, orders with few crossings. All is decided by the
names, so that equal graphs give equal places. Sums are fsum's: those of sum differ between Python 3.11 and 3.12.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

Arrows = Mapping[str, Collection[str]]
SWEEPS = 24
NARROW = 0.28
"""The width of the place that a long arrow has in a layer, as a share of a box's."""


@dataclass(frozen=True)
class Layout:
    """Places in units: x from 0 to 1 over the width, y the layer counted from the top."""

    boxes: dict[str, tuple[float, int]]
    paths: dict[tuple[str, str], list[tuple[float, int]]]
    """By arrow, the points from its box to its target, one a layer."""
    layers: int


def needed(arrows: Arrows) -> dict[str, set[str]]:
    """The arrows that do not follow from others: without them, something would no longer be reached."""
    reached: dict[str, set[str]] = {}

    def below(name: str) -> set[str]:
        if name not in reached:
            reached[name] = set()
            for target in sorted(arrows.get(name, ())):
                reached[name] |= {target} | below(target)
        return reached[name]

    return {
        name: {target for target in targets if not any(target in below(other) for other in targets if other != target)}
        for name, targets in arrows.items()
    }


def heights(arrows: Arrows, floor: Mapping[str, int]) -> dict[str, int]:
    """How high each name stands: above all that it leads to, and at its `floor` or higher. Raises ValueError where there is a circle."""
    found: dict[str, int] = {}

    def height(name: str, path: tuple[str, ...]) -> int:
        if name in path:
            raise ValueError(f"these import each other in a circle: {' -> '.join((*path[path.index(name) :], name))}")
        if name not in found:
            found[name] = max([floor.get(name, 0), *(height(target, (*path, name)) + 1 for target in arrows.get(name, ()))])
        return found[name]

    for name in sorted(arrows):
        height(name, ())
    return found


def laid_out(arrows: Arrows, floor: Mapping[str, int]) -> Layout:
    """Places for all names and arrows."""
    high = heights(arrows, floor)
    top = max(high.values())
    rows: list[list[str]] = [[] for _ in range(top + 1)]
    for name in sorted(high):
        rows[top - high[name]].append(name)
    links: dict[str, list[str]] = {name: [] for name in high}
    chains: dict[tuple[str, str], list[str]] = {}
    for name in sorted(arrows):
        for target in sorted(arrows[name]):
            chain = [name]
            for row in range(top - high[name] + 1, top - high[target]):
                place = f"{name}>{target}>{row}"
                rows[row].append(place)
                chain.append(place)
            chains[name, target] = [*chain, target]
            for one, other in zip(chain, [*chain[1:], target], strict=True):
                links.setdefault(one, []).append(other)
    _order(rows, links)
    at = {name: (x, row) for row, names in enumerate(rows) for name, x in _spread(names).items()}
    boxes = {name: at[name] for name in sorted(high)}
    return Layout(boxes, {ends: [at[name] for name in chain] for ends, chain in chains.items()}, top + 1)


def _order(rows: list[list[str]], links: Mapping[str, list[str]]) -> None:
    """Sorts each row by the middle of what its names are tied to, above and below in turn; the order with the fewest crossings stays."""
    above: dict[str, list[str]] = {}
    for name, targets in links.items():
        for target in targets:
            above.setdefault(target, []).append(name)
    best, least = [list(row) for row in rows], _crossings(rows, links)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for row in range(1, len(rows)) if down else range(len(rows) - 2, -1, -1):
            beside = _spread(rows[row - 1 if down else row + 1])
            own = _spread(rows[row])
            ties = above if down else links

            def middle(name: str, beside: Mapping[str, float] = beside, own: Mapping[str, float] = own, ties: Arrows = ties) -> float:
                seen = [beside[other] for other in ties.get(name, ()) if other in beside]
                return math.fsum(seen) / len(seen) if seen else own[name]

            rows[row].sort(key=middle)
        count = _crossings(rows, links)
        if count < least:
            best, least = [list(row) for row in rows], count
    rows[:] = best


def _crossings(rows: list[list[str]], links: Mapping[str, list[str]]) -> int:
    total = 0
    for upper, lower in itertools.pairwise(rows):
        place = {name: index for index, name in enumerate(lower)}
        ends = [sorted(place[target] for target in links.get(name, ()) if target in place) for name in upper]
        flat = [end for group in ends for end in group]
        starts = [index for index, group in enumerate(ends) for _ in group]
        total += sum(1 for i in range(len(flat)) for j in range(i + 1, len(flat)) if starts[i] != starts[j] and flat[i] > flat[j])
    return total


def _spread(names: list[str]) -> dict[str, float]:
    widths = [NARROW if ">" in name else 1.0 for name in names]
    total, at, found = math.fsum(widths), 0.0, {}
    for name, width in zip(names, widths, strict=True):
        found[name] = (at + width / 2) / total
        at += width
    return found
