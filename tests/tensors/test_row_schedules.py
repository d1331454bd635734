"""Rows with a rule of their own follow the schedule of the attached optimizer, by its factor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import psjob as ps
from psjob.embeddings.rowtables import RowTables, schedule_factor
from psjob.process.errors import Refused

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


def by_torch(make: Callable[[torch.optim.Optimizer], Any]) -> Schedule:
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
    "halves": by_torch(lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step)),
    "warms up from 0": by_torch(lambda o: lr_scheduler.LambdaLR(o, lambda step: step / 4)),
    "one cycle": by_torch(lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=8, cycle_momentum=False)),
    "on a plateau": on_plateau,
    "by hand": by_hand,
}


def trained(embedding: nn.Module, schedule: Schedule, before: bool) -> torch.Tensor:
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
    ours = trained(ps.Embedding.from_pretrained(values, freeze=False, optimizer="sgd", lr=first), SCHEDULES[name], before)
    theirs = trained(nn.Embedding.from_pretrained(values.clone(), freeze=False), SCHEDULES[name], before)
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
