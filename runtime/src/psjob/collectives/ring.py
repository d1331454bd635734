"""The ring: each rank passes a chunk on and adds the one that comes, until every rank has one whole sum; then the sums go round.

Time (Patarasuk and Yuan 2009): 2(n-1)(α + M/(nB)) for M bytes on links of B bytes a second and a latency of α.
"""

from __future__ import annotations

from collections.abc import Sequence

from psjob.collectives.schedule import Move, Schedule, relabelled, shared_out


def ring(ranks: int, order: Sequence[int] | None = None) -> Schedule:
    """All-reduce around `order` (rank order if not given), in as many chunks as ranks."""
    reduce = [
        tuple(Move(r, (r + 1) % ranks, (r - turn) % ranks, True) for r in range(ranks))
        for turn in range(ranks - 1)
    ]  # fmt: skip
    spread = [
        tuple(Move(r, (r + 1) % ranks, (r + 1 - turn) % ranks, False) for r in range(ranks))
        for turn in range(ranks - 1)
    ]  # fmt: skip
    plain = Schedule(ranks, (1,) * ranks, tuple(reduce + spread))
    return plain if order is None else relabelled(plain, order, ranks)


def both_ways_ring(ranks: int) -> Schedule:
    """Half of the vector around each way: half the ring's time on links that carry both ways at once; two ranks gain nothing."""
    return shared_out([ring(ranks), ring(ranks, range(ranks)[::-1])], (1, 1))
