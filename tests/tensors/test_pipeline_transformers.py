"""Language models of the library transformers in stages: exported, with tied weights, dropout and outputs of its own classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import psjob as ps

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
