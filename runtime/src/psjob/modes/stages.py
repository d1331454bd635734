"""Which workers have which stage of a model that is cut in stages, and the cuts that psjob has chosen for a job. Pure.

Worker 0 tells chosen cuts, shard 0 keeps them and the other workers hear them.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import gcd
from typing import Any, Final


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

    def serving(self, stage: int, micro: int) -> int:
        """The worker of a stage that works on a micro-batch: micro-batches go round its workers, as in PipeDream's runtime.py."""
        ranks = self.ranks(stage)
        return ranks[micro % len(ranks)]

    def neighbours(self, rank: int) -> list[int]:
        """Workers of the stages before and behind with whom a worker shares a micro-batch, in order of their ranks."""
        stage = self.of(rank)
        if stage is None:
            return []
        mine = self.ranks(stage)
        found = []
        for other in (stage - 1, stage + 1):
            if 0 <= other < len(self.replicas):
                ranks = self.ranks(other)
                common = gcd(len(mine), len(ranks))  # n mod r and n mod s are any pair of numbers that are equal modulo gcd(r, s)
                found += [one for one in ranks if (one - ranks.start) % common == (rank - mine.start) % common]
        return found

    def who(self, stages: tuple[int, ...]) -> frozenset[int] | None:
        """Who pushes what belongs to these stages; None: every worker does. Raises ValueError for a stage that the job does not have."""
        if max(stages, default=-1) >= len(self.replicas):
            raise ValueError(f"a parameter is of stage {max(stages)} of the model; the job has {len(self.replicas)} stages")
        return frozenset(rank for stage in stages for rank in self.ranks(stage)) if stages else None


ALL: Final = Stages()
"""Every worker has all of the model."""


ASKS: Final = "cuts"
"""What the hello of a stream asks for that is about them."""
MOST_LETTERS: Final = 512
"""Of the name of a module."""
MOST_CUTS: Final = 255


@dataclass(frozen=True)
class ChosenCuts:
    """The module with which each stage after the first begins, and the predicted seconds of a step."""

    cuts: tuple[str, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As it is sent and kept."""
        return {"cuts": list(self.cuts), "seconds": self.seconds}

    def told(self, names: Sequence[str]) -> str:
        """For a log: what was chosen, and how to write it into the manifest. `names`: of all stages."""
        pins = ", ".join(f"{{name: {name}, cut: {json.dumps(cut)}}}" for name, cut in zip(names[1:], self.cuts, strict=False))
        pin = f"; to pin that, spec.stages: {pins}" if pins else ""
        return f"cuts: auto cuts the model at {', '.join(self.cuts)}; a step is predicted to take {1e3 * self.seconds:.4g} ms{pin}"

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], stages: int) -> ChosenCuts:
        """Read what `to_json` wrote, of a job of so many stages. Raises ValueError for anything else."""
        cuts, seconds = raw.get("cuts"), raw.get("seconds")
        named = isinstance(cuts, list) and all(isinstance(cut, str) and 0 < len(cut) <= MOST_LETTERS and cut.isprintable() for cut in cuts)
        if not named or not isinstance(cuts, list) or len(cuts) > MOST_CUTS or len(set(cuts)) != len(cuts):
            raise ValueError(f"cuts are {str(cuts)[:80]}, expected a list of different names of modules")
        if len(cuts) != stages - 1:
            raise ValueError(f"{len(cuts)} cuts were chosen, and a job of {stages} stages has {stages - 1}")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds) or seconds < 0:
            raise ValueError(f"the predicted step takes {str(seconds)[:40]} s, expected a number from 0")
        return cls(tuple(cuts), float(seconds))
