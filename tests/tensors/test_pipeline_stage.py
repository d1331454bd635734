"""One stage: versions under open graphs, recompute, structures, and what is told where weights change in place.

- Language models of the library transformers in stages: exported, with tied weights, dropout and outputs of its own classes.
- What a script without `ps.shard` trains on is seen, however its modules are called.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import psjob as ps
from psjob.api.consistency import STEPS, FirstInputs
from psjob.pipeline.cuts import split_model
from psjob.pipeline.random_draws import Draw
from psjob.pipeline.stage import ChangedInPlace, OneMemory, StageRun, arguments
from psjob.protocol.coordinator.report import JobProgress
from tests.tensors.pipeline_models import row, tokens

torch.set_num_threads(1)
DRAW = Draw(0, 0, 0)
X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def fresh(model: nn.Module, scale: float = 1.0) -> dict[str, torch.Tensor]:
    return {name: (p.detach() * scale).requires_grad_() for name, p in model.named_parameters()}


def alone(weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Gradients of the input and the weights, by plain torch."""
    x = X.clone().requires_grad_()
    found = torch.autograd.grad(torch.func.functional_call(small(), weights, (x,)).square().sum(), [x, *weights.values()])
    return found[0], dict(zip(weights, found[1:], strict=True))


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


def stage(**options: Any) -> tuple[nn.Module, StageRun]:
    model = small()
    return model, StageRun(split_model(model)[0], dict(model.named_buffers()), **options)


def test_each_micro_batch_has_the_weights_of_its_forward() -> None:
    model, run = stage(verify=True)
    for number in range(3):
        run.load(number, fresh(model, 1 + number))
        run.forward(number, arguments(X.clone().requires_grad_()), DRAW, loss)
    assert run.opened == {0: 0, 1: 1, 2: 2}
    for number in (1, 0, 2):
        back, grads = run.backward(number)
        of_input, of_weights = alone(fresh(model, 1 + number))
        assert back[0] is not None and torch.equal(back[0], of_input)
        assert all(torch.equal(grads[name], of_weights[name]) for name in of_weights)
    assert run.opened == {}


def in_place_through_data(weights: dict[str, torch.Tensor]) -> None:
    weights["2.weight"].data.mul_(2)


def in_place_through_memory(weights: dict[str, torch.Tensor]) -> None:
    weights["2.weight"].detach().numpy()[1, 2] += 1


def in_place_as_autograd_sees(weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        weights["2.weight"].mul_(2)


@pytest.mark.parametrize("change", [in_place_through_data, in_place_through_memory, in_place_as_autograd_sees])
def test_weights_changed_in_place_under_a_graph_are_caught(change: Any) -> None:
    model, run = stage(verify=True)
    weights = fresh(model)
    run.load(3, weights)
    run.forward(5, arguments(X.clone().requires_grad_()), DRAW, loss)
    change(weights)
    with pytest.raises(
        ChangedInPlace, match=r"stage 0: 2\.weight of version 3 was written into before the backward of micro-batch 5; put new"
    ):
        run.backward(5)


@pytest.mark.parametrize("name", ["2.weight", "2.bias"])
def test_changes_that_torch_counts_are_caught_without_comparing(name: str) -> None:
    """A bias too, of which no graph would tell."""
    model, run = stage()
    weights = fresh(model)
    run.load(3, weights)
    run.forward(5, arguments(X), DRAW, loss)
    with torch.no_grad():
        weights[name].mul_(2)
    with pytest.raises(ChangedInPlace, match=f"stage 0: {name} of version 3 was written into"):
        run.backward(5)


def test_a_change_through_data_would_be_wrong_in_silence() -> None:
    """Why contents are compared: torch itself tells nothing, and the input's gradient is of no version."""
    model, run = stage()
    weights = fresh(model)
    right = alone(weights)[0]
    run.load(0, weights)
    run.forward(0, arguments(X.clone().requires_grad_()), DRAW, loss)
    in_place_through_data(weights)
    back, _ = run.backward(0)
    assert back[0] is not None and not torch.allclose(back[0], right)


def test_a_pull_into_the_memory_of_an_open_version_is_caught_without_comparing() -> None:
    """As shards' lent memory, in which a new version takes the old one's place: views of one arena."""
    model, run = stage()
    arena = torch.cat([p.detach().flatten() for p in model.parameters()] + [torch.zeros(100)])

    def pulled(at: int) -> dict[str, torch.Tensor]:
        views, begin = {}, at
        for name, p in model.named_parameters():
            views[name] = arena[begin : begin + p.numel()].view_as(p).detach().requires_grad_()
            begin += p.numel()
        return views

    run.load(0, pulled(0))
    run.forward(0, arguments(X), DRAW, loss)
    run.load(0, pulled(0))  # the same version again
    run.load(1, pulled(26))  # 12 + 4 + 8 + 2 elements further
    with pytest.raises(
        ChangedInPlace, match=r"version 1 of 0\.weight lies in the memory of version 0, which the backward of micro-batch 0 needs"
    ):
        run.load(1, pulled(0))
    with pytest.raises(ChangedInPlace, match="lies in the memory of version 0"):
        run.load(1, pulled(25))
    run.backward(0)
    run.load(1, pulled(0))


def test_a_frozen_weight_may_be_the_same_memory_in_all_versions() -> None:
    model, run = stage()
    constant = model[0].weight.detach()
    for number in range(2):
        run.load(number, fresh(model) | {"0.weight": constant})
        run.forward(number, arguments(X), DRAW, loss)
    _, grads = run.backward(0)
    assert sorted(grads) == ["0.bias", "2.bias", "2.weight"]


def test_recompute_takes_the_weights_of_the_backward() -> None:
    model, run = stage(recompute=True)
    run.load(0, fresh(model))
    run.forward(0, arguments(X.clone().requires_grad_()), DRAW, loss)
    run.load(1, fresh(model, 3.0))
    back, grads = run.backward(0)
    of_input, of_weights = alone(fresh(model, 3.0))
    assert back[0] is not None and torch.equal(back[0], of_input)
    assert all(torch.equal(grads[name], of_weights[name]) for name in of_weights)


@pytest.mark.parametrize("autocast", [False, True])
def test_recompute_gives_the_bits_of_a_kept_graph_and_statistics_once(autocast: bool) -> None:
    found = []
    for recompute in (False, True):
        model = row()
        run = StageRun(split_model(model)[0], {name: b.clone() for name, b in model.named_buffers()}, recompute=recompute)
        run.load(0, dict(model.named_parameters()))
        with torch.autocast("cpu", enabled=autocast):
            for micro, (x, y) in enumerate(tokens(2)):
                run.forward(micro, arguments(x), Draw(0, 0, micro), lambda output, y=y: nn.functional.cross_entropy(output, y))
        found.append(([run.backward(micro)[1] for micro in range(2)], run.buffers))
    (kept, kept_buffers), (again, again_buffers) = found
    assert all(torch.equal(kept[micro][name], again[micro][name]) for micro in range(2) for name in kept[micro])
    assert all(torch.equal(b, again_buffers[name]) for name, b in kept_buffers.items())
    assert int(again_buffers["4.num_batches_tracked"]) == 2


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)


