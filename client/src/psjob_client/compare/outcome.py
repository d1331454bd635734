"""What one side of a comparison came to: the same words for real and simulated training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

SMOOTHING = 0.2
"""Of the exponential mean over a curve's points: the weight of the newest."""
LOSS = "loss"
STEPS = "step (updates in backup, softsync and threshold)"
LEARNED, NOT_LEARNED, DIVERGED = "learned", "not learned", "diverged"


@dataclass(frozen=True)
class SideOutcome:
    """Times are in `Comparison.unit`."""

    title: str
    command: str
    """That makes this side alone."""
    result: str
    """Complete, or why it is not."""
    elapsed: float
    """From the first step to the last."""
    steps: float
    """Of a worker."""
    curves: Mapping[str, Sequence[tuple[float, float, float]]] = field(default_factory=dict)
    """By metric: (time, step, value), in order of time."""
    final: Mapping[str, float] = field(default_factory=dict)
    """The last value of each metric."""
    lags: Sequence[tuple[float | None, float]] = ()
    """Staleness: (largest lag, pushes) of each bucket; None: above all; empty: not known. Without `mean_lag` a bucket is one lag."""
    gaps: Sequence[tuple[float | None, float]] = ()
    """(upper bound, pushes) of each bucket; None: above all."""
    idle: Sequence[float] = ()
    """The part of the time in which each worker waited."""
    dropped: float | None = None
    """The part of the pushes that had no effect."""
    mean_lag: float | None = None
    """Where buckets hold more than one lag."""
    warnings: Sequence[str] = ()
    """What the job said of its own training."""
    diverged: bool = False
    """A loss or a gradient was no number."""
    repeats: int = 1
    """Runs with a seed each that this was made of."""
    spread: Mapping[str, float] = field(default_factory=dict)
    """By metric: the standard deviation of its last value over the runs; empty for one run."""

    @property
    def rate(self) -> float | None:
        """Steps in one unit of time."""
        return self.steps / self.elapsed if self.elapsed > 0 and self.steps else None

    @cached_property
    def smoothed(self) -> Sequence[tuple[float, float, float]]:
        """The exponential mean of the loss."""
        return smooth(self.curves.get(LOSS, ()))

    @cached_property
    def verdict(self) -> str:
        """In a word, what became of the loss; empty where none was reported."""
        curve = self.smoothed
        if self.diverged or any(not math.isfinite(value) for _, _, value in curve):
            return DIVERGED
        if len(curve) < 2:
            return ""
        return LEARNED if curve[-1][2] < curve[0][2] else DIVERGED if curve[-1][2] > curve[0][2] else NOT_LEARNED

    @property
    def lag(self) -> float | None:
        """The mean."""
        count = sum(pushes for _, pushes in self.lags)
        return sum((lag or 0) * pushes for lag, pushes in self.lags) / count if count and self.mean_lag is None else self.mean_lag

    @property
    def waiting(self) -> float | None:
        """The mean part of the time in which a worker waited."""
        return sum(self.idle) / len(self.idle) if self.idle else None


@dataclass(frozen=True)
class Comparison:
    """All sides, and how they came about."""

    name: str
    """The job's."""
    unit: str
    """Of times: s, or mean steps."""
    about: Mapping[str, str]
    """How it was run, in words: command, machine, when."""
    manifest: str
    """The text of the manifest, or of several."""
    sides: Sequence[SideOutcome]
    wanted: float | None = None
    """A loss that the user names."""

    @cached_property
    def target(self) -> float | None:
        """The wanted loss, or the lowest that all sides reached which have learned, by their smoothed curves; None: none has."""
        if self.wanted is not None:
            return self.wanted
        learned = [one for one in self.sides if one.verdict == LEARNED]
        lows = [min(value for _, _, value in one.smoothed) for one in learned]
        return max(lows) if lows else None

    def time_to(self, one: SideOutcome) -> float | None:
        """When the smoothed loss of `one` was first at the target; None where it has not learned."""
        target = self.target if one.verdict == LEARNED else None
        return next((at for at, _, value in one.smoothed if target is not None and value <= target), None)

    def as_json(self) -> dict[str, Any]:
        """For programs; `lossTarget` and `timeToLoss` as in the table."""
        sides = [
            asdict(one)
            | {"rate": one.rate, "lag": one.lag, "waiting": one.waiting, "timeToLoss": self.time_to(one), "verdict": one.verdict}
            for one in self.sides
        ]
        about = {"name": self.name, "unit": self.unit, "about": dict(self.about), "manifest": self.manifest}
        return about | {"lossWanted": self.wanted, "lossTarget": self.target, "sides": sides}


def repeated(runs: Sequence[SideOutcome]) -> SideOutcome:
    """One outcome of several runs of a side: means of the numbers, and the curves of the run whose last loss is the median one."""
    if len(runs) == 1:
        return runs[0]
    ranked = sorted(runs, key=lambda one: value if math.isfinite(value := one.final.get(LOSS, math.inf)) else math.inf)
    names = [name for name in ranked[0].final if all(name in one.final for one in runs)]
    finals = {name: [one.final[name] for one in runs] for name in names}
    warnings = list(dict.fromkeys(words for one in runs for words in one.warnings))
    diverged = sum(one.verdict == DIVERGED for one in runs)
    if diverged:
        warnings.insert(0, f"diverged in {diverged} of {len(runs)} runs")
    failed = next((one.result for one in runs if one.result != "Complete"), "Complete")
    return replace(
        ranked[len(ranked) // 2],
        result=failed,
        elapsed=statistics.fmean(one.elapsed for one in runs),
        steps=statistics.fmean(one.steps for one in runs),
        final={name: statistics.fmean(values) for name, values in finals.items()},
        spread={name: statistics.stdev(values) for name, values in finals.items() if all(map(math.isfinite, values))},
        warnings=warnings,
        diverged=bool(diverged),
        repeats=len(runs),
    )


def smooth(curve: Sequence[tuple[float, float, float]], newest: float = SMOOTHING) -> list[tuple[float, float, float]]:
    """The exponential mean of its values, at the same times and steps; `newest`: the weight of each new value."""
    means = accumulate((value for _, _, value in curve), lambda before, value: before + newest * (value - before))
    return [(at, step, mean) for (at, step, _), mean in zip(curve, means, strict=True)]
