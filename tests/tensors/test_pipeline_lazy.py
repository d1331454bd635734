"""Models without memory, and first values by name and seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from psjob.pipeline.cuts import split_model
from psjob.pipeline.lazy import materialise, on_meta
from tests.tensors.pipeline_models import Across, Net, Positions, Scale, encoder, row

torch.set_num_threads(1)


def built(make: Any, seed: int = 0, only: Any = None) -> nn.Module:
    with on_meta():
        model: nn.Module = make()
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    materialise(model, seed, only=only)
    return model


@pytest.mark.parametrize(
    "make", [row, Net, encoder, lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True)], ids=["row", "net", "encoder", "transformer"]
)
def test_values_depend_on_seed_and_name_alone(make: Any) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = built(make)
    if make in (row, Net):  # those seed torch themselves
        before = torch.get_rng_state()
    other, third = built(make), built(make, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    states = [model.state_dict() for model in (one, other, third)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0])
    assert {name: t.shape for name, t in make().state_dict().items()} == {name: t.shape for name, t in states[0].items()}


@pytest.mark.parametrize("make", [row, Net, encoder], ids=["row", "net", "encoder"])
def test_values_are_drawn_as_each_module_draws_them(make: Any) -> None:
    """Not the same numbers as a model that is built at once, and the same spread; constants are the same."""
    lazy, real = built(make).state_dict(), make().state_dict()
    for name, tensor in real.items():
        if tensor.dtype.is_floating_point and tensor.numel() > 30:
            assert 0.6 < float(lazy[name].std() / tensor.std()) < 1.7, name
        elif name.endswith(("running_mean", "running_var", "num_batches_tracked", "out_proj.bias", "norm1.weight")):
            assert torch.equal(lazy[name], tensor), name


def test_modules_of_one_kind_have_different_values() -> None:
    model = built(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert not torch.equal(model[0].weight, model[1].weight)  # type: ignore[index, union-attr]


@pytest.mark.parametrize("stages", [(5,), (2, 5, "9.1")])
def test_a_stage_alone_gets_the_values_that_it_has_in_the_whole_model(stages: Any) -> None:
    whole = built(row).state_dict()
    with on_meta():
        shape = row()
    for part in split_model(shape, stages):
        names = {*part.parameters, *part.buffers}
        alone = built(row, only=names)
        held = {name for name, t in [*alone.named_parameters(), *alone.named_buffers()] if not t.is_meta}
        assert held == names
        assert all(torch.equal(alone.get_parameter(name), whole[name]) for name in part.parameters)


def test_a_tied_weight_has_the_values_of_the_module_that_made_it() -> None:
    def by_head() -> nn.Module:
        embedding, head = nn.Embedding(400, 16), nn.Linear(16, 400, bias=False)
        embedding.weight = head.weight
        return nn.Sequential(embedding, head)

    def by_embedding() -> nn.Module:
        embedding, head = nn.Embedding(400, 16), nn.Linear(16, 400, bias=False)
        head.weight = embedding.weight
        return nn.Sequential(embedding, head)

    of_head, of_embedding = built(by_head), built(by_embedding)
    assert of_head[0].weight is of_head[1].weight  # type: ignore[index, union-attr]
    assert float(of_head[0].weight.detach().std()) < 0.2  # type: ignore[index, operator, union-attr, arg-type]
    assert float(of_embedding[0].weight.detach().std()) > 0.9  # type: ignore[index, operator, union-attr, arg-type]


def test_tensors_stay_the_same_objects_and_keep_requires_grad() -> None:
    with on_meta():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    materialise(model, 0)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert not model[0].bias.requires_grad and model[0].weight.requires_grad
    before = model[0].weight.detach().clone()
    model(torch.randn(4, 2)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)


def test_a_model_with_memory_stays_as_it_is() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    materialise(model, 0)
    assert torch.equal(model.weight, before)


class ByHand(nn.Module):
    """As many language models: `_init_weights` after all is built."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        how(self.fc)


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(3).tril(0) if False else torch.ones(3)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Scale, "scale gets no value from reset_parameters of Scale; set scale there, or build the model without ps.lazy()"),
        (lambda: nn.Sequential(Positions()), "0.table gets no value from reset_parameters of Positions; set table there"),
        (lambda: ByHand(lambda fc: nn.init.normal_(fc.weight)), "fc.weight is set in "),
        (lambda: ByHand(lambda fc: fc.bias.data.zero_()), "fc.bias is set in "),
        (Loose, "mask of Loose is a tensor that is neither parameter nor buffer and has no value. Register it as a buffer"),
    ],
)
def test_values_that_a_stage_could_not_make_are_refused(make: Any, says: str) -> None:
    with on_meta():
        model = make()
    with pytest.raises(ValueError) as refused:
        materialise(model, 0)
    assert str(refused.value).startswith(says)


def test_a_module_that_sets_others_needs_them_all() -> None:
    model = built(Across)
    assert all(float(p.detach().abs().sum()) == 0 for p in model.parameters())
    with on_meta():
        shape = Across()
    with pytest.raises(ValueError, match="reset_parameters of Across sets tensors of another stage; cut the model around it"):
        materialise(shape, 0, only={"a.weight", "a.bias"})


def test_values_set_by_reset_parameters_may_be_ones_own() -> None:
    class Own(Scale):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.empty(3))
            self.reset_parameters()

        def reset_parameters(self) -> None:
            nn.init.normal_(self.scale)
            self.table.copy_(torch.arange(3.0))  # type: ignore[operator]

    model = built(lambda: nn.Sequential(Own()))
    assert model[0].table.tolist() == [0.0, 1.0, 2.0] and float(model[0].scale.detach().std()) > 0  # type: ignore[index, operator, union-attr]
