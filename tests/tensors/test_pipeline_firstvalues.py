"""First values made a few modules at a time are those of the whole lazy model.

- Models without memory, and first values by name and seed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from psjob.api.stage_cuts import StageMemory, check_first_values
from psjob.layout.blocks import Layout, TensorSpec
from psjob.layout.packing import Pack
from psjob.pipeline.cuts import split_model
from psjob.pipeline.lazy import InitialValues, materialise, on_meta
from psjob.process.errors import Refused
from tests.tensors.pipeline_models import Across, Net, Positions, Scale, encoder, row

torch.set_num_threads(1)


def tied() -> nn.Module:
    """The head has a bias, which is drawn with the weight that it shares with the embedding."""
    embedding, head = nn.Embedding(40, 16), nn.Linear(16, 40)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.Linear(16, 16), nn.BatchNorm1d(16), head)


MODELS: dict[str, Any] = {
    "row": row,
    "net": Net,
    "encoder": encoder,
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    "tied": tied,
    "across": Across,
}


def lazy(make: Any) -> nn.Module:
    with on_meta():
        model: nn.Module = make()
    return model


def table_of(model: nn.Module) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), 0, ()) for name, p in model.named_parameters())


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_values_are_those_of_the_whole_model(make: Any) -> None:
    whole = lazy(make)
    materialise(whole, 5)
    expected = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    model = lazy(make)
    state = torch.get_rng_state()
    values = InitialValues(model, 5)
    before = {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    assert values.names == expected.keys() == before.keys()
    for name in sorted(values.names):
        drawn = values.of(name)
        assert drawn.keys() == values.beside(name) and name in drawn
        assert all(torch.equal(tensor, expected[other]) for other, tensor in drawn.items()), name
    assert torch.equal(torch.get_rng_state(), state)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert {name: id(tensor) for name, tensor in after.items()} == before and all(tensor.is_meta for tensor in after.values())


def test_what_is_drawn_together_is_as_little_as_can_be() -> None:
    values = InitialValues(lazy(tied), 0)
    assert values.beside("1.weight") == {"1.weight", "1.bias"}
    assert values.beside("0.weight") == values.beside("3.bias") == {"0.weight", "3.bias"}
    assert InitialValues(lazy(Across), 0).beside("a.bias") == {"a.weight", "a.bias", "b.weight", "b.bias"}


@pytest.mark.parametrize("block_bytes", [64, 1 << 12, 4 << 20])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_blocks_hold_the_values_of_the_whole_model(make: Any, block_bytes: int) -> None:
    """Blocks that hold parts of tensors, and of several modules; rank 0 has memory for its stage meanwhile."""
    whole = lazy(make)
    materialise(whole, 5)
    expected = [p.detach() for p in whole.parameters()]
    model = lazy(make)
    memory = StageMemory.of(model, 5)
    assert memory is not None
    memory.give(split_model(model)[0])
    table = table_of(model)
    layout = Layout.of(table, block_bytes)
    first = memory.attached(table)
    for block in layout.blocks:
        flat = torch.empty(block.length, dtype=getattr(torch, block.dtype))
        wanted = Pack(block, torch.empty_like(flat), layout.table).gather(expected)
        assert torch.equal(first.fill(block, Pack(block, flat.fill_(7), layout.table)), wanted)


def test_a_stage_has_memory_for_its_own_and_draws_what_is_not_pulled() -> None:
    whole = lazy(tied)
    materialise(whole, 2)
    model = lazy(tied)
    memory = StageMemory.of(model, 2)
    assert memory is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    memory.give(split_model(model, [1, 3])[1])
    own = {"1.weight", "1.bias", "2.weight", "2.bias", "2.running_mean", "2.running_var", "2.num_batches_tracked"}
    assert {name for name, t in [*model.named_parameters(), *model.named_buffers()] if not t.is_meta} == own
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    memory.attached([spec for spec in table_of(model) if spec.name != "1.bias"])
    expected = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    for name in own - {"1.weight", "2.weight", "2.bias"}:
        assert torch.equal({**dict(model.named_parameters()), **dict(model.named_buffers())}[name], expected[name]), name


def test_values_that_a_script_sets_after_the_cut_are_refused() -> None:
    model = lazy(tied)
    memory = StageMemory.of(model, 2)
    assert memory is not None
    memory.give(split_model(model, [1, 3])[1])
    model[1].load_state_dict({"weight": torch.ones(16, 16), "bias": torch.ones(16)})  # type: ignore[index, union-attr, operator]
    with pytest.raises(Refused, match=r"1.bias of a model under ps.lazy was set after ps.pipeline"):
        memory.attached(table_of(model))
    model = lazy(tied)
    memory = StageMemory.of(model, 2)
    assert memory is not None
    memory.give(split_model(model, [1, 3])[1])
    model[3].bias = nn.Parameter(torch.ones(40))  # type: ignore[index, union-attr, operator]
    with pytest.raises(Refused, match=r"3.bias of a model under ps.lazy was set after ps.pipeline"):
        memory.attached(table_of(model))


def test_a_lazy_model_in_a_job_without_stages_is_refused() -> None:
    model = lazy(tied)
    with pytest.raises(Refused, match=r"parameter 0.weight is on the meta device and has no values. Give the model memory before attach"):
        check_first_values(None, model)
    check_first_values(StageMemory.of(model, 0), model)
    materialise(model, 0)
    check_first_values(None, model)


class Half(Scale):
    """Its `reset_parameters` forgets one of two."""

    def __init__(self) -> None:
        super().__init__()
        self.reset_parameters()
        self.other = nn.Parameter(torch.ones(3))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Scale, "scale gets no value from reset_parameters of Scale"),
        (Half, "other gets no value from reset_parameters of Half"),
        (lambda: nn.Sequential(Positions()), "0.table gets no value from reset_parameters of Positions"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_is_drawn(make: Any, says: str) -> None:
    with pytest.raises(ValueError) as refused:
        InitialValues(lazy(make), 0)
    assert str(refused.value).startswith(says)


class Looks(Scale):
    """Looks at its values, which the meta device does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale)
        if float(self.scale.sum()) > -1:
            return


def test_what_shows_only_with_values_is_refused_then() -> None:
    values = InitialValues(lazy(Looks), 0)
    with pytest.raises(ValueError, match="other gets no value from reset_parameters of Looks"):
        values.of("scale")


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
