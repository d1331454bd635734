"""Models cut into parts, with and without export, and batches cut into micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint

from psjob.pipeline.cuts import needs_example, split_model
from psjob.pipeline.random_draws import Calls, Draw
from psjob.pipeline.stage import arguments, cut
from tests.tensors.pipeline_models import NET_CUTS, ROW_CUTS, Net, net_loss, row, tokens

torch.set_num_threads(1)


def run(model: nn.Module, parts: Any, value: Any, draw: Draw = Draw(0, 0, 0)) -> tuple[Any, dict[str, torch.Tensor]]:
    parameters, buffers = dict(model.named_parameters()), {name: b.clone() for name, b in model.named_buffers()}
    for part in parts:
        value = part.run(parameters, buffers, value, draw, Calls())
    return value, buffers


@pytest.mark.parametrize("stages", [2, 4])
def test_parts_of_a_row_have_its_names_and_each_weight_once_but_the_tied_one(stages: int) -> None:
    model = row()
    parts = split_model(model, ROW_CUTS[stages])
    assert len(parts) == stages and not needs_example(model, ROW_CUTS[stages])
    names = [name for part in parts for name in part.parameters]
    assert sorted(set(names)) == sorted(name for name, _ in model.named_parameters())
    assert [name for name in set(names) if names.count(name) > 1] == ["0.weight"]
    assert "0.weight" in parts[0].parameters and "0.weight" in parts[-1].parameters
    assert [name for part in parts for name in part.buffers] == [name for name, _ in model.named_buffers()]


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_parts_of_a_row_compute_what_it_does(stages: int) -> None:
    model = row()
    model[2].p = model[6].p = 0.0  # random bits are drawn otherwise
    (x, _), other = tokens(1)[0], row()
    other[2].p = other[6].p = 0.0
    output, buffers = run(model, split_model(model, ROW_CUTS[stages]), arguments(x))
    assert torch.equal(output, other(x))
    assert all(torch.equal(buffers[name], b) for name, b in other.named_buffers())
    assert not torch.equal(buffers["4.running_mean"], model[4].running_mean)


def test_a_wrapper_that_only_calls_its_row_is_cut_without_export() -> None:
    class Shell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)  # type: ignore[no-any-return]

    class More(Shell):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x.flatten(1))  # type: ignore[no-any-return]

    model = Shell()
    assert [part.parameters for part in split_model(model, ["layers.2"])] == [
        ("layers.0.weight", "layers.0.bias"),
        ("layers.2.weight", "layers.2.bias"),
    ]
    assert [part.parameters for part in split_model(model, [2])] == [part.parameters for part in split_model(model, ["layers.2"])]
    x = torch.randn(5, 3)
    assert torch.equal(run(model, split_model(model, [1, 2]), arguments(x))[0], model(x))
    assert needs_example(More(), ["layers.2"])
    with pytest.raises(ValueError, match=r"More is not an nn\.Sequential: cutting it needs an example"):
        split_model(More(), ["layers.2"])


def test_a_forward_of_ones_own_is_not_passed_over() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.forward = lambda x: x * 2  # type: ignore[method-assign]
    assert needs_example(model, ["1"])
    assert torch.equal(run(model, split_model(model), arguments(torch.ones(3, 2)))[0], torch.full((3, 2), 2.0))


def test_cuts_by_torchs_split_points() -> None:
    model = row()
    by_end = split_model(model, {"3": SplitPoint.END, "7": SplitPoint.BEGINNING})
    assert [part.parameters for part in by_end] == [part.parameters for part in split_model(model, [4, 7])]
    net, example = Net(), (arguments(tokens(1)[0][0]))
    ends = split_model(net, {"layers.0": SplitPoint.END}, example)
    assert [part.parameters for part in ends] == [part.parameters for part in split_model(net, ["layers.1"], example)]


@pytest.fixture(scope="module")
def nets() -> dict[int, tuple[Net, Any]]:
    """By number of stages: a model and its parts. Export takes a second each."""
    given = cut(INPUTS, 2)[0].value
    return {stages: ((model := Net()), split_model(model, NET_CUTS[stages], given)) for stages in (1, 2, 4)}


INPUTS = ((tokens(1)[0][0],), {"mask": torch.rand(16, 8, generator=torch.Generator().manual_seed(3)), "scale": 1.5})


def test_an_exported_model_keeps_names_structure_and_bits(nets: dict[int, tuple[Net, Any]]) -> None:
    """Bits of Dropout too: without cuts the model runs as it is, and with them as a graph."""
    found = {}
    for stages, (model, parts) in nets.items():
        output, buffers = run(model, parts, cut(INPUTS, 2)[1].value, Draw(5, 6, 7))
        loss = net_loss(output, tokens(1)[0][1][8:])
        found[stages] = (output, buffers, torch.autograd.grad(loss, list(model.parameters())))
        assert sorted({n for part in parts for n in part.parameters}) == sorted(n for n, _ in model.named_parameters())
        assert sorted(n for part in parts for n in part.buffers) == sorted(n for n, _ in model.named_buffers())
        assert list(output) == ["scores", "sizes"] and output["sizes"][1] == 1.5
        assert int(model.layers[0].norm.num_batches_tracked) == 0
    for stages in (2, 4):
        output, buffers, grads = found[stages]
        assert torch.equal(output["scores"], found[1][0]["scores"])
        assert all(torch.equal(buffers[name], b) for name, b in found[1][1].items())
        assert all(torch.equal(one, other) for one, other in zip(grads, found[1][2], strict=True))
    assert [("embedding.weight" in part.parameters) for part in nets[4][1]] == [True, False, False, True]


def test_an_exported_model_takes_other_shapes_arguments_and_modes(nets: dict[int, tuple[Net, Any]]) -> None:
    model, parts = nets[2]
    for rows, length in ((3, 5), (4, 9)):
        ids = torch.randint(12, (rows, length))
        output, _ = run(model, parts, arguments(ids))
        plain, _ = run(nets[1][0], nets[1][1], arguments(ids))
        assert torch.equal(output["scores"], plain["scores"])
    model.eval()
    nets[1][0].eval()
    try:
        ids = tokens(1)[0][0]
        assert torch.equal(run(model, parts, arguments(ids))[0]["scores"], nets[1][0](ids)["scores"])
    finally:
        model.train()
        nets[1][0].train()


def test_each_draw_of_an_exported_model_has_bits_of_its_own() -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            ones = torch.ones_like(self.first(x))
            masks = [nn.functional.dropout(ones, 0.5), nn.functional.dropout(ones, 0.5), self.drop(ones), self.drop(ones)]
            return [*masks, self.last(x)]

    model, given = Drawing(), arguments(torch.ones(16, 8))
    masks = run(model, split_model(model, ["last"], given), given)[0][:4]
    assert all(not torch.equal(masks[i], masks[j]) for i in range(4) for j in range(i))
    again = run(model, split_model(model, {"first": SplitPoint.END}, given), given)[0][:4]
    assert all(torch.equal(one, other) for one, other in zip(masks, again, strict=True))


def test_stages_hold_no_weights_of_their_own(nets: dict[int, tuple[Net, Any]]) -> None:
    for part in nets[4][1]:
        for graph in part._graphs.known.values():
            held = [*graph.stages[part.index].module.parameters(), *graph.stages[part.index].module.buffers()]
            assert held == [] or all(tensor.is_meta for tensor in held)


@pytest.mark.parametrize(
    ("cuts", "says"),
    [
        (["30"], "cut '30' is no module of Sequential; near are 3, 0"),
        (["layers.1"], "cut 'layers.1' is no module of Sequential; near are"),
        ([0], "cut 0: must be 1 to 10, the model's nn.Sequential has 11 children"),
        ([11], "cut 11: must be 1 to 10"),
        (["0"], "cut '0' leaves a part without modules; leave it out"),
        (["5", "3"], "cut '3' comes before the one given before it; give cuts in the order in which the model runs them"),
        ([3, "3"], "cut '3' was given twice; leave one out"),
        ("5", r"cuts is the text '5', must be a list of names, such as ['5']"),
        ([2.5], "cut 2.5 is a float, must be a module's name or the number of a child of an nn.Sequential"),
        ({"10": SplitPoint.END}, "cut '10' leaves a part without modules; leave it out"),
        ({"5": "begin"}, "cut '5' is 'begin', must be SplitPoint.BEGINNING or SplitPoint.END"),
    ],
)
def test_cuts_that_cannot_be_are_refused(cuts: Any, says: str) -> None:
    with pytest.raises(ValueError) as refused:
        split_model(row(), cuts)
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(
    ("cuts", "says"),
    [
        (["layers.2", "layers.1"], "cuts are in the order layers.2, layers.1, and the model runs layers.1, layers.2"),
        (["drop"], "cut 'drop' is at a module that runs 2 times in a forward; cut at one that runs once"),
        (["embedding"], "cuts embedding leave a part without operations"),
        (["layers"], "cut 'layers' is at a module that runs 0 times in a forward"),
        ([1], "cut 1 is a number, and Net is not an nn.Sequential; give the name of a module"),
    ],
)
def test_cuts_that_an_exported_model_cannot_have_are_refused(cuts: Any, says: str) -> None:
    with pytest.raises(ValueError) as refused:
        split_model(Net(), cuts, arguments(tokens(1)[0][0]))
    assert str(refused.value).startswith(says)


def test_what_cannot_be_exported_is_refused_and_left_as_it_was() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            return self.b(x) if x.sum() > 0 else x  # type: ignore[no-any-return]

    model = Branching()
    with pytest.raises(ValueError, match=r"^Branching cannot be cut: torch\.export did not trace it \(.+\); make it an nn\.Sequential"):
        split_model(model, ["b"], arguments(torch.ones(2, 2)))
    assert not model.b._forward_pre_hooks and model.b.forward.__func__ is nn.Linear.forward  # type: ignore[attr-defined]


class Modes(nn.Module):
    """Names of buffers, parameters and inputs that are operators' too; parts under no_grad and autocast; nested inputs."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.drop = nn.Linear(3, 3), nn.Linear(3, 2), nn.Dropout(0.5)
        self.add, self.pos = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor, pos: dict[str, Any]) -> Any:
        mean = x.mean(0)
        with torch.no_grad():
            self.mean.add_(self.first(x).mean(0))
            with torch.enable_grad():
                again = self.first(x)
            noise = self.drop(torch.ones_like(x))
        x = self.first(x - self.mean) + self.add + pos["a"][0] + again * noise
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = self.first(x)
        x = x + self.pos * mean + low
        return {"out": self.last(x) + self.drop(x).mean(), "low": [low]}


