"""Every rank the parameter server of a share of the vector: shares are pushed to their servers, and pulled from them when they are summed.

Time (Li et al. 2014, with as many servers as workers, on the same machines) for M bytes:

- 2(α + M/(nB)) where each pair of n ranks has a link of B bytes a second each way;
- 2(n-1)(α + M/(nB)) where B is all that a rank can send. Then as many bytes as in a ring, each straight to its goal.
"""

from __future__ import annotations

from psjob.collectives.schedule import Move, Schedule


def servers(ranks: int) -> Schedule:
    """All-reduce in as many chunks as ranks; rank r serves chunk r, and adds what comes in the order r-1, r-2, …"""
    pairs = [(r, (r + away) % ranks) for away in range(1, ranks) for r in range(ranks)]
    push = tuple(Move(worker, server, server, True) for worker, server in pairs)
    pull = tuple(Move(server, worker, server, False) for server, worker in pairs)
    return Schedule(ranks, (1,) * ranks, (push, pull) if pairs else ())
