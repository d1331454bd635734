"""Rules of rows against torch's optimizers where one exists, against the formula in plain Python where none does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from psjob.rules.base import check_hyperparameters
from psjob.tables import RowTable, TableSpec
from psjob.tables.rules import RULES, named

torch.set_num_threads(1)

ROWS, DIM, STEPS = 12, 5, 7


def pushes(seed: int = 3, every_row: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    chance = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(STEPS):
        ids = torch.randperm(ROWS, generator=chance)[: ROWS if every_row else 5]
        made.append((ids, torch.randn(len(ids), DIM, generator=chance)))
    return made


def trained(
    rule: str, hyperparameters: dict[str, Any], given: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(initial weights of all rows, weights after the pushes)."""
    table = RowTable(TableSpec("t", DIM, rule, num_rows=ROWS, seed=5))
    every = torch.arange(ROWS)
    before = table.pull(every)
    for clock, (ids, grads) in enumerate(given):
        table.push(ids, grads, check_hyperparameters(named(rule), hyperparameters), clock)
    return before, table.pull(every)


def by_torch(
    before: torch.Tensor, given: Sequence[tuple[torch.Tensor, torch.Tensor]], make: Callable[[Any], torch.optim.Optimizer]
) -> torch.Tensor:
    weights = torch.nn.Parameter(before.clone())
    optimizer = make([weights])
    for ids, grads in given:
        weights.grad = torch.sparse_coo_tensor(ids[None], grads, (ROWS, DIM), check_invariants=True).coalesce()
        optimizer.step()
    return weights.detach()


@pytest.mark.parametrize(
    ("rule", "hyperparameters", "make", "every_row"),
    [
        ("sgd", {"lr": 0.1}, lambda p: torch.optim.SGD(p, lr=0.1), False),
        ("adagrad", {"lr": 0.1}, lambda p: torch.optim.Adagrad(p, lr=0.1), False),
        (
            "adagrad",
            {"lr": 0.1, "initial_accumulator_value": 0.3},
            lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3),
            False,
        ),
        ("adam", {"lr": 0.1}, lambda p: torch.optim.SparseAdam(p, lr=0.1), True),
        (
            "adam",
            {"lr": 0.1, "beta1": 0.5, "beta2": 0.7, "eps": 1e-3},
            lambda p: torch.optim.SparseAdam(p, lr=0.1, betas=(0.5, 0.7), eps=1e-3),
            True,
        ),
    ],
)
def test_it_is_torchs_on_the_rows_touched(rule: str, hyperparameters: dict[str, Any], make: Callable[[Any], Any], every_row: bool) -> None:
    given = pushes(every_row=every_row)
    before, after = trained(rule, hyperparameters, given)
    torch.testing.assert_close(after, by_torch(before, given, make), rtol=2e-6, atol=2e-6)
    assert not torch.equal(before, after)


def test_weight_decay_is_of_the_rows_touched() -> None:
    ids, grads = torch.tensor([1, 3]), torch.ones(2, DIM)
    before, after = trained("sgd", {"lr": 0.1, "weight_decay": 0.5}, [(ids, grads)])
    expected = before.clone()
    expected[ids] -= 0.1 * (grads + 0.5 * before[ids])
    torch.testing.assert_close(after, expected)


def rowwise(w: list[float], g: list[list[float]], lr: float, eps: float, start: float) -> list[float]:
    total = start
    for grad in g:
        total += sum(x * x for x in grad) / len(grad)
        w = [a - lr * b / (math.sqrt(total) + eps) for a, b in zip(w, grad, strict=True)]
    return w


def lazy_adam(w: list[float], g: list[list[float]], lr: float, b1: float, b2: float, eps: float) -> list[float]:
    m, v = [0.0] * len(w), [0.0] * len(w)
    for t, grad in enumerate(g, 1):
        m = [b1 * a + (1 - b1) * x for a, x in zip(m, grad, strict=True)]
        v = [b2 * a + (1 - b2) * x * x for a, x in zip(v, grad, strict=True)]
        step = lr * math.sqrt(1 - b2**t) / (1 - b1**t)
        w = [a - step * x / (math.sqrt(y) + eps) for a, x, y in zip(w, m, v, strict=True)]
    return w


def ftrl(w: list[float], g: list[list[float]], lr: float, beta: float, l1: float, l2: float) -> list[float]:
    n = [0.0] * len(w)
    z = [-a * (beta / lr + l2) - math.copysign(l1, a) for a in w]
    for grad in g:
        for i, x in enumerate(grad):
            sigma = (math.sqrt(n[i] + x * x) - math.sqrt(n[i])) / lr
            z[i] += x - sigma * w[i]
            n[i] += x * x
            w[i] = 0.0 if abs(z[i]) <= l1 else -(z[i] - math.copysign(l1, z[i])) / ((beta + math.sqrt(n[i])) / lr + l2)
    return w


@pytest.mark.parametrize(
    ("rule", "hyperparameters", "formula"),
    [
        ("rowwise_adagrad", {"lr": 0.1, "eps": 1e-3, "initial_accumulator_value": 0.2}, lambda w, g: rowwise(w, g, 0.1, 1e-3, 0.2)),
        ("adam", {"lr": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 1e-4}, lambda w, g: lazy_adam(w, g, 0.1, 0.8, 0.9, 1e-4)),
        ("ftrl", {"lr": 0.1, "beta": 0.5, "l1": 0.3, "l2": 0.2}, lambda w, g: ftrl(w, g, 0.1, 0.5, 0.3, 0.2)),
    ],
)
def test_it_is_its_formula(
    rule: str, hyperparameters: dict[str, Any], formula: Callable[[list[float], list[list[float]]], list[float]]
) -> None:
    given = pushes(seed=9)
    before, after = trained(rule, hyperparameters, given)
    for row in range(ROWS):
        mine = [grads[ids == row][0].tolist() for ids, grads in given if bool((ids == row).any())]
        assert after[row].tolist() == pytest.approx(formula(before[row].tolist(), mine), rel=1e-4, abs=1e-5)


def test_ftrl_makes_zeros() -> None:
    before, after = trained("ftrl", {"lr": 0.1, "l1": 50.0}, pushes(every_row=True))
    assert bool((before != 0).all()) and bool((after == 0).any())


def test_another_rate_moves_no_row_of_ftrl() -> None:
    table, every = RowTable(TableSpec("t", DIM, "ftrl", num_rows=ROWS, seed=5)), torch.arange(ROWS)
    for clock, (ids, grads) in enumerate(pushes(every_row=True)):
        table.push(ids, grads, check_hyperparameters(named("ftrl"), {"lr": 0.1, "l1": 0.01}), clock)
    before = table.pull(every)
    table.push(every, torch.zeros(ROWS, DIM), check_hyperparameters(named("ftrl"), {"lr": 0.02, "beta": 3.0, "l1": 0.01}), 1000)
    torch.testing.assert_close(table.pull(every), before, rtol=1e-5, atol=0)


def test_an_unknown_number_and_an_lr_that_divides_are_refused() -> None:
    with pytest.raises(ValueError, match="rule adagrad has no hyperparameter 'lr_decay'"):
        check_hyperparameters(named("adagrad"), {"lr_decay": 0.1})
    with pytest.raises(ValueError, match="lr is above 0"):
        check_hyperparameters(named("ftrl"), {"lr": 0.0})
    with pytest.raises(ValueError, match="there is no rule 'lion' for rows"):
        named("lion")
    assert set(RULES) == {"sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"}