def test_names_modes_and_nested_inputs_of_an_exported_model() -> None:
    given = arguments((torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), {"a": (torch.ones(3),)}))
    found = []
    for cuts in ((), ("last",)):
        model = Modes()
        output, buffers = run(model, split_model(model, cuts, given), given, Draw(1, 2, 3))
        assert output["low"][0].dtype == torch.bfloat16 and not buffers["mean"].requires_grad
        loss = output["out"].sum() + output["low"][0].float().sum()
        found.append((output["out"], buffers["mean"], torch.autograd.grad(loss, list(model.parameters()))))
    for output, mean, grads in found[1:]:
        assert torch.equal(output, found[0][0]) and torch.equal(mean, found[0][1])
        assert all(torch.equal(one, other) for one, other in zip(grads, found[0][2], strict=True))


@pytest.mark.parametrize("replaces", [False, True])
def test_buffers_that_an_exported_forward_replaces_are_refused(replaces: bool) -> None:
    class Average(nn.Module):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            new = 0.5 * self.mean + 0.5 * x.mean(0)
            if replaces:
                self.mean = new
            else:
                self.mean.copy_(new)
            return self.last(self.first(x - new))  # type: ignore[no-any-return]

    model, x = Average(), torch.randn(4, 3)
    if replaces:
        with pytest.raises(
            ValueError, match=r"^the forward of Average puts another tensor in place of its buffer mean, which a cut would lose;"
        ):
            split_model(model, ["last"], arguments(x))
        return
    _, buffers = run(model, split_model(model, ["last"], arguments(x)), arguments(x))
    torch.testing.assert_close(buffers["mean"], 0.5 * x.mean(0))
    assert torch.equal(model.mean, torch.zeros(3))


