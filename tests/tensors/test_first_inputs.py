"""What a script without `ps.shard` trains on is seen, however its modules are called."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from psjob.api.alike import STEPS, FirstInputs
from psjob.protocol.coordinator.report import JobProgress


def sums_of(model: nn.Module, run: object, x: torch.Tensor) -> list[int]:
    found: list[list[int]] = []
    inputs = FirstInputs(model, found.append)
    for step in range(STEPS):
        run(x[step])  # type: ignore[operator]
        inputs.step()
    assert not any(module._forward_pre_hooks for module in model.modules()), "no hook stays"
    (sums,) = found
    return sums


def test_of_a_model_whose_parts_are_called_the_first_is_looked_at() -> None:
    model = nn.ModuleDict({"one": nn.Linear(2, 2), "other": nn.Linear(2, 1)})
    x = torch.arange(STEPS * 2, dtype=torch.float32).reshape(STEPS, 2)
    parts = sums_of(model, lambda row: model["other"](model["one"](row)), x)
    assert len(set(parts)) == STEPS
    with torch.no_grad():
        model["one"].weight.add_(1)
    assert sums_of(model, lambda row: model["other"](model["one"](row)), x) == parts, "of the inputs alone"
    whole = nn.Sequential(model["one"], model["other"])
    assert sums_of(whole, whole, x) == parts
    assert sums_of(whole, lambda row: whole(input=row), x) == parts


def test_inputs_are_seen_through_what_wraps_them() -> None:
    model = nn.Linear(2, 1)
    x = torch.arange(STEPS * 4, dtype=torch.float32).reshape(STEPS, 2, 2)
    plain = sums_of(model, model, x)
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.func.functional_call(model, weights, (row,)).sum()
        return made

    assert sums_of(model, lambda rows: torch.func.grad(loss)(weights, rows), x) == plain
    assert sums_of(model, lambda rows: torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, rows), x) == plain
    assert sums_of(model, lambda rows: model(rows.cfloat().conj().real), x) == plain


def test_a_trace_of_the_model_is_no_input() -> None:
    model = nn.Linear(2, 1)
    x = torch.arange(STEPS * 2, dtype=torch.float32).reshape(STEPS, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        assert not any(sums_of(model, lambda row: torch.jit.trace(model, (row,)), x))
    assert not any(sums_of(model, lambda row: model.to("meta")(row.to("meta")), x))


def test_steps_in_which_no_tensor_was_seen_say_nothing() -> None:
    progress = JobProgress()
    assert progress.see_inputs(0, [0, 0, 7], 2) is None
    said = progress.see_inputs(1, [0, 0, 8], 2)
    assert said is not None and "of 2 batches that were looked at, 0 went" in said
    assert progress.data_problem is None
    again = JobProgress()
    again.see_inputs(0, [0, 7], 2)
    again.see_inputs(1, [7, 0], 2)
    assert again.data_problem is not None and "of 2 batches that were looked at, 2 went to several workers" in again.data_problem
