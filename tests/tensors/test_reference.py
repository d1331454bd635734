"""The oracle itself: near torch's own optimizers on the mean loss, and the same whatever the block size."""

from __future__ import annotations

import pytest
import torch

from psjob.checkpoint.final import tensors_sha256, weights_sha256
from psjob.layout.blocks import Layout
from tests.reference import layout_of, reference


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.Tanh(), torch.nn.Linear(40, 4))


def batches(step: int, ranks: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = []
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(step * 100 + rank)
        made.append((torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator)))
    return made


def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("rule", "hyperparameters", "kind", "options"),
    [
        ("sgd", {"lr": 0.1, "momentum": 0.9}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        ("adam", {"lr": 0.01}, torch.optim.Adam, {"lr": 0.01}),
    ],
)
def test_reference_is_near_plain_torch(rule: str, hyperparameters: dict[str, float], kind: type, options: dict[str, float]) -> None:
    ours, plain = mlp(), mlp()
    states = reference(ours, rule, [hyperparameters], batches, loss, 200)
    optimizer = kind(plain.parameters(), **options)
    for step in range(200):
        optimizer.zero_grad()
        for batch in batches(step):
            (loss(plain, batch) / 3).backward()
        optimizer.step()
    scale = max(float(p.detach().abs().max()) for p in plain.parameters())
    worst = max(float((p - q).detach().abs().max()) for p, q in zip(ours.parameters(), plain.parameters(), strict=True))
    assert worst <= 1e-5 * scale
    layout = layout_of(ours)
    assert weights_sha256(layout, {i: s.weights for i, s in states.items()}) == tensors_sha256(ours.parameters())


def test_an_absent_rank_lowers_the_divisor() -> None:
    both, one = mlp(), mlp()
    reference(both, "sgd", [{"lr": 0.1}], lambda step: [batches(step, 1)[0], None], loss, 5)
    reference(one, "sgd", [{"lr": 0.1}], lambda step: batches(step, 1), loss, 5)
    assert tensors_sha256(both.parameters()) == tensors_sha256(one.parameters())


def test_a_layout_given_is_used() -> None:
    model = mlp()
    layout = Layout.of(layout_of(model).table, limit_bytes=512)
    states = reference(model, "sgd", [{"lr": 0.1}], batches, loss, 2, layout)
    assert len(states) == len(layout.blocks) > len(layout_of(model).blocks) / 2
