"""Corrections for late gradients, against literal loops of torch's own optimizers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from psjob.pipeline import predict

torch.set_num_threads(1)


def trained(make: Any, steps: int = 5) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(7, 3, generator=generator, dtype=torch.float64))
    optimizer = make([p])
    for _ in range(steps):
        p.grad = torch.randn(7, 3, generator=generator, dtype=torch.float64)
        optimizer.step()
    return p, optimizer


@pytest.mark.parametrize("delay", [0, 1, 2, 7])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_sgd_goes_where_its_momentum_alone_leads(delay: int, momentum: float) -> None:
    p, optimizer = trained(lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=momentum))
    ahead = predict.of_optimizer(optimizer, delay)[p]
    before = p.detach().clone()
    for _ in range(delay):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    torch.testing.assert_close(ahead, p.detach(), rtol=1e-12, atol=1e-12)
    assert ahead.data_ptr() != p.data_ptr()
    assert torch.equal(ahead, before) == (delay == 0 or momentum == 0)


@pytest.mark.parametrize("delay", [0, 1, 4])
def test_adam_goes_where_its_first_moment_alone_leads(delay: int) -> None:
    p, optimizer = trained(lambda ps: torch.optim.Adam(ps, lr=0.05, betas=(0.8, 0.95), eps=1e-6))
    ahead = predict.of_optimizer(optimizer, delay)[p]
    second = optimizer.state[p]["exp_avg_sq"].clone()
    for _ in range(delay):
        p.grad = torch.zeros_like(p)
        optimizer.state[p]["exp_avg_sq"].copy_(second / 0.95)  # the formula lets it stay; a step multiplies it by beta2 first
        optimizer.step()
    torch.testing.assert_close(ahead, p.detach(), rtol=1e-10, atol=1e-12)


def test_adam_takes_a_learning_rate_for_each_update_to_come() -> None:
    w, m, v = (torch.tensor([x], dtype=torch.float64) for x in (1.0, 0.5, 0.04))
    ahead = predict.adam_ahead(w, m, v, 3, [0.1, 0.0, 0.3], (0.9, 0.99), 0.0)
    by_hand = 1.0
    for i, lr in ((1, 0.1), (3, 0.3)):
        by_hand -= lr * 0.9**i * 0.5 / (1 - 0.9 ** (3 + i)) / math.sqrt(0.04 / (1 - 0.99 ** (3 + i)))
    assert float(ahead) == pytest.approx(by_hand, rel=1e-12)
    assert float(w) == 1.0


def test_nothing_is_predicted_before_the_first_update() -> None:
    p, optimizer = trained(lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), steps=0)
    assert torch.equal(predict.of_optimizer(optimizer, 3)[p], p.detach())


def test_momentum_grows_with_delay_towards_the_highest() -> None:
    betas = [predict.momentum_by_stage(0.9, delay, 8) for delay in range(8)]
    assert betas[0] == 0.9 and betas == sorted(betas) and betas[4] == pytest.approx(0.945) and betas[-1] < 0.99


def test_the_learning_rate_of_late_stages_begins_low() -> None:
    assert predict.lr_by_delay(0.4, 4, 0, 100) == pytest.approx(0.1)
    assert predict.lr_by_delay(0.4, 4, 50, 100) == pytest.approx(0.2)
    assert [predict.lr_by_delay(0.4, 4, step, 100) for step in (100, 1000)] == [0.4, 0.4]
    assert [predict.lr_by_delay(0.4, delay, 0, 100) for delay in (0, 1)] == [0.4, 0.4]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda ps: torch.optim.AdamW(ps), "weights of AdamW cannot be predicted; take torch's SGD or Adam"),
        (
            lambda ps: torch.optim.SGD(ps, momentum=0.9, nesterov=True),
            "weights of SGD with nesterov=True cannot be predicted; leave nesterov out",
        ),
        (lambda ps: torch.optim.Adam(ps, weight_decay=0.1), "weights of Adam with weight_decay=0.1 cannot be predicted"),
    ],
)
def test_an_optimizer_without_a_formula_is_refused(make: Any, says: str) -> None:
    _, optimizer = trained(make)
    with pytest.raises(ValueError, match=says):
        predict.of_optimizer(optimizer, 1)


def test_numbers_out_of_range_are_refused() -> None:
    w = torch.zeros(1)
    with pytest.raises(ValueError, match=r"momentum is 1\.0, must be from 0 to below 1"):
        predict.momentum_ahead(w, w, 0.1, 1.0, 2)
    with pytest.raises(ValueError, match="delay is -1, must be 0 or more"):
        predict.lr_by_delay(0.1, -1, 0, 10)
    with pytest.raises(ValueError, match=r"beta is 0\.995"):
        predict.momentum_by_stage(0.995, 1, 4)
    with pytest.raises(ValueError, match="step is -1"):
        predict.adam_ahead(w, w, w, -1, [0.1])


def test_the_rate_of_each_group_goes_by_the_delay() -> None:
    groups = [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.4, "momentum": 0.0}]
    for delay, step, factor in ((0, 0, 1.0), (1, 0, 1.0), (4, 0, 0.25), (4, 5, 0.5), (4, 10, 1.0), (4, 99, 1.0), (9, 5, 1 / 3)):
        found = predict.annealed(groups, delay, step, 10)
        assert [group["lr"] for group in found] == pytest.approx([0.1 * factor, 0.4 * factor])
        assert [group["momentum"] for group in found] == [0.9, 0.0]
    assert groups[0]["lr"] == 0.1
    with pytest.raises(ValueError, match="a rule without a hyperparameter lr cannot be annealed"):
        predict.annealed([{"momentum": 0.9}], 1, 0, 10)


def test_the_momentum_of_each_group_goes_by_the_delay() -> None:
    groups = [{"lr": 0.1, "beta1": 0.9}, {"lr": 0.4, "beta1": 0.5}]
    for delay in range(4):
        found = predict.with_momentum("nadam", groups, delay, 4, 0.98)
        assert [group["beta1"] for group in found] == pytest.approx([0.9 + 0.02 * delay, 0.5 + 0.12 * delay])
        assert [group["lr"] for group in found] == [0.1, 0.4]
    assert groups[0]["beta1"] == 0.9
    with pytest.raises(ValueError, match=r"the momentum of adam does not go by stage; take torch\.optim\.NAdam"):
        predict.with_momentum("adam", groups, 1, 4, 0.98)
    with pytest.raises(ValueError, match=r"beta is 0\.9, highest 0\.8, stages 4"):
        predict.with_momentum("nadam", groups, 1, 4, 0.8)
