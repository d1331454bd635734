"""How large a step may be before late gradients make it diverge: the rules on a quadratic, against the roots of their recurrences.

- Figures that are known from papers and theory come out of the simulator.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from psjob import rules
from psjob.modes import Async, Backup, Bounded, Softsync, Sync
from psjob.rules.base import check_hyperparameters
from psjob.simulate.engine import Stall, WorkerSpeeds, simulate
from psjob.simulate.training import Quadratic, SimulatedTraining
from tests.support.soaking import rotating


def grows(name: str, step: float, workers: int, rounds: int, momentum: float | None = None) -> bool:
    """m workers push in turn (lag m - 1) on f = x²/2: is x larger in the second half of the run than in the first?"""
    rule = rules.named(name)
    hyperparameters = check_hyperparameters(rule, {"lr": step} | ({} if momentum is None else {"momentum": momentum}))
    state = rule.init(np.ones(1))
    sent: list[Any] = [rule.reply(state, hyperparameters, worker).copy() for worker in range(workers)]
    size = []
    for turn in range(rounds * workers):
        worker = turn % workers
        rule.apply(state, sent[worker], hyperparameters, staleness=min(turn, workers - 1), worker=worker)
        sent[worker] = rule.reply(state, hyperparameters, worker).copy()
        size.append(abs(float(state.weights[0])))
        if size[-1] > 1e9:
            return True
    half = len(size) // 2
    return max(size[half:]) > max(size[:half])


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_plain_steps_are_stable_below_the_bound_and_not_above(workers: int) -> None:
    """eta a < 2 sin(pi / (2 (2 lag + 1))): row C1."""
    bound = 2 * math.sin(math.pi / (2 * (2 * (workers - 1) + 1)))
    assert not grows("plain", 0.97 * bound, workers, 120)
    assert grows("plain", 1.03 * bound, workers, 120)


TABLE = {
    "plain": (None, {4: 0.445, 8: 0.209, 16: 0.101}),
    "nag": (0.9, {4: 0.046, 8: 0.0176, 16: 0.0083}),
    "multi-momentum": (0.9, {4: 0.1418, 8: 0.0370, 16: 0.0148}),
    "dana-zero": (0.9, {4: 0.220, 8: 0.0971, 16: 0.0455}),
}


@pytest.mark.parametrize("workers", [4, 8, rotating(16)])
@pytest.mark.parametrize("name", TABLE)
def test_how_large_a_step_may_be(name: str, workers: int) -> None:
    """Row C8: DANA allows five times NAG's step, half of what steps without momentum allow."""
    momentum, largest = TABLE[name]
    assert not grows(name, 0.96 * largest[workers], workers, 200, momentum)
    assert grows(name, 1.04 * largest[workers], workers, 200, momentum)


STALLS = WorkerSpeeds(stall=Stall(0.01, extra=4.0))


@pytest.mark.parametrize(
    ("backups", "speeds", "interrupt", "interval"),
    [
        (0, STALLS, False, 4.14),
        (4, STALLS, True, 1.19),
        rotating(4, STALLS, False, 1.48),
        rotating(0, WorkerSpeeds(), False, 1.27),
        rotating(4, WorkerSpeeds(), True, 1.18),
        rotating(4, WorkerSpeeds(), False, 1.18),
    ],
)
def test_backup_workers_against_the_slowest_of_96(backups: int, speeds: WorkerSpeeds, interrupt: bool, interval: float) -> None:
    """Chen et al. 2016. Where late workers finish their step first, a stall of several steps costs several clocks."""
    workers = 96 + backups
    outcome = simulate(Backup(backups) if backups else Sync(), workers, speeds, 300 * workers, seed=1, interrupt=interrupt)
    assert outcome.elapsed / outcome.updates / 128 == pytest.approx(interval, rel=0.06 if speeds.stall else 0.01)


@pytest.mark.parametrize(("workers", "lag"), [(8, 6.99), (16, 14.95), (32, 30.8), (64, 62.2)])
def test_mean_lag_of_async(workers: int, lag: float) -> None:
    assert np.mean(simulate(Async(), workers, WorkerSpeeds(), 2640).lags) == pytest.approx(lag, abs=0.05)


FRACTIONS = {
    "equal": (WorkerSpeeds(), (0.88, 0.99, 1.0, 1.0, 1.0)),
    "5 % of steps 5 times as long": (WorkerSpeeds(stall=Stall(0.05, 5)), (0.41, 0.54, 0.68, 0.79, 0.84)),
    "one worker always 4 times": (WorkerSpeeds(slow={0: 4}), (0.25, 0.25, 0.25, 0.25, 0.91)),
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
    lags = np.array(simulate(Softsync(splits), 30, WorkerSpeeds(), 20_000).lags)
    assert lags.mean() == pytest.approx(lag, rel=0.01)
    assert (lags > 2 * splits).mean() < 1e-3


@pytest.mark.parametrize(("spread", "part"), [(0.0, 0.0094), (0.6, 0.278)])
def test_how_many_steps_are_a_quarter_too_long(spread: float, part: float) -> None:
    draws = WorkerSpeeds(spread=spread).draws(400, 3)
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
        simulate(Async(), workers, WorkerSpeeds(shape=math.inf), 250 * workers * workers, work=work)
        ends.append(work.score())
    assert ends[0] < 0.1 and ends[1] > 10
