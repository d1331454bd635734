"""Modes side by side with gradients: loss and score on the way, how stale pushes were, how long each worker waited."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from psjob.modes import Batch, Mode
from psjob.rules.base import Hyperparameters, Rule
from psjob.simulate import schedule, table
from psjob.simulate.engine import simulate
from psjob.simulate.speeds import Speeds
from psjob.simulate.trace import Trace
from psjob.simulate.training import Inner, SimulatedTraining, TrainingProblem

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


def curve(
    mode: Mode, setting: Setting, workers: int, speeds: Speeds, pushes: int, seed: int = 0, told: Callable[[int], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What training in `mode` came to, for JSON. Times are in mean steps; a step is `workers` pushes (in local mode, one step of each).

    `points` are (time, step, mean loss since the point before, score), `lags` (staleness, pushes that count), `gaps` (upper bound or null,
    pushes), `idle` the part of the time that each worker waited. Raises ValueError for a rule that cannot take what the mode gives.
    """
    with np.errstate(all="ignore"):  # what diverges says so by its score
        steps, count = mode.inner_steps or 1, max(workers, pushes // (mode.inner_steps or 1))
        work = _Watched(setting, max(1, count // POINTS))
        seen = _Seen()
        outcome = simulate(mode, workers, speeds, count, seed, work, seen, told)
    line = schedule.line(mode, workers, speeds, outcome)
    points = [(at / speeds.typical, done * steps / workers, loss, score) for at, done, loss, score in work.points]
    return {
        "mode": line.mode, "elapsed": outcome.elapsed / speeds.typical, "steps": outcome.pushes * steps / workers,
        "updates": outcome.updates, "pushes": outcome.pushes, "dropped": outcome.dropped, "lag": line.lag, "points": points,
        "lags": sorted(seen.lags.items()), "gaps": [(bound, seen.gaps[place]) for place, bound in enumerate((*EDGES, None))],
        "idle": [waited / max(outcome.elapsed, 1e-300) for waited in outcome.waited], "score": work.score(), "sha256": outcome.sha256,
    }  # fmt: skip


class _Watched(SimulatedTraining):
    """Notes a point (time, pushes, mean loss, score) after `every` pushes each."""

    def __init__(self, setting: Setting, every: int) -> None:
        super().__init__(setting.problem, setting.rule, setting.hyperparameters, inner=setting.inner)
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
    """Counts lags of pushes that counted, and gaps of all, by bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.lags: Counter[int] = Counter()
        self.gaps: Counter[int] = Counter()

    def flush(self) -> None:
        self.lags.update(row[3] for row in self.rows if row[4])
        self.gaps.update(bisect_left(EDGES, row[5]) if row[5] == row[5] else len(EDGES) for row in self.rows)
        super().flush()


def text(found: Sequence[dict[str, Any]]) -> str:
    """A table for people."""
    rows = [
        [
            one["mode"], f"{one['elapsed']:.4g}", f"{one['points'][-1][2] if one['points'] else float('nan'):.4g}", f"{one['score']:.4g}",
            f"{one['lag']:.2f}", f"{100 * np.mean(one['idle']):.1f}",
        ]
        for one in found
    ]  # fmt: skip
    return table.columns(["mode", "time", "loss", "score", "mean lag", "idle %"], rows)
