"""Language models of the library transformers in stages: exported, with tied weights, dropout and outputs of its own classes.

- What a script without `ps.shard` trains on is seen, however its modules are called.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import psjob as ps
from psjob.api.consistency import STEPS, FirstInputs
from psjob.protocol.coordinator.report import JobProgress

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
