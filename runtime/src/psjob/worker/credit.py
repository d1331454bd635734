"""A worker's share of the gradients that a shard may hold: all shares together are the shard's budget."""

from __future__ import annotations

from psjob.process.config import Config

CREDIT = 32 << 20
"""Bytes on their way between a worker and a shard that keep both ways full: more is not taken of the share for what is pushed at a step."""


def credits(config: Config, overlap: bool) -> tuple[int, int]:
    """Bytes of pushes that wait for an answer, and of early data, that a shard may hold of one worker.

    One block of each push always goes, however small the share. Early data has what the pushes leave, and none without `overlap`.
    """
    share = config.gradients // config.workers
    pushes = min(CREDIT, share // 2 if overlap else share)
    return pushes, share - pushes if overlap else 0
