"""The same training in one process of plain torch."""

from __future__ import annotations

import torch

from psjob.checkpoint.final import tensors_sha256
from psjob.rules.optimizers import describe_optimizer
from tests.e2e.workloads import mlp
from tests.e2e.workloads.running import Ran
from tests.support.reference import Wire, reference

STEPS = 200


def oracle(optimizer: str, workers: int, steps: int = STEPS, last: int | None = None, wire: Wire | None = None) -> torch.nn.Module:
    """One process: sums in rank order, one multiplication, the same kernel on the same blocks."""
    model = mlp.build()
    rule, hyperparameters = describe_optimizer(mlp.optimizer_for(optimizer, model))
    assert rule is not None
    reference(model, rule, hyperparameters, lambda step: mlp.micro_batches(steps, workers, step, last), mlp.loss_of, steps, wire=wire)
    return model


def assert_same_bits(ran: Ran, model: torch.nn.Module) -> None:
    """final.safetensors and the summary's hash are this model's parameters."""
    held = ran.weights()
    assert set(held) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(held[name], parameter.detach()), f"{name}: {(held[name] != parameter).sum()} of {parameter.numel()} differ"
    assert ran.sha == tensors_sha256(model.parameters())