def test_hooks_of_what_is_cut_are_not_left_out_in_silence() -> None:
    model = row()
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"^Sequential has hooks and would be cut, so that they would not run; put them on its children$"):
        split_model(model, [3])
    called = []
    model.register_forward_hook(lambda *_: called.append("whole"))
    model[9].register_forward_hook(lambda *_: called.append("inside"))
    run(model, split_model(model), arguments(tokens(1)[0][0]))
    assert called == ["inside", "whole"]
    other = row()
    other[9].register_forward_hook(lambda *_: called.append("9"))
    run(other, split_model(other, [3]), arguments(tokens(1)[0][0]))
    assert called[2:] == ["9"]
    with pytest.raises(ValueError, match=r"^9 has hooks and would be cut"):
        split_model(other, ["9.1"])


def test_one_module_in_several_places_runs_in_each() -> None:
    act = nn.Tanh()
    model = nn.Sequential(nn.Linear(2, 2), act, nn.Linear(2, 2), act, nn.Linear(2, 2), act)
    x = torch.randn(3, 2)
    for cuts in ((), (3,), (1, 2, 5), ("4",)):
        assert torch.equal(run(model, split_model(model, cuts), arguments(x))[0], model(x))


def test_micro_batches_of_nested_structures() -> None:
    batch = ((torch.arange(10), {"mask": torch.arange(20).view(10, 2)}), {"scale": 3, "whole": torch.tensor(7)})
    micros = cut(batch, 4)
    assert [len(micro.value[0][0]) for micro in micros] == [3, 3, 2, 2]
    assert [micro.weight for micro in micros] == [0.3, 0.3, 0.2, 0.2]
    assert torch.equal(torch.cat([micro.value[0][1]["mask"] for micro in micros]), batch[0][1]["mask"])
    assert all(micro.value[1] == {"scale": 3, "whole": torch.tensor(7)} for micro in micros)
    assert len(cut(torch.zeros(3, 1), 8)) == 3


def test_the_weighted_sum_of_means_is_the_mean_of_the_batch() -> None:
    x, y = torch.randn(11, 3, dtype=torch.float64), torch.randint(3, (11,))
    parts = [nn.functional.cross_entropy(*micro.value) * micro.weight for micro in cut((x, y), 4)]
    assert float(sum(parts)) == pytest.approx(float(nn.functional.cross_entropy(x, y)), rel=1e-12)


@pytest.mark.parametrize(
    ("batch", "count", "says"),
    [
        (torch.zeros(4), 0, "microbatches is 0, must be 1 or more"),
        ((torch.zeros(4), torch.zeros(3)), 2, "the tensors of the batch have 3, 4 samples in dimension 0; all must have the same number"),
        (torch.zeros(0, 3), 2, "the batch has 0 samples; leave empty batches out"),
        ({"a": 1}, 2, "the batch (dict) holds no tensor with a dimension"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(batch: Any, count: int, says: str) -> None:
    with pytest.raises(ValueError) as refused:
        cut(batch, count)
    assert str(refused.value).startswith(says)
