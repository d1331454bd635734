"""How large a step may be before late gradients make it diverge: the rules on a quadratic, against the roots of their recurrences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from psjob import rules
from psjob.rules.base import check_hyperparameters
from tests.soaking import rotating


def grows(name: str, step: float, workers: int, rounds: int, momentum: float | None = None) -> bool:
    """m workers push in turn (lag m - 1) on f = x²/2: is x larger in the second half of the run than in the first?"""
    rule = rules.named(name)
    hyperparameters = check_hyperparameters(rule, {"lr": step} | ({} if momentum is None else {"momentum": momentum}))
    state = rule.init(np.ones(1))
    sent: list[Any] = [rule.reply(state, hyperparameters, worker).copy() for worker in range(workers)]
    size = []
    for turn in range(rounds * workers):
        worker = turn % workers
        rule.apply(state, sent[worker], hyperparameters, lag=min(turn, workers - 1), worker=worker)
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
