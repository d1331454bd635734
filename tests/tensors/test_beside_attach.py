"""What a script does beside what it attached is told once, and nothing is told of what it did not do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from psjob.api import advice
from psjob.api.scriptchanges import OwnGradients
from psjob.api.weightdigests import Stepping, Unattached


def told_of_gradients(model: nn.Module, step: Any, capsys: pytest.CaptureFixture[str]) -> str:
    parameters = list(model.parameters())
    looks = OwnGradients(parameters, [name for name, _ in model.named_parameters()])
    for _ in range(3):
        step()
        looks.step(range(len(parameters)), False)
        for p in parameters:
            p.grad = None
    return capsys.readouterr().err


def test_gradients_that_share_memory_are_no_change(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 1)
    flat = torch.zeros(3)

    def backward() -> None:
        for p, part in zip(model.parameters(), (flat[:2], flat[2:]), strict=True):
            p.grad = part.view_as(p)
        model(torch.ones(1, 2)).sum().backward()

    assert not told_of_gradients(model, backward, capsys)


def test_a_gradient_that_is_changed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 1)

    def backward() -> None:
        model(torch.ones(1, 2)).sum().backward()
        model.bias.grad.mul_(2)  # type: ignore[union-attr]

    assert told_of_gradients(model, backward, capsys).count("the gradient of bias was changed by hand") == 1


def test_a_layer_that_came_after_attach_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(advice, "tell", lambda _kind, sentence: told.append(sentence))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    unattached = Unattached(model, list(model.parameters()), [], False, Stepping())
    unattached.watch().remove()
    model(torch.ones(1, 2)).sum().backward()
    unattached.look()
    assert not told
    model[1] = nn.Linear(2, 1)
    unattached.look()
    assert not told, "it was made for an evaluation, so far"
    model(torch.ones(1, 2)).sum().backward()
    unattached.look()
    assert told == [told[0]] and told[0].startswith("1.weight, 1.bias came into the model after attach")
