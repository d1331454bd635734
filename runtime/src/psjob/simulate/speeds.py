"""How long steps take, drawn from a seed of their own: gamma times, unequal machines, stalls, outages, delays on the way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

CHUNK = 256


@dataclass(frozen=True)
class Stall:
    """Each step, with this chance, takes `factor` times as long and an exponential time of `extra` mean steps longer."""

    chance: float
    factor: float = 1.0
    extra: float = 0.0


@dataclass(frozen=True)
class Outage:
    """A worker is gone from `at` on, for `away` (inf: for good, and nobody waits for it any more). Its step in hand is lost."""

    worker: int
    at: float
    away: float = math.inf


@dataclass(frozen=True)
class Speeds:
    """Times of steps in any unit. By default all machines are equal: Gamma(shape 100, mean 128), a spread of 10 %.

    With `spread` V > 0 the machines themselves differ: worker means are Gamma of that coefficient of variation (0.6 in Ali et al. 2000).
    `measured` rows, one a worker (or in turn), take the place of the gamma: times are drawn from them with replacement.
    """

    mean: float = 128.0
    shape: float = 100.0
    spread: float = 0.0
    slow: Mapping[int, float] = field(default_factory=dict)
    """How many times as long as others a worker takes, always."""
    stall: Stall | None = None
    outages: tuple[Outage, ...] = ()
    up: float = 0.0
    """Time of a push on its way to the server."""
    down: float = 0.0
    """Time of the weights on their way back."""
    measured: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        for name, value, least in (("mean", self.mean, True), ("shape", self.shape, True), ("spread", self.spread, False)):
            if not (value > 0 if least else value >= 0) or (name != "shape" and math.isinf(value)):
                raise ValueError(f"speeds: {name} is {value}, must be a number {'above 0' if least else 'of 0 or more'}")
        for name, value in (("up", self.up), ("down", self.down), *((f"slow factor of worker {w}", f) for w, f in self.slow.items())):
            if not 0 <= value < math.inf or (name.startswith("slow") and value == 0):
                raise ValueError(f"speeds: {name} is {value}, must be {'above 0' if name.startswith('slow') else '0 or more'}")
        if self.stall and not (0 <= self.stall.chance <= 1 and 0 < self.stall.factor < math.inf and 0 <= self.stall.extra < math.inf):
            chance, factor, extra = self.stall.chance, self.stall.factor, self.stall.extra
            raise ValueError(
                f"speeds: stall has chance {chance}, factor {factor} and extra {extra}: "
                "must be a chance of 0 to 1, a factor above 0 and an extra of 0 or more"
            )
        for outage in self.outages:
            if not (0 <= outage.at < math.inf and outage.away > 0):
                raise ValueError(
                    f"speeds: crash of worker {outage.worker} begins at {outage.at} and lasts {outage.away}: "
                    "must begin at 0 or later and last longer than 0"
                )
        if any(not times or not all(0 < t < math.inf for t in times) for times in self.measured):
            raise ValueError("speeds: measured times must be above 0, at least one per worker")

    @property
    def typical(self) -> float:
        """Mean time of a step without slow workers and stalls: the unit of reports."""
        return float(np.mean([np.mean(times) for times in self.measured])) if self.measured else self.mean

    def draws(self, workers: int, seed: int) -> list[Iterator[float]]:
        """Endless step times a worker. They depend on the seed and its number alone, so that modes can be compared on equal ones.

        Raises ValueError when a slow factor or outage names a worker that is not there.
        """
        for worker in [*self.slow, *(outage.worker for outage in self.outages)]:
            if not 0 <= worker < workers:
                raise ValueError(f"speeds: worker {worker} is not one of the {workers} workers (0 to {workers - 1})")
        return [chain.from_iterable(self._chunks(worker, np.random.SeedSequence([seed, worker]))) for worker in range(workers)]

    def _chunks(self, worker: int, seed: np.random.SeedSequence) -> Iterator[list[float]]:
        rng = np.random.default_rng(seed)
        factor = self.slow.get(worker, 1.0)
        if self.spread:
            factor *= rng.gamma(self.spread**-2, self.spread**2)
        while True:
            if self.measured:
                times = rng.choice(np.array(self.measured[worker % len(self.measured)]), CHUNK)
            elif math.isinf(self.shape):
                times = np.full(CHUNK, self.mean)
            else:
                times = rng.gamma(self.shape, self.mean / self.shape, CHUNK)
            times = times * factor
            if self.stall:
                stalled = rng.random(CHUNK) < self.stall.chance
                longer = times * self.stall.factor + rng.exponential(self.stall.extra * self.typical, CHUNK)
                times = np.where(stalled, longer, times)
            yield times.tolist()