def test_recompute_knows_its_input_where_the_part_writes_into_it() -> None:
    model = nn.Sequential(Doubling(), nn.Linear(3, 2))
    found = []
    for recompute in (False, True):
        run = StageRun(split_model(model)[0], {}, recompute=recompute)
        run.load(0, dict(model.named_parameters()))
        run.forward(0, arguments(X.clone()), DRAW, loss)
        found.append(run.backward(0)[1]["1.weight"])
    assert torch.equal(found[0], found[1])


def test_backward_runs_without_the_autocast_of_the_forward() -> None:
    """As torch asks for it: the dtypes are those of the forward's graph."""
    seen = []

    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.register_hook(lambda _grad: seen.append(torch.is_autocast_enabled("cpu")))
            return x

    model = nn.Sequential(nn.Linear(3, 2), Asks())
    run = StageRun(split_model(model)[0], {})
    run.load(0, dict(model.named_parameters()))
    with torch.autocast("cpu"):
        run.forward(0, arguments(X), DRAW, loss)
        run.backward(0)
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False]


def test_gradients_are_those_of_torchs_helper() -> None:
    """`stage_backward` of torch.distributed.pipelining, on a part in the middle with two outputs, one of which passes through."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, pair: dict[str, Any]) -> dict[str, Any]:
            return {"h": self.linear(pair["x"]).relu(), "x": pair["x"], "ids": pair["ids"], "note": pair["note"]}

    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), Two())
    part = split_model(model, [1])[1]
    run = StageRun(part, {})
    run.load(0, dict(model.named_parameters()))
    value = {"x": X.clone().requires_grad_(), "ids": torch.arange(6), "note": "text"}
    output = run.forward(0, value, DRAW)
    assert output["note"] == "text" and not output["ids"].requires_grad and output["h"].is_leaf and output["h"].requires_grad
    grads = [torch.randn(6, 3), torch.randn(6, 3)]
    back, weights = run.backward(0, [grads[0], grads[1], None, None])

    x = X.clone().requires_grad_()
    graph = model[1]({"x": x * 1, "ids": None, "note": None})
    (of_x,) = stage_backward([graph["h"], graph["x"]], grads, [x])
    assert back[0] is not None and of_x is not None and torch.equal(back[0], of_x) and back[1:] == [None, None]
    assert model[1].linear.weight.grad is not None and torch.equal(weights["1.linear.weight"], model[1].linear.weight.grad)


def test_a_step_under_no_grad_has_gradients_all_the_same() -> None:
    model, run = stage()
    with torch.no_grad():
        run.load(0, dict(model.named_parameters()))
        run.forward(0, arguments(X.clone().requires_grad_()), DRAW, loss)
        back, grads = run.backward(0)
    of_input, of_weights = alone(fresh(model))
    assert back[0] is not None and torch.equal(back[0], of_input) and torch.equal(grads["0.weight"], of_weights["0.weight"])


def test_an_output_that_nobody_used_has_no_gradient() -> None:
    model = small()
    run = StageRun(split_model(model, [1])[0], {})
    run.load(0, dict(model.named_parameters()))
    run.forward(0, arguments(X), DRAW)
    assert run.backward(0, [None]) == ([None], {})


def test_buffers_that_a_forward_replaces_are_kept() -> None:
    class Average(nn.Module):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
            return x - self.mean

    model = nn.Sequential(Average(), nn.Linear(3, 2))
    for recompute in (False, True):
        run = StageRun(split_model(model)[0], dict(model.named_buffers()), recompute=recompute)
        run.load(0, dict(model.named_parameters()))
        for micro in range(2):
            run.forward(micro, arguments(X), DRAW, loss)
        of_both = [run.backward(micro)[1]["1.weight"] for micro in range(2)]
        torch.testing.assert_close(run.buffers["0.mean"], 0.75 * X.mean(0))
        other = Average()
        plain = nn.Linear(3, 2)
        plain.load_state_dict(model[1].state_dict())
        for micro in range(2):
            plain.zero_grad()
            loss(plain(other(X))).backward()
            assert plain.weight.grad is not None and torch.equal(of_both[micro], plain.weight.grad)
    assert torch.equal(model[0].mean, torch.zeros(3))


def test_work_out_of_order_is_refused() -> None:
    model, run = stage()
    with pytest.raises(RuntimeError, match="stage 0: forward of micro-batch 0: no weights were loaded"):
        run.forward(0, arguments(X), DRAW)
    run.load(0, fresh(model))
    run.forward(0, arguments(X), DRAW, loss)
    with pytest.raises(RuntimeError, match="forward of micro-batch 0: its backward did not come yet"):
        run.forward(0, arguments(X), DRAW, loss)
    run.backward(0)
    with pytest.raises(RuntimeError, match="backward of micro-batch 0, which is not open"):
        run.backward(0)
    with pytest.raises(KeyError, match=r"2\.bias"):
        run.load(1, {name: p for name, p in fresh(model).items() if name != "2.bias"})


def test_one_memory_gives_the_newest_weights_to_a_backward_and_nobody_else_may_do_so() -> None:
    """The gradient of the input of tanh(W0 x) W1 is W0' (1 - tanh²(W0 x)) W1' g: tanh is of old weights, W0 and W1 of new ones."""
    model = small()
    old, new = fresh(model), fresh(model, 3.0)
    x = X.clone().requires_grad_()
    memory = OneMemory(fresh(model))
    run = StageRun(split_model(model)[0], {}, in_place=True)
    run.load(0, memory.leaves)
    run.forward(0, arguments(x), DRAW, loss)
    memory.take(new)
    run.load(1, memory.leaves)
    back, grads = run.backward(0)
    hidden = torch.tanh(nn.functional.linear(X, old["0.weight"], old["0.bias"]))
    top = 2 * nn.functional.linear(hidden, old["2.weight"], old["2.bias"])
    inner = (top @ new["2.weight"]) * (1 - hidden**2)
    torch.testing.assert_close(grads["2.weight"], top.T @ hidden)
    torch.testing.assert_close(grads["0.weight"], inner.T @ X)
    torch.testing.assert_close(back[0], inner @ new["0.weight"])
    with pytest.raises(KeyError):
        memory.take({"4.weight": X})
    kept = StageRun(split_model(model)[0], {})
    kept.load(0, memory.leaves)
    kept.forward(0, arguments(x), DRAW, loss)
    memory.take(old)
    with pytest.raises(ChangedInPlace):
        kept.load(1, memory.leaves)


torch.set_num_threads(1)
IDS = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(0))


def gpt2() -> nn.Module:
    sizes = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, use_cache=False, bos_token_id=0, eos_token_id=0, **sizes))


def llama() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, use_cache=False, **sizes))


def loss_fn(output: Any, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), y.flatten())


@pytest.mark.parametrize(
    ("make", "cuts"), [(gpt2, ("transformer.h.1", "lm_head")), (llama, ("model.layers.1", "model.layers.2"))], ids=["gpt2", "llama"]
)
def test_bits_are_those_of_the_model_in_one_piece(make: Any, cuts: tuple[str, ...]) -> None:
    found = []
    for one in ((), cuts):
        torch.manual_seed(0)
        model = make().train()
        pipe = ps.pipeline(model, loss_fn, cuts=one, microbatches=2, seed=0)
        losses = [float(pipe.step({"input_ids": IDS}, IDS)) for _ in range(2)]
        found.append((losses, {name: p.grad for name, p in model.named_parameters()}))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(grad, found[1][1][name]) for name, grad in found[0][1].items())


def test_weights_that_its_constructor_sets_cannot_be_lazy() -> None:
    with ps.lazy():
        model = gpt2()
    with pytest.raises(ps.Refused, match=r"attn\.c_attn\.weight is set in Conv1D\.__init__, line"):
        ps.pipeline(model, loss_fn)


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
    assert sums_of(model, lambda row: model["other"](model["one"](row)), x) == parts, "of only the inputs"
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
