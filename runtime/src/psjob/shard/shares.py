"""How much each push of an update counts, where workers have brought the gradients of different numbers of processes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from psjob.shard.pending import Arrived


def shares_of(batch: Sequence[Arrived]) -> list[float] | None:
    """By push: its processes among all that are there, 0 for an absent rank; None where all count alike."""
    there = [arrived.info.processes for arrived in batch if arrived.grad is not None]
    if len(set(there)) < 2:
        return None
    return [0.0 if arrived.grad is None else arrived.info.processes / sum(there) for arrived in batch]
