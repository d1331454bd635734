"""Two rings that share no link: both carry at once, in the proportion of what their links bear."""

from __future__ import annotations

from psjob.collectives.ring import ring
from psjob.collectives.schedule import Schedule, shared_out

EIGHT_GPUS = ((0, 1, 2, 3, 4, 5, 6, 7), (0, 3, 5, 2, 4, 7, 1, 6))
"""The rings of a machine with eight V100 (d2l chapter 13.7; Blink, Wang et al. 2020): one on pairs of NVLinks, one on single ones."""


def double_ring(ranks: int) -> Schedule:
    """All-reduce on two rings without a link in common, for 5 ranks or more.

    Eight ranks take the rings of the eight-GPU machine, 2:1; others two even rings of links that are all alike. Raises ValueError for
    fewer than 5, among which no two such rings exist.
    """
    first, second = disjoint_rings(ranks)
    return shared_out([ring(ranks, first), ring(ranks, second)], (2, 1) if ranks == 8 else (1, 1))


def disjoint_rings(ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two orders of all ranks; no two neighbours of one are neighbours in the other. Raises ValueError for fewer than 5 ranks."""
    if ranks < 5:
        raise ValueError(f"double-ring with {ranks} ranks: two rings without a common link need at least 5; take both-ways-ring")
    return EIGHT_GPUS if ranks == 8 else (_zigzag(ranks, 0), _zigzag(ranks, 1))


def _zigzag(ranks: int, turn: int) -> tuple[int, ...]:
    """Walecki's decomposition: 0, 1, -1, 2, -2, … on a circle of all ranks but the last, turned on by `turn`; the last one closes it."""
    circle = ranks - 1
    return (*(((step + 1) // 2 * (1 if step % 2 else -1) + turn) % circle for step in range(circle)), circle)
