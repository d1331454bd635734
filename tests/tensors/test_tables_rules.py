"""Rules of rows against torch's optimizers where one exists, against the formula in plain Python where none does.

- id → slot, against a dict.
- Rows with a rule of their own follow the schedule of the attached optimizer, by its factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

import psjob as ps
from psjob.embeddings.rowtables import RowTables, schedule_factor
from psjob.process.errors import Refused
from psjob.rules.base import check_hyperparameters
from psjob.tables import RowTable, TableSpec
from psjob.tables.rules import RULES, named
from psjob.tables.slab import Index

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


torch.set_num_threads(1)

EDGES = [0, -1, -2, 1, (1 << 63) - 1, -(1 << 63), 1 << 32, -(1 << 32)]
ID = st.one_of(st.sampled_from(EDGES), st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-40, 40))


@settings(max_examples=150)
@given(st.lists(st.tuples(st.booleans(), st.lists(ID, max_size=60)), max_size=8))
def test_it_holds_what_a_dict_holds(turns: list[tuple[bool, list[int]]]) -> None:
    index, truth, slot = Index(), dict[int, int](), 0
    for add, ids in turns:
        if add:
            new = [i for i in dict.fromkeys(ids) if i not in truth]
            index.insert(torch.tensor(new, dtype=torch.int64), torch.arange(slot, slot + len(new)))
            truth |= {i: slot + at for at, i in enumerate(new)}
            slot += len(new)
        else:
            index.delete(torch.tensor(ids, dtype=torch.int64))
            for i in ids:
                truth.pop(i, None)
        asked = [*EDGES, *ids, *ids, *truth]
        found = index.lookup(torch.tensor(asked, dtype=torch.int64)).tolist()
        assert [max(-1, s) for s in found] == [truth.get(i, -1) for i in asked]
        assert len(index) == len(truth)


def test_it_grows_and_forgets_the_dead() -> None:
    index = Index()
    ids = torch.randint(-(1 << 63), (1 << 63) - 1, (40_000,), generator=torch.Generator().manual_seed(1))
    ids = torch.unique(ids)
    index.insert(ids, torch.arange(len(ids)))
    assert torch.equal(index.lookup(ids), torch.arange(len(ids)))
    size = index.nbytes
    for turn in range(20):  # the dead make room for the next without end
        index.delete(ids)
        assert len(index) == 0 and bool((index.lookup(ids) < 0).all())
        ids = ids + (turn + 1)
        index.insert(ids, torch.arange(len(ids)))
    assert index.nbytes <= 2 * size
    assert torch.equal(index.lookup(ids), torch.arange(len(ids)))


def test_ids_in_steps_do_not_pile_up() -> None:
    """Ids of one pattern (multiples of a power of two, a high half that counts) are found in few rounds, not one after another."""
    for shift in (0, 8, 20, 32, 44):
        index = Index()
        ids = torch.arange(1 << 15) << shift
        index.insert(ids, torch.arange(len(ids)))
        distance = (index._find(ids) - index._start(ids)) & index._mask
        assert float(distance.double().mean()) < 8, shift
        assert torch.equal(index.lookup(ids), torch.arange(len(ids)))


Schedule = Callable[[torch.optim.Optimizer], Callable[[int], Any]]
IDS = torch.tensor([[0, 1], [1, 2], [5, 5], [3, 0], [2, 4], [1, 3]])


@pytest.mark.parametrize(
    ("group", "attached", "factor"),
    [
        ({"lr": 0.5}, 0.5, 1.0),
        ({"lr": 0.125}, 0.5, 0.25),
        ({"lr": 0.125, "initial_lr": 0.25}, 0.5, 0.5),
        ({"lr": 0.0, "initial_lr": 0.25}, 0.0, 0.0),
        ({"lr": 0.25, "initial_lr": 0.25}, 0.0, 1.0),
        ({"lr": torch.tensor(0.125)}, 0.5, 0.25),
        ({"lr": 0.125}, 0.0, 1.0),
        ({"lr": 0.125, "initial_lr": 0.0}, 0.5, 1.0),
        ({}, 0.5, 1.0),
    ],
)
def test_the_factor_is_the_rate_now_over_the_first_one(group: Mapping[str, Any], attached: float, factor: float) -> None:
    assert schedule_factor(group, attached) == factor


def by_torch_schedules(make: Callable[[torch.optim.Optimizer], Any]) -> Schedule:
    def of(optimizer: torch.optim.Optimizer) -> Callable[[int], Any]:
        scheduler = make(optimizer)
        return lambda step: scheduler.step()

    return of


def by_hand(optimizer: torch.optim.Optimizer) -> Callable[[int], Any]:
    return lambda step: optimizer.param_groups[0].update(lr=0.1 / (step + 2))


def on_plateau(optimizer: torch.optim.Optimizer) -> Callable[[int], Any]:
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    return lambda step: scheduler.step(1.0)


SCHEDULES: dict[str, Schedule] = {
    "halves": by_torch_schedules(lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step)),
    "warms up from 0": by_torch_schedules(lambda o: lr_scheduler.LambdaLR(o, lambda step: step / 4)),
    "one cycle": by_torch_schedules(lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=8, cycle_momentum=False)),
    "on a plateau": on_plateau,
    "by hand": by_hand,
}


def trained_schedules(embedding: nn.Module, schedule: Schedule, before: bool) -> torch.Tensor:
    """Rows after some steps; the scheduler is made before attach or after it."""
    model = nn.ModuleDict({"user": embedding})
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    move = schedule(optimizer) if before else None
    if isinstance(embedding, ps.Embedding):
        model, optimizer = ps.attach(model, optimizer)
    move = move or schedule(optimizer)
    for step, ids in enumerate(IDS):
        optimizer.zero_grad()
        model["user"](ids).square().sum().backward()
        optimizer.step()
        move(step)
    with torch.no_grad():
        return model["user"](torch.arange(6)).clone()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_rows_of_a_rule_of_their_own_are_as_torchs_under_a_schedule(name: str, before: bool) -> None:
    values = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    # Of one cycle the first rate is not the optimizer's: the rows' is that times the same factor.
    first = 0.3 / 25 if name == "one cycle" else 0.1
    ours = trained_schedules(ps.Embedding.from_pretrained(values, freeze=False, optimizer="sgd", lr=first), SCHEDULES[name], before)
    theirs = trained_schedules(nn.Embedding.from_pretrained(values.clone(), freeze=False), SCHEDULES[name], before)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert (ours - values).abs().max() > 1e-3


def tables(rule: str, **more: float) -> tuple[RowTables, torch.optim.Optimizer]:
    model = nn.ModuleDict({"user": ps.Embedding(6, 3, optimizer=rule, lr=0.4, **more), "head": nn.Linear(3, 1)})
    groups = [{"params": [model["user"].anchor], "lr": 0.2}, {"params": model["head"].parameters(), "lr": 3.0}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    return RowTables(model, optimizer, 0), optimizer


def test_rows_follow_the_group_of_their_anchor_only() -> None:
    found, optimizer = tables("adagrad", eps=0.01)
    optimizer.param_groups[1]["lr"] = 0.5
    assert found.hyperparameters()[0]["lr"] == 0.4
    optimizer.param_groups[0]["lr"] = 0.1
    assert found.hyperparameters()[0] | {"lr": 0.2, "eps": 0.01} == found.hyperparameters()[0]


def test_the_state_of_an_optimizer_that_is_put_back_brings_its_schedule() -> None:
    first, optimizer = tables("sgd")
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.step()
    scheduler.step()
    again, other = tables("sgd")
    other.load_state_dict(optimizer.state_dict())
    assert first.hyperparameters()[0]["lr"] == again.hyperparameters()[0]["lr"] == 0.2


def test_a_rule_that_has_no_rate_of_0_refuses_the_schedule_and_names_the_way_out() -> None:
    found, optimizer = tables("ftrl")
    optimizer.param_groups[0]["lr"] = 0.0
    with pytest.raises(
        Refused, match=r"rows of user: rule ftrl: lr is above 0.* got 0\. It is the rows' 0\.4 times 0, .* put user\.anchor into a"
    ):
        found.hyperparameters()
