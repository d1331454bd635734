"""Rings through devices: the one whose slowest link is fastest, and rings that share no lane."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

MOST_STEPS = 20_000
"""Of a search for one ring: exact for a handful of devices, the best found for more."""

MOST_RINGS = 8
"""That are looked for; a V100 has six lanes in all."""

Width = Callable[[int, int], float]


@dataclass(frozen=True)
class Ring:
    """Devices by number, each once, and the lanes that each link of the ring has for it."""

    order: tuple[int, ...]
    lanes: int

    @property
    def edges(self) -> tuple[frozenset[int], ...]:
        """Its links, from the last device back to the first too."""
        return tuple(frozenset(pair) for pair in zip(self.order, self.order[1:] + self.order[:1], strict=True))


def widest_ring(n: int, width: Width) -> tuple[int, ...] | None:
    """All of n devices in the order whose narrowest neighbours are widest; None where no ring has a width above 0.

    `width(i, j)` is that of a pair. Among rings of one width, near devices (wide pairs, then low numbers) stand together.
    """
    table = [[width(i, j) if i != j else 0.0 for j in range(n)] for i in range(n)]
    widths = sorted({each for row in table for each in row if each > 0})
    found = None
    low, high = 0, len(widths)
    while low < high:
        middle = (low + high) // 2
        ring = _ring(table, widths[middle])
        if ring is None:
            high = middle
        else:
            found, low = ring, middle + 1
    return found


def disjoint_rings(n: int, lanes: Mapping[frozenset[int], int]) -> tuple[Ring, ...]:
    """Rings of all n devices that share no lane, those of the most lanes first, until those that are left make none.

    `lanes` counts those between each pair. Eight V100 with 24 NVLinks give a ring of 2 lanes and one of 1: the payload is divided 2:1.
    Source: *Dive into Deep Learning*, "Parameter Servers", after Wang et al., *Blink*, 2018.
    """
    if n < 3:
        return ()  # out and back over one link is no ring
    left = dict(lanes)
    rings: list[Ring] = []
    while len(rings) < MOST_RINGS and (order := widest_ring(n, lambda i, j: left.get(frozenset((i, j)), 0))) is not None:
        ring = Ring(order, 0)
        ring = Ring(order, min(left[edge] for edge in ring.edges))
        for edge in ring.edges:
            left[edge] -= ring.lanes
        rings.append(ring)
    return tuple(rings)


def _ring(table: list[list[float]], least: float) -> tuple[int, ...] | None:
    """Any ring whose pairs all have `least` or more, found depth first."""
    near = [[j for _, j in sorted((-width, j) for j, width in enumerate(row) if width >= least)] for row in table]
    path, used, todo = [0], {0}, [iter(near[0])]
    for _ in range(MOST_STEPS):
        if len(path) == len(table) and table[path[-1]][0] >= least:
            return tuple(path)
        step = next((j for j in todo[-1] if j not in used), None)
        if step is not None:
            path.append(step)
            used.add(step)
            todo.append(iter(near[step]))
            continue
        todo.pop()
        used.discard(path.pop())
        if not path:
            return None
    return None
