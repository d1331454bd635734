"""What this process remembers of a job between two turns. Losing it all is safe: numbers are raised again, questions asked again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from psjob_operator.cluster.contest import Contests
from psjob_operator.plan.observed_state import Refusal

FOREIGN_SECONDS = 2.0
"""A pod whose number another operator (or one before this) gave may still be made for so long; only then its absence is believed."""
STRANGER_SECONDS = 10.0
"""An object of a stranger under a child's name is looked at again so often."""


@dataclass
class Answer:
    """Something read on demand: the words of Events, or whether a node is lost."""

    at: float
    words: tuple[str, ...] = ()
    lost: bool = False
    state: Literal["", "going", "missing"] = ""
    """Of a claim: it is being deleted, or not there."""
    silent: bool = False
    """Of a node: it is gone, or its kubelet was not heard of for the control plane's grace period."""
    wait: float = 60.0
    """Seconds until it is asked again, while it still matters."""

    def fresh(self, now: float) -> bool:
        """Whether it need not be asked again yet."""
        return now < self.at + self.wait


@dataclass
class Memory:
    """Of one job (one uid)."""

    uid: str
    granted: set[str] = field(default_factory=set)
    """Names of pods whose number this process raised, and that were not created yet."""
    refusals: dict[str, Refusal] = field(default_factory=dict)
    asks_nothing: bool = False
    """A LimitRange refused what psjob's own parts ask for by default: they are left to what it gives."""
    key_made: int | None = None
    """Number of the run's keys whose Secret is known to be made."""
    key_taken: int | None = None
    """Number of keys whose Secret was there before this run had a pod."""
    strangers: dict[str, float] = field(default_factory=dict)
    """`Kind/name` -> when it was last seen to be another's."""
    silent: dict[str, float] = field(default_factory=dict)
    """Nodes of which nothing is heard -> since when we know."""
    answers: dict[str, Answer] = field(default_factory=dict)
    """By uid of the pod or claim, or name of the node."""
    progress: Mapping[str, Any] | None = None
    progress_at: float | None = None
    progress_problem: str = ""
    """Of ObservedState."""
    asked_at: float = 0.0
    """When shard 0 was last asked."""
    misses: int = 0
    """Questions in a row that were not answered."""
    interrupted: bool = False
    """Something was started again, and the first step after it is looked for."""
    asked_uid: str = ""
    """Pod that was asked last."""
    wrote_at: float | None = None
    """When this process last stored the status."""
    contests: Contests = field(default_factory=Contests)
    status_refused: str = ""
    """Why the API server refused the last status write; empty where it took it."""
    unguarded: str = ""
    """Why the API server last refused a NetworkPolicy of this job."""
    kept: str = ""
    """Why the API server last refused to delete this job in its time."""
    numbers: tuple[Any, ...] = ()
    """View, start and attempts of the status when last looked at."""
    numbers_at: float = 0.0
    """When another process gave the present numbers, as far as we know; 0 where we did, or nobody."""
    observed: tuple[int, Any, tuple[str, ...]] | None = None
    """(generation, parsed spec, its problems)."""

    def see(self, status: Mapping[str, Any], now: float, ours: bool) -> None:
        """Notice the numbers of this status, and whether it was us who gave them."""
        shards, workers = status.get("shards"), status.get("workers")
        attempts = tuple(entry.get("attempt") for entry in (shards if isinstance(shards, list) else ()) if isinstance(entry, Mapping))
        numbers = (status.get("view"), workers.get("start") if isinstance(workers, Mapping) else None, attempts)
        if numbers != self.numbers:
            given = any((numbers[0], numbers[1], attempts))
            self.numbers, self.numbers_at = numbers, now if given and not ours else 0.0

    def patience(self) -> float:
        """Until when the pods of numbers that another process gave may still be on their way."""
        return self.numbers_at + FOREIGN_SECONDS if self.numbers_at else 0.0

    def refuse(self, name: str, code: int, message: str, now: float, invalid: bool = False) -> None:
        """Remember that the API server refused to create this."""
        known = self.refusals.get(name)
        tries = known.tries + 1 if known else 1
        self.refusals[name] = Refusal(name=name, code=code, message=message, at=now, tries=tries, invalid=invalid)

    def due(self, name: str) -> float:
        """When this may be tried again; 0 where it was never refused."""
        known = self.refusals.get(name)
        return 0.0 if known is None else known.again_at
