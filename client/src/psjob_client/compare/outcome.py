"""What one side of a comparison came to: the same words for real and simulated training.

A comparison in a line says who was first at the loss that is compared, and by how much; it says only what the numbers say. Comparisons
are kept beside a folder's runs, so that the page can show them.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from psjob_client.local.run_folder import RUNS_FOLDER
from psjob_client.problems import BadInput

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
    """That makes only this side."""
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
    staleness_histogram: Sequence[tuple[float | None, float]] = ()
    """(largest staleness, pushes) of each bucket; None: above all; empty: not known. Without `mean_staleness` a bucket is one value."""
    gaps: Sequence[tuple[float | None, float]] = ()
    """(upper bound, pushes) of each bucket; None: above all."""
    idle: Sequence[float] = ()
    """The part of the time in which each worker waited."""
    dropped: float | None = None
    """The part of the pushes that had no effect."""
    mean_staleness: float | None = None
    """Where buckets hold more than one value."""
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
    def staleness(self) -> float | None:
        """The mean."""
        count = sum(pushes for _, pushes in self.staleness_histogram)
        if self.mean_staleness is not None or not count:
            return self.mean_staleness
        return sum((staleness or 0) * pushes for staleness, pushes in self.staleness_histogram) / count

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
            | {"rate": one.rate, "staleness": one.staleness, "waiting": one.waiting}
            | {"timeToLoss": self.time_to(one), "verdict": one.verdict}
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


SMALL = 1.1
"""Times of single runs that differ by less than this factor may be chance."""
MOST = 3
"""Sides that are named."""


def verdict_sentences(comparison: Comparison) -> str:
    """One to three sentences; empty if there is one side only."""
    sides = comparison.sides
    if len(sides) < 2:
        return ""
    if not any(one.verdict for one in sides):
        return "No side reported a loss twice, so that none can be said to be better."
    learned = [one for one in sides if one.verdict == LEARNED]
    if not learned:
        return "No side has learned: in none of them did the smoothed loss fall."
    reached = sorted(
        ((at, number) for number, one in enumerate(sides) if (at := comparison.time_to(one)) is not None), key=lambda pair: pair
    )
    loss = f"{comparison.target:.3g}"
    if not reached:
        return " ".join(filter(None, (f"No side came down to loss {loss}.", _lowest(learned, None))))
    if len(reached) == 1:
        (at, number), others = reached[0], [one for one in sides if one is not sides[reached[0][1]]]
        missed = _missed(others)
        return f"Only {sides[number].title} came down to loss {loss}, after {_time(at, comparison.unit)}.{missed}"
    return " ".join(filter(None, (_race(comparison, reached, loss), _chance(comparison, reached), _lowest(learned, sides[reached[0][1]]))))


def _race(comparison: Comparison, reached: Sequence[tuple[float, int]], loss: str) -> str:
    sides, unit = comparison.sides, comparison.unit
    (best, fastest), *rest = reached
    level = [fastest, *(number for at, number in rest if at == best)]
    if len(level) == len(reached):
        return f"{_names([sides[number] for number in level])} came down to loss {loss} at the same time: {_time(best, unit)}."
    later = [(at, number) for at, number in rest if at > best]
    told = [f"{sides[number].title} {_time(at, unit)}" + (f" ({at / best:.2g} times as long)" if best > 0 else "") for at, number in later]
    more = f" and {len(told) - MOST} more later" if len(told) > MOST else ""
    first = f"First at loss {loss}: {_names([sides[number] for number in level])}, after {_time(best, unit)}"
    return f"{first}; then {', '.join(told[:MOST])}{more}."


def _chance(comparison: Comparison, reached: Sequence[tuple[float, int]]) -> str:
    """Simulated runs say the same each time."""
    (best, first), (second, other) = reached[:2]
    close = best < second <= best * SMALL
    single = comparison.unit == "s" and max(comparison.sides[first].repeats, comparison.sides[other].repeats) == 1
    return "The first two are too close for one run each: --repeat 3 tells how far runs differ." if close and single else ""


def _lowest(learned: Sequence[SideOutcome], first: SideOutcome | None) -> str:
    """Of the last loss, if one side has it by itself."""
    finals = sorted((value, number) for number, one in enumerate(learned) if math.isfinite(value := one.final.get(LOSS, math.nan)))
    if len(finals) < 2 or finals[0][0] == finals[1][0]:
        return ""
    lowest = learned[finals[0][1]]
    return f"{lowest.title} {'also ' if lowest is first else ''}ended at the lowest loss, {finals[0][0]:.3g}."


def _missed(others: Sequence[SideOutcome]) -> str:
    bad = [one for one in others if one.verdict == DIVERGED]
    return f" {_names(bad)} diverged." if bad else ""


def _names(sides: Sequence[SideOutcome]) -> str:
    titles = [one.title for one in sides]
    titles = titles if len(titles) <= MOST + 1 else [*titles[:MOST], f"{len(titles) - MOST} more"]
    return titles[0] if len(titles) == 1 else f"{', '.join(titles[:-1])} and {titles[-1]}"


def _time(at: float, unit: str) -> str:
    return f"{at:.3g} {unit}"


FOLDER = "comparisons"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")


def keep(folder: Path, found: Comparison, now: float) -> Path | None:
    """Write it below `folder`; None where the disk does not take it, which spoils nothing."""
    word = re.sub(r"[^a-z0-9]+", "-", found.name.lower()).strip("-")[:60] or "jobs"
    path = folder / RUNS_FOLDER / FOLDER / f"{word}-{time.strftime('%m%d-%H%M%S', time.localtime(now))}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unready = path.with_suffix(".tmp")
        unready.write_text(json.dumps(found.as_json()), encoding="utf-8")
        unready.replace(path)
    except OSError:
        return None
    return path


def names(folder: Path) -> list[dict[str, Any]]:
    """Name and time of each, the newest first."""
    found = []
    for path in (folder / RUNS_FOLDER / FOLDER).glob("*.json"):
        try:
            found.append({"name": path.stem, "time": path.stat().st_mtime})
        except OSError:
            continue
    return sorted(found, key=lambda one: one["time"], reverse=True)


def read_comparison(folder: Path, name: str) -> Comparison:
    """A comparison by its name. Raises BadInput if there is none, or where its file is damaged."""
    path = folder / RUNS_FOLDER / FOLDER / f"{name}.json"
    if not NAME.fullmatch(name) or not path.is_file():
        raise BadInput(f"there is no comparison {name} in {path.parent}; `psjob compare` makes one")
    known = {one.name for one in fields(SideOutcome)}
    try:
        raw = json.loads(path.read_bytes())
        sides = [SideOutcome(**{key: value for key, value in side.items() if key in known}) for side in raw["sides"]]
        found = Comparison(raw["name"], raw["unit"], dict(raw["about"]), raw["manifest"], sides, raw.get("lossWanted"))
        for one in sides:
            for curve in filter(None, one.curves.values()):
                at, step, value = zip(*curve, strict=True)
                math.fsum((*at, *step, *value))  # raises where one is no number
            _ = one.rate, one.staleness, one.waiting, found.time_to(one)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BadInput(f"{path}: cannot be read as a comparison: {type(error).__name__}; make it again with `psjob compare`") from None
    return found
