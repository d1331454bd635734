"""How far a shard's blocks are, all of them and by stage of the model. Values alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShardStands:
    """Where a shard stands: its lowest and highest version, blocks it owns, the lowest version that workers have stored there."""

    lo: int
    hi: int
    owned: int
    stored: int
    stages: tuple[tuple[int, int, int], ...] = ()
    """By stage of the model: lowest and highest version of its blocks there, and how many these are."""

    def of(self, stage: int | None) -> ShardStands:
        """The same, with the blocks of one stage. Raises IndexError for a stage that it does not tell."""
        if stage is None:
            return self
        lo, hi, owned = self.stages[stage]
        return ShardStands(lo, hi, owned, self.stored)
