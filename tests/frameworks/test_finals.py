"""final.safetensors of models by others has what their state_dict has, no more and no less: each loads it with `strict=True`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks.runs import Run
from tests.frameworks.scripts.any_model import built
from tests.support.soaking import rotating, soak

pytestmark = pytest.mark.timeout(600)
SMALL: dict[str, Any] = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
IMAGE: dict[str, Any] = {name: size for name, size in SMALL.items() if name != "vocab_size"} | {"image_size": 32, "patch_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": SMALL,
    "GPT2LMHeadModel": {"vocab_size": 20, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "T5ForConditionalGeneration": {"vocab_size": 20, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    "LlamaForCausalLM": {**SMALL, "tie_word_embeddings": True},
    "ViTForImageClassification": IMAGE,
    "ResNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    "BartForConditionalGeneration": {
        "vocab_size": 20, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "pad_token_id": 1, "eos_token_id": 2,
    },
    "DistilBertForSequenceClassification": {"vocab_size": 20, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "ElectraForPreTraining": {**SMALL, "embedding_size": 8},
    "MobileNetV2ForImageClassification": {"depth_multiplier": 0.25, "image_size": 32},
    "timm.resnet18": {"num_classes": 4},
    "timm.vit_tiny_patch16_224": {"img_size": 32, "num_classes": 4, "depth": 2},
    "timm.efficientnet_b0": {"num_classes": 4},
}  # fmt: skip


@pytest.mark.parametrize("name", [rotating(name) if name == "BertForMaskedLM" else soak(name) for name in MODELS])
def test_the_final_weights_are_loaded_strictly(tmp_path: Path, name: str) -> None:
    if name.startswith("timm.") and importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not there; run: pip install timm")
    ran = Run(tmp_path / "run", ["any_model.py", name, json.dumps(MODELS[name])])
    assert ran.code == 0, ran.output[-3000:]
    final = ran.weights()
    model = built(name, MODELS[name])
    model.load_state_dict(final, strict=True)
    first = built(name, MODELS[name]).state_dict()
    assert any(not tensor.equal(first[key]) for key, tensor in model.state_dict().items()), "it was not trained"
    assert all(torch.isfinite(tensor).all() for tensor in final.values() if tensor.is_floating_point())
