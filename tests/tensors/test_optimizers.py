"""Which optimizers have a rule, and their state_dict from the shards' blocks.

- The oracle itself: near torch's own optimizers on the mean loss, and the same whatever the block size.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from psjob import rules
from psjob.checkpoint.final import tensors_sha256, weights_sha256
from psjob.layout import memory
from psjob.layout.blocks import Layout, TensorSpec
from psjob.layout.packing import Pack
from psjob.rules import optimizers
from psjob.rules.base import BlockState, check_hyperparameters
from tests.support.reference import layout_of, reference


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Linear(50, 3))


class Mine(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("kind", "options", "name", "some"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, "sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {"lr": 0.1, "betas": (0.5, 0.6)}, "adam", {"beta1": 0.5, "beta2": 0.6}),
        (torch.optim.Adam, {"lr": torch.tensor(0.25)}, "adam", {"lr": 0.25}),
        (torch.optim.Adam, {"decoupled_weight_decay": True}, "adamw", {"lr": 0.001}),
        (torch.optim.AdamW, {"amsgrad": True, "fused": True}, "adamw", {"weight_decay": 0.01, "amsgrad": True}),
        (
            torch.optim.Adagrad,
            {"lr_decay": 0.1, "initial_accumulator_value": 2},
            "adagrad",
            {"lr_decay": 0.1, "initial_accumulator_value": 2.0},
        ),
        (torch.optim.NAdam, {"betas": (0.5, 0.6), "momentum_decay": 0.1}, "nadam", {"beta1": 0.5, "beta2": 0.6, "momentum_decay": 0.1}),
        (
            torch.optim.NAdam,
            {"decoupled_weight_decay": True, "weight_decay": 0.1},
            "nadam",
            {"decoupled_weight_decay": True, "weight_decay": 0.1},
        ),
        (torch.optim.RMSprop, {}, None, {}),
        (Mine, {"lr": 0.1}, None, {}),
    ],
)
def test_describe(kind: Any, options: dict[str, Any], name: str | None, some: dict[str, Any]) -> None:
    optimizer = kind(model().parameters(), **options)
    found, hyperparameters = optimizers.describe_optimizer(optimizer)
    assert found == name
    if name is None:
        return
    assert json.loads(json.dumps(hyperparameters)) == hyperparameters
    assert hyperparameters[0].items() >= some.items()
    assert check_hyperparameters(rules.named(name), hyperparameters[0]) == hyperparameters[0]
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizers.hyperparameters(optimizer)[0]["lr"] == 0.5


def test_complex_parameters_have_no_rule() -> None:
    assert optimizers.describe_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))], lr=0.1)) == (None, [])


def test_numbers_of_a_taken_over_optimizer_and_bad_ones() -> None:
    optimizer = torch.optim.AdamW(model().parameters())
    optimizer.__class__ = type("AdamW", (torch.optim.AdamW,), {})
    assert optimizers.hyperparameters(optimizer)[0]["beta1"] == 0.9
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr of parameter group 0 is nan"):
        optimizers.hyperparameters(optimizer)
    with pytest.raises(ValueError, match="RMSprop has no rule"):
        optimizers.hyperparameters(torch.optim.RMSprop(model().parameters()))


def body(state: BlockState) -> bytes:
    head = json.dumps({"slots": {n: t.numel() * t.element_size() for n, t in state.slots.items()}, **state.counts()}).encode()
    return len(head).to_bytes(4, "little") + head + b"".join(bytes(memory.view(t)) for t in state.slots.values())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.NAdam, {"lr": 0.1}),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}),
    ],
)
def test_state_dict_from_the_shards_goes_on_in_plain_torch(kind: Any, options: dict[str, Any]) -> None:
    ours, theirs = model(), model()
    groups = [[{"params": list(m[0].parameters())}, {"params": list(m[1].parameters()), "lr": 0.02}] for m in (ours, theirs)]
    optimizer, plain = kind(groups[0], **options), kind(groups[1], **options)
    name, hyperparameters = optimizers.describe_optimizer(optimizer)
    assert name is not None
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    table = [TensorSpec(f"p{i}", tuple(p.shape), "float32", 0 if i < 2 else 1) for i, p in enumerate(parameters)]
    layout, rule = Layout.of(table), rules.named(name)
    states = {b.index: rule.init(torch.empty(b.length)) for b in layout.blocks}
    for block in layout.blocks:
        Pack(block, states[block.index].weights, layout.table).gather(parameters)
    for step in range(10):
        grads: list[torch.Tensor | None] = [torch.randn(p.shape, generator=torch.Generator().manual_seed(step)) for p in parameters]
        for p, grad in zip((p for g in plain.param_groups for p in g["params"]), grads, strict=True):
            p.grad = None if grad is None else grad.clone()
        plain.step()
        for block in layout.blocks:
            flat = torch.empty(block.length)
            Pack(block, flat, layout.table).gather(grads)
            rule.apply(states[block.index], flat, hyperparameters[block.group])
    raw = {index: body(state) for index, state in states.items()}
    made = optimizers.assemble_state(optimizer.state_dict(), name, layout, raw)
    expected = plain.state_dict()["state"]
    assert set(made["state"]) == set(expected) or not options.get("momentum")
    for row, entry in made["state"].items():
        assert {k: v for k, v in expected[row].items() if v is not None}.keys() == entry.keys()
        for key, value in entry.items():
            assert torch.allclose(value, expected[row][key], atol=1e-5)
    fresh = kind([{"params": list(m.parameters())} for m in theirs], **options)
    fresh.load_state_dict(made)


def test_a_body_that_does_not_fit_is_refused() -> None:
    layout = Layout.of([TensorSpec("a", (10,), "float32", 0)])
    rule = rules.named("adam")
    state = rule.init(torch.zeros(10))
    rule.apply(state, torch.ones(10), rule.hyperparameters)
    good = body(state)
    for bad in (b"", good[:-4], good[:30], b"\xff" * 40, (2).to_bytes(4, "little") + b"{}"):
        with pytest.raises(ValueError, match="block 0"):
            optimizers.assemble_state({"state": {}, "param_groups": []}, "adam", layout, {0: bad})
    with pytest.raises(ValueError, match=r"of block 0 has 40 bytes, expected 40 of 36 left$"):
        optimizers.assemble_state({"state": {}, "param_groups": []}, "adam", layout, {0: good[:-4]})


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
