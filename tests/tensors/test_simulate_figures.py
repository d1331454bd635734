"""Figures that are known from papers and theory come out of the simulator."""

from __future__ import annotations

import math

import numpy as np
import pytest

from psjob import rules
from psjob.modes import Async, Backup, Bounded, Softsync, Sync
from psjob.simulate.engine import Speeds, Stall, simulate
from psjob.simulate.training import Quadratic, SimulatedTraining
from tests.soaking import rotating

STALLS = Speeds(stall=Stall(0.01, extra=4.0))


@pytest.mark.parametrize(
    ("backups", "speeds", "interrupt", "interval"),
    [
        (0, STALLS, False, 4.14),
        (4, STALLS, True, 1.19),
        rotating(4, STALLS, False, 1.48),
        rotating(0, Speeds(), False, 1.27),
        rotating(4, Speeds(), True, 1.18),
        rotating(4, Speeds(), False, 1.18),
    ],
)
def test_backup_workers_against_the_slowest_of_96(backups: int, speeds: Speeds, interrupt: bool, interval: float) -> None:
    """Chen et al. 2016. Where late workers finish their step first, a stall of several steps costs several clocks."""
    workers = 96 + backups
    outcome = simulate(Backup(backups) if backups else Sync(), workers, speeds, 300 * workers, seed=1, interrupt=interrupt)
    assert outcome.elapsed / outcome.updates / 128 == pytest.approx(interval, rel=0.06 if speeds.stall else 0.01)


@pytest.mark.parametrize(("workers", "lag"), [(8, 6.99), (16, 14.95), (32, 30.8), (64, 62.2)])
def test_mean_lag_of_async(workers: int, lag: float) -> None:
    assert np.mean(simulate(Async(), workers, Speeds(), 2640).lags) == pytest.approx(lag, abs=0.05)


FRACTIONS = {
    "equal": (Speeds(), (0.88, 0.99, 1.0, 1.0, 1.0)),
    "5 % of steps 5 times as long": (Speeds(stall=Stall(0.05, 5)), (0.41, 0.54, 0.68, 0.79, 0.84)),
    "one worker always 4 times": (Speeds(slow={0: 4}), (0.25, 0.25, 0.25, 0.25, 0.91)),
}


@pytest.mark.parametrize("name", FRACTIONS)
def test_useful_time_under_a_bound(name: str) -> None:
    """A bound helps against slow steps, never against a slow worker."""
    speeds, fractions = FRACTIONS[name]
    for staleness, fraction in zip((0, 1, 3, 8, 10**9), fractions, strict=True):
        outcome = simulate(Bounded(staleness), 8, speeds, 8000, seed=1)
        assert outcome.kept * 128 / (8 * outcome.elapsed) == pytest.approx(fraction, abs=0.035), staleness


@pytest.mark.parametrize(("splits", "lag"), [(1, 0.97), rotating(2, 1.93), rotating(15, 14.5), (30, 29.0)])
def test_lag_of_softsync_is_about_its_splits(splits: int, lag: float) -> None:
    """Zhang et al. 2016: about n, practically never above 2 n."""
    lags = np.array(simulate(Softsync(splits), 30, Speeds(), 20_000).lags)
    assert lags.mean() == pytest.approx(lag, rel=0.01)
    assert (lags > 2 * splits).mean() < 1e-3


@pytest.mark.parametrize(("spread", "part"), [(0.0, 0.0094), (0.6, 0.278)])
def test_how_many_steps_are_a_quarter_too_long(spread: float, part: float) -> None:
    draws = Speeds(spread=spread).draws(400, 3)
    times = np.array([next(one) for one in draws for _ in range(100)])
    assert (times > 1.25 * 128).mean() == pytest.approx(part, rel=0.25)


@pytest.mark.parametrize("workers", [2, 4, rotating(8)])
def test_async_is_stable_up_to_its_bound(workers: int) -> None:
    """Round robin has lag m - 1 exactly: stable iff lr x curvature < 2 sin(pi / (2 (2 lag + 1)))."""
    bound = 2 * math.sin(math.pi / (2 * (2 * (workers - 1) + 1)))
    ends = []
    for factor in (0.97, 1.03):
        rule = rules.named("plain")
        hyperparameters = {**rule.hyperparameters, "lr": factor * bound}
        work = SimulatedTraining(Quadratic(1), rule, lambda batches, hyperparameters=hyperparameters: hyperparameters)
        simulate(Async(), workers, Speeds(shape=math.inf), 250 * workers * workers, work=work)
        ends.append(work.score())
    assert ends[0] < 0.1 and ends[1] > 10
