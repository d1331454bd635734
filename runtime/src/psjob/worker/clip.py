"""What the shards are to do with the mean gradient of a step before its update."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Clip:
    """Its norm over all parameters is at most `norm`, each element at most `value` from 0; None: any."""

    norm: float | None = None
    value: float | None = None
