"""Modes side by side on equal speeds.

By their schedule: how much of the workers' time is of use, how many updates come, how stale they are. With gradients: loss and score on
the way, how stale pushes were, how long each worker waited.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from psjob.modes import Async, Backup, Batch, Bounded, Mode, Softsync, Sync, Threshold, config_of
from psjob.rules.base import Hyperparameters, Rule
from psjob.simulate import digits64
from psjob.simulate.engine import SimulationOutcome, Trace, WorkerSpeeds, simulate
from psjob.simulate.training import Inner, SimulatedTraining, TrainingProblem
from psjob.simulate.words import label


@dataclass(frozen=True)
class Line:
    """How a mode does. Time is in mean steps."""

    mode: str
    useful: float
    """Steps that counted x mean step time / (workers x time): 1 where nobody waits, stalls or is dropped."""
    updates: float
    """A mean step's time."""
    interval: float
    """Mean time between updates."""
    staleness: float
    """Mean, in updates."""
    staleness_p95: float
    dropped: float
    """Part of the pushes."""
    pushes: int
    elapsed: float
    """In the unit of the speeds."""
    sha256: str
    """Of the trace."""
    jobs: bool
    """A job can use this mode today."""


def compare_modes(
    modes: Sequence[Mode], workers: int, speeds: WorkerSpeeds, pushes: int, seed: int, trace: Trace | None = None, interrupt: bool = False,
    told: Callable[[int], None] | None = None,
) -> list[Line]:  # fmt: skip
    """Each mode on the same step times, for so many `pushes`; local mode pushes once in `inner_steps` of them.

    `trace` takes the last mode's.
    """
    lines = []
    for number, mode in enumerate(modes):

        def so_far(done: int, before: int = number * pushes) -> None:
            if told:
                told(before + done)

        outcome = simulate(
            mode, workers, speeds, max(workers, pushes // (mode.inner_steps or 1)), seed,
            trace=trace if mode is modes[-1] else None, told=so_far, interrupt=interrupt,
        )  # fmt: skip
        lines.append(mode_line(mode, workers, speeds, outcome))
    return lines


def usual(workers: int) -> list[Mode]:
    """The modes to look at first."""
    modes: list[Mode] = [Sync(), Backup(max(1, round(0.05 * workers))), Bounded(1), Bounded(3), Softsync(max(1, workers // 4)), Async()]
    return [*modes, Threshold(2 * workers)]


def mode_line(mode: Mode, workers: int, speeds: WorkerSpeeds, outcome: SimulationOutcome) -> Line:
    """What an outcome says of its mode."""
    time, seen = outcome.elapsed / speeds.typical, np.array(outcome.staleness or [0])
    return Line(
        label(mode), outcome.kept * (mode.inner_steps or 1) / (workers * time), outcome.updates / time, time / max(1, outcome.updates),
        float(seen.mean()), float(np.quantile(seen, 0.95)), outcome.dropped / outcome.pushes, outcome.pushes, outcome.elapsed,
        outcome.sha256, config_of(mode) is not None,
    )  # fmt: skip


def schedule_text(lines: Sequence[Line]) -> str:
    """A table, and what to read from it."""
    rows = [
        [
            one.mode, f"{one.useful:.3f}", f"{one.updates:.3g}", f"{one.interval:.3g}", f"{one.staleness:.2f}", f"{one.staleness_p95:.0f}",
            f"{100 * one.dropped:.1f}", "yes" if one.jobs else "not yet",
        ]
        for one in lines
    ]  # fmt: skip
    head = ["mode", "useful time", "updates/step", "interval", "mean staleness", "p95 staleness", "dropped %", "in jobs"]
    found = [digits64.text_columns(head, rows), ""]
    best = max(lines, key=lambda one: one.useful)
    found.append(f"Most useful time: {best.mode} ({best.useful:.3f}, mean staleness {best.staleness:.2f}).")
    fresh = [one for one in lines if one.staleness == 0]
    if fresh and best.staleness:
        first = max(fresh, key=lambda one: one.useful)
        found.append(f"Without staleness: {first.mode} ({first.useful:.3f}).")
    return "\n".join(found)


POINTS = 100
"""Of a curve."""
EDGES = tuple(digit * 10.0**power for power in range(-6, 2) for digit in (1, 2, 5))
"""Upper bounds of the buckets of gaps; one more takes what is above."""


@dataclass(frozen=True)
class Setting:
    """What trains in a mode. `hyperparameters` as of `SimulatedTraining`."""

    problem: TrainingProblem
    rule: Rule
    hyperparameters: Callable[[int], Hyperparameters]
    inner: Inner | None = None


def training_curve(
    mode: Mode, setting: Setting, workers: int, speeds: WorkerSpeeds, pushes: int, seed: int = 0, told: Callable[[int], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What training in `mode` came to, for JSON. Times are in mean steps; a step is `workers` pushes (in local mode, one step of each).

    `points` are (time, step, mean loss since the point before, score), `staleness_histogram` (staleness, pushes that count),
    `gaps` (upper bound or null, pushes), `idle` the part of the time that each worker waited. Raises ValueError for a rule that cannot take
    what the mode gives.
    """
    with np.errstate(all="ignore"):  # what diverges says so by its score
        steps, count = mode.inner_steps or 1, max(workers, pushes // (mode.inner_steps or 1))
        work = _Watched(setting, max(1, count // POINTS), mode.delay)
        seen = _Seen()
        outcome = simulate(mode, workers, speeds, count, seed, work, seen, told)
    line = mode_line(mode, workers, speeds, outcome)
    points = [(at / speeds.typical, done * steps / workers, loss, score) for at, done, loss, score in work.points]
    return {
        "mode": line.mode, "elapsed": outcome.elapsed / speeds.typical, "steps": outcome.pushes * steps / workers,
        "updates": outcome.updates, "pushes": outcome.pushes, "dropped": outcome.dropped, "staleness": line.staleness, "points": points,
        "staleness_histogram": sorted(seen.staleness.items()),
        "gaps": [(bound, seen.gaps[place]) for place, bound in enumerate((*EDGES, None))],
        "idle": [waited / max(outcome.elapsed, 1e-300) for waited in outcome.waited], "score": work.score(), "sha256": outcome.sha256,
    }  # fmt: skip


class _Watched(SimulatedTraining):
    """Notes a point (time, pushes, mean loss, score) after `every` pushes each."""

    def __init__(self, setting: Setting, every: int, delay: int) -> None:
        super().__init__(setting.problem, setting.rule, setting.hyperparameters, inner=setting.inner, delay=delay)
        self.points: list[tuple[float, int, float, float]] = []
        self._every, self._done, self._losses = every, 0, list[float]()

    def decide(self, batch: Batch, version: int) -> list[tuple[float, float]]:
        notes = super().decide(batch, version)
        self._losses += (loss for _, loss in notes)
        if len(self._losses) >= self._every:
            self._done += len(self._losses)
            now = max(push.at for push in (*batch.kept, *batch.dropped))
            self.points.append((now, self._done, float(np.mean(self._losses)), self.score()))
            self._losses.clear()
        return notes


class _Seen(Trace):
    """Counts the staleness of pushes that counted, and gaps of all, by bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.staleness: Counter[int] = Counter()
        self.gaps: Counter[int] = Counter()

    def flush(self) -> None:
        self.staleness.update(row[3] for row in self.rows if row[4])
        self.gaps.update(bisect_left(EDGES, row[5]) if row[5] == row[5] else len(EDGES) for row in self.rows)
        super().flush()


def curves_text(found: Sequence[dict[str, Any]]) -> str:
    """A table for people."""
    rows = [
        [
            one["mode"], f"{one['elapsed']:.4g}", f"{one['points'][-1][2] if one['points'] else float('nan'):.4g}", f"{one['score']:.4g}",
            f"{one['staleness']:.2f}", f"{100 * np.mean(one['idle']):.1f}",
        ]
        for one in found
    ]  # fmt: skip
    return digits64.text_columns(["mode", "time", "loss", "score", "mean staleness", "idle %"], rows)
