"""Modes side by side on equal speeds: how much of the workers' time is of use, how many updates come, how stale they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from psjob.modes import Async, Backup, Bounded, Mode, Softsync, Sync, Threshold, config_of
from psjob.simulate import table
from psjob.simulate.engine import SimulationOutcome, simulate
from psjob.simulate.speeds import Speeds
from psjob.simulate.trace import Trace
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
    lag: float
    lag_p95: float
    dropped: float
    """Part of the pushes."""
    pushes: int
    elapsed: float
    """In the unit of the speeds."""
    sha256: str
    """Of the trace."""
    jobs: bool
    """A job can use this mode today."""


def compare(
    modes: Sequence[Mode], workers: int, speeds: Speeds, pushes: int, seed: int, trace: Trace | None = None, interrupt: bool = False,
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
        lines.append(line(mode, workers, speeds, outcome))
    return lines


def usual(workers: int) -> list[Mode]:
    """The modes to look at first."""
    modes: list[Mode] = [Sync(), Backup(max(1, round(0.05 * workers))), Bounded(1), Bounded(3), Softsync(max(1, workers // 4)), Async()]
    return [*modes, Threshold(2 * workers)]


def line(mode: Mode, workers: int, speeds: Speeds, outcome: SimulationOutcome) -> Line:
    """What an outcome says of its mode."""
    time, lags = outcome.elapsed / speeds.typical, np.array(outcome.lags or [0])
    return Line(
        label(mode), outcome.kept * (mode.inner_steps or 1) / (workers * time), outcome.updates / time, time / max(1, outcome.updates),
        float(lags.mean()), float(np.quantile(lags, 0.95)), outcome.dropped / outcome.pushes, outcome.pushes, outcome.elapsed,
        outcome.sha256, _jobs_have(mode),
    )  # fmt: skip


def text(lines: Sequence[Line]) -> str:
    """A table, and what to read from it."""
    rows = [
        [
            one.mode, f"{one.useful:.3f}", f"{one.updates:.3g}", f"{one.interval:.3g}", f"{one.lag:.2f}", f"{one.lag_p95:.0f}",
            f"{100 * one.dropped:.1f}", "yes" if one.jobs else "not yet",
        ]
        for one in lines
    ]  # fmt: skip
    head = ["mode", "useful time", "updates/step", "interval", "mean lag", "p95 lag", "dropped %", "in jobs"]
    found = [table.columns(head, rows), ""]
    best = max(lines, key=lambda one: one.useful)
    found.append(f"Most useful time: {best.mode} ({best.useful:.3f}, mean staleness (lag) {best.lag:.2f}).")
    fresh = [one for one in lines if one.lag == 0]
    if fresh and best.lag:
        first = max(fresh, key=lambda one: one.useful)
        found.append(f"Without lag: {first.mode} ({first.useful:.3f}).")
    return "\n".join(found)


def as_json(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The same for programs."""
    return [asdict(one) for one in lines]


def _jobs_have(mode: Mode) -> bool:
    return config_of(mode) is not None
