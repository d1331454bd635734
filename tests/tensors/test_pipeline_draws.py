"""Random bits of a pipeline's modules: by seed, step, micro-batch and name, and beside the script's own stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from psjob.pipeline import draws
from psjob.pipeline.cuts import split_model
from psjob.pipeline.draws import Calls, Draw, drawn, generators_of, seed_for
from psjob.pipeline.stage import StageRun, arguments

torch.set_num_threads(1)
ONES = torch.ones(64, 8)


class Noisy(nn.Module):
    """Draws by a function, by a module twice, and by a function again."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([nn.functional.dropout(x, 0.5), self.drop(x), self.drop(x), nn.functional.dropout(x, 0.5)])


def run(model: nn.Module, draw: Draw, cuts: Any = (), x: torch.Tensor = ONES) -> torch.Tensor:
    value: Any = arguments(x)
    for part in split_model(model, cuts):
        value = part.run(dict(model.named_parameters()), dict(model.named_buffers()), value, draw, Calls())
    assert isinstance(value, torch.Tensor)
    return value


def test_bits_depend_on_each_part_of_the_counter_and_come_again() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    base = run(model, Draw(1, 2, 3))
    assert torch.equal(base, run(model, Draw(1, 2, 3))) and 0.3 < float((base == 0).float().mean()) < 0.7
    for other in (Draw(2, 2, 3), Draw(1, 3, 3), Draw(1, 2, 4)):
        assert not torch.equal(base, run(model, other))


def test_bits_depend_on_the_name_and_not_on_the_cuts() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5), nn.Dropout(0.5))
    whole = run(model, Draw(0, 0, 0))
    assert torch.equal(whole, run(model, Draw(0, 0, 0), (1,))) and torch.equal(whole, run(model, Draw(0, 0, 0), (1, 2)))
    assert float((whole != 0).float().mean()) < 0.25  # three different masks, not one three times


def test_each_draw_of_a_module_has_bits_of_its_own() -> None:
    masks = run(Noisy(), Draw(0, 0, 0)) != 0
    assert all(not torch.equal(masks[i], masks[j]) for i in range(4) for j in range(i))


def test_one_module_in_two_places_draws_by_its_place() -> None:
    drop = nn.Dropout(0.5)
    models = [nn.Sequential(drop, nn.Identity(), drop), nn.Sequential(nn.Sequential(drop, drop), nn.Identity())]
    for model, cuts in zip(models, ((2,), ("0.1",)), strict=True):
        whole, cut = run(model, Draw(0, 0, 0)), run(model, Draw(0, 0, 0), cuts)
        assert torch.equal(whole, cut) and float((whole != 0).float().mean()) < 0.35


@pytest.mark.parametrize("fails", [False, True])
def test_the_scripts_own_stream_is_left_where_it_was(fails: bool) -> None:
    class Maybe(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.dropout(x, 0.5)
            if fails:
                raise ZeroDivisionError
            return x

    torch.manual_seed(4)
    state = torch.get_rng_state()
    try:
        run(nn.Sequential(Noisy(), Maybe()), Draw(0, 0, 0), (1,), torch.ones(4, 2))
        assert not fails
    except ZeroDivisionError:
        assert fails
    assert torch.equal(torch.get_rng_state(), state)
    assert not nn.modules.module._global_forward_pre_hooks and not nn.modules.module._global_forward_hooks


class Saving(nn.Module):
    """Keeps no activations of its block and runs it again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


@pytest.mark.parametrize(
    "inner", [lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh())]
)
def test_activation_checkpointing_draws_the_same_bits_again(inner: Any) -> None:
    def gradient(saving: bool) -> torch.Tensor:
        torch.manual_seed(0)
        block = inner()
        model = nn.Sequential(nn.Linear(8, 8), Saving(block) if saving else nn.ModuleDict({"block": block}))
        if not saving:
            model[1].forward = block.forward  # type: ignore[assignment]
        run = StageRun(split_model(model)[0], {})
        run.load(0, dict(model.named_parameters()))
        run.forward(0, arguments(ONES), Draw(0, 0, 0), torch.sum)
        return run.backward(0)[1]["1.block.0.weight"]

    assert torch.equal(gradient(True), gradient(False))


def test_activation_checkpointing_of_a_module_that_is_called_twice_is_refused() -> None:
    class Twice(Saving):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(super().forward(x))

    model = nn.Sequential(Twice(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))))
    run = StageRun(split_model(model)[0], {})
    run.load(0, dict(model.named_parameters()))
    run.forward(0, arguments(ONES), Draw(0, 0, 0), torch.sum)
    with pytest.raises(RuntimeError, match=r"0\.block\.1 is called 2 times in a forward, and activation checkpointing calls it again"):
        run.backward(0)


def test_seeds_are_fixed_for_ever() -> None:
    """A run that goes on in a later version draws what it would have drawn."""
    assert seed_for(1, 2, 3, "layers.0", 0, 0) == 4150260176314746304
    assert seed_for("1", 2) != seed_for(1, "2") and seed_for("a", "b") != seed_for("ab") and seed_for(1, 23) != seed_for(12, 3)


def test_generators_are_those_of_the_tensors_of_weights_and_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part without weights draws where its input lies."""
    asked: list[set[str]] = []
    own = draws.generators_of
    monkeypatch.setattr(draws, "generators_of", lambda devices: asked.append({d.type for d in devices}) or own([]))
    run(nn.Sequential(nn.Dropout(0.5)), Draw(0, 0, 0), x=ONES.to("meta"))
    run(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), Draw(0, 0, 0), cuts=(1,))
    assert asked == [{"meta"}, {"cpu"}]


def test_generators_of_other_devices_are_refused() -> None:
    assert generators_of([torch.device("cpu"), torch.device("meta")]) == [torch.default_generator]
    with pytest.raises(ValueError, match="random draws on device mps cannot be repeated; use cpu, cuda or xpu"):
        generators_of([torch.device("mps")])


def test_a_graphs_operator_draws_from_the_scripts_stream_outside_a_part() -> None:
    torch.manual_seed(0)
    first = drawn(torch.ops.aten.dropout.default, "a", 0, 0, ONES, 0.5, True)
    torch.manual_seed(0)
    assert torch.equal(first, nn.functional.dropout(ONES, 0.5))
