"""What the shards are to do with the mean gradient of a step before its update."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Clip:
    """Each element is at most `value` from 0, then its norm over all parameters at most `norm`; None: any."""

    norm: float | None = None
    value: float | None = None

    def within(self, other: Clip) -> Clip:
        """Both, one after the other: the smaller limits."""
        return Clip(_least(self.norm, other.norm), _least(self.value, other.value))


def _least(one: float | None, other: float | None) -> float | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)
