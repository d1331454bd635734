"""The names by which a plan or a script asks for a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from psjob.collectives.schedule import (
    Schedule,
    both_ways_ring,
    double_ring,
    double_tree,
    hierarchical,
    rank_order,
    relabelled,
    ring,
    servers,
    tree,
)

CHUNK_BYTES = 1 << 20
MOST_CHUNKS = 64
STRATEGIES = ("mirrored", "ring", "both-ways-ring", "double-ring", "tree", "pipelined-tree", "double-tree", "servers",
              "hierarchical", "hierarchical-servers")  # fmt: skip


@lru_cache(maxsize=64)
def schedule(strategy: str, ranks: int, chunks: int = 1, devices: int = 1) -> Schedule:
    """The schedule of an all-reduce by name. `chunks`: of those that pipeline; `devices`: ranks of a node, for the hierarchical ones.

    Raises ValueError for an unknown name and for numbers that the strategy cannot do.
    """
    if ranks < 1 or chunks < 1:
        raise ValueError(f"{strategy} with {ranks} ranks and {chunks} chunks: at least 1 of each")
    makers = {
        "mirrored": lambda: rank_order(ranks, chunks),
        "ring": lambda: ring(ranks),
        "both-ways-ring": lambda: both_ways_ring(ranks),
        "double-ring": lambda: double_ring(ranks),
        "tree": lambda: tree(ranks),
        "pipelined-tree": lambda: tree(ranks, chunks),
        "double-tree": lambda: double_tree(ranks, chunks),
        "servers": lambda: servers(ranks),
        "hierarchical": lambda: hierarchical(ranks, devices),
        "hierarchical-servers": lambda: hierarchical(ranks, devices, servers),
    }
    return makers[known(strategy)]()


def known(strategy: str) -> str:
    """The name itself. Raises ValueError for one that is none."""
    if strategy not in STRATEGIES:
        raise ValueError(f"no strategy {strategy!r}; there are {', '.join(STRATEGIES)}")
    return strategy


Planner = Callable[[int], Schedule]
"""By the bytes of a vector, its schedule."""


def planner(strategy: str, ranks: int, devices: int = 1, order: Sequence[int] | None = None) -> Planner:
    """The schedules of a strategy in which `order[i]` does what rank i would. Raises ValueError as `schedule`, and for a wrong order."""
    if order is not None and sorted(order) != list(range(ranks)):
        raise ValueError(f"order {list(order)} is not one of the ranks 0 to {ranks - 1}, each once")

    @lru_cache(maxsize=64)
    def ordered(chunks: int) -> Schedule:
        plain = schedule(strategy, ranks, chunks, devices)
        return plain if order is None else relabelled(plain, order, ranks)

    ordered(1)  # or refuse it here
    return lambda nbytes: ordered(chunks_for(nbytes))


def chunks_for(nbytes: int) -> int:
    """Into how many chunks a pipeline cuts so many bytes: about a MiB each, 64 at most."""
    return max(1, min(MOST_CHUNKS, nbytes // CHUNK_BYTES))
