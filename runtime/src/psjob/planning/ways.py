"""Ways in which stages train: how many micro-batches and versions of weights a stage holds, and when weights change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

WAYS: Mapping[str, str] = {
    "flush": "1F1B with a flush: every M micro-batches the pipeline runs empty and weights change once; exact gradients",
    "pipedream": "1F1B without a flush; each micro-batch keeps the weights of its forward pass for its backward pass",
    "2bw": "1F1B without a flush; gradients of at least K micro-batches are summed, so two versions of weights do",
}


@dataclass(frozen=True)
class Way:
    """One of WAYS with its numbers."""

    name: str
    microbatches: int = 8
    """M of a flush."""
    accumulate: int = 1
    """Flushes (micro-batches of a replica, without a flush) whose gradients are one push."""
    recompute: bool = False
    """Keep the inputs of a stage alone, and run its forward pass again before the backward pass; never in the last stage."""

    @property
    def flushes(self) -> bool:
        """Whether the pipeline runs empty at every step."""
        return self.name == "flush"

    def in_flight(self, behind: int, replicas: int) -> int:
        """Micro-batches that one replica of a stage holds at most: ⌈Σ_{j≥k} r_j / r_k⌉; with a flush no more than it gets.

        That is the warm-up of PipeDream's runtime plus one, and K-k where nothing is replicated. `behind`: Σ_{j≥k} r_j.
        """
        most = -(-behind // replicas)
        return min(most, -(-self.microbatches // replicas)) if self.flushes else most

    def versions(self, in_flight: int) -> int:
        """Versions of the weights that one replica holds."""
        return {"flush": 1, "pipedream": in_flight, "2bw": 2}[self.name]

    def paced(self, seconds: float, parallel: float) -> float:
        """What work of `seconds` a micro-batch, shared by so many, adds.

        With a flush: to the time of the first micro-batch, for the other M-1. Without: the time between two micro-batches.
        """
        return (math.ceil(self.microbatches / parallel) - 1) * seconds if self.flushes else seconds / parallel
