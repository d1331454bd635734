"""Which workers have which stage of a model that is cut in stages. Pure."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final


@dataclass(frozen=True)
class Stages:
    """Ranks are counted through the stages in order: `replicas` workers of the first one, then of the next. Without stages it is false."""

    replicas: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.replicas)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.replicas))

    @property
    def workers(self) -> int:
        """Workers of all stages."""
        return sum(self.replicas)

    def of(self, rank: int) -> int | None:
        """The stage of a worker; None without stages. Raises ValueError for a rank of none."""
        if not self.replicas:
            return None
        if not 0 <= rank < self.workers:
            raise ValueError(f"rank {rank} is of no stage: stages of {self.replicas} workers have {self.workers} together")
        return bisect_right(self._ends, rank)

    def all(self) -> list[range]:
        """The workers of each stage."""
        return [self.ranks(stage) for stage in range(len(self.replicas))]

    def ranks(self, stage: int) -> range:
        """The workers of a stage."""
        return range(self._ends[stage] - self.replicas[stage], self._ends[stage])

    def who(self, stages: tuple[int, ...]) -> frozenset[int] | None:
        """Who pushes what belongs to these stages; None: every worker does. Raises ValueError for a stage that the job does not have."""
        if max(stages, default=-1) >= len(self.replicas):
            raise ValueError(f"a parameter is of stage {max(stages)} of the model; the job has {len(self.replicas)} stages")
        return frozenset(rank for stage in stages for rank in self.ranks(stage)) if stages else None


ALL: Final = Stages()
"""Every worker has all of the model."""
