"""Rules against torch: bit-equal with its fused kernels on the same blocks, close to its default optimizers.

- Which optimizers have a rule, and their state_dict from the shards' blocks.
- The oracle itself: near torch's own optimizers on the mean loss, and the same whatever the block size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psjob import rules
from psjob.checkpoint.final import tensors_sha256, weights_sha256
from psjob.layout import memory
from psjob.layout.blocks import Layout, TensorSpec
from psjob.layout.packing import Pack
from psjob.rules import optimizers
from psjob.rules.base import BlockState, UpdateFacts, check_hyperparameters
from psjob.rules.reduction import mean_in_rank_order
from tests.support.reference import layout_of, reference

torch.set_num_threads(1)
CASES: list[tuple[str, type[torch.optim.Optimizer], dict[str, Any]]] = [
    ("sgd", torch.optim.SGD, {"lr": 0.1}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ("adam", torch.optim.Adam, {"lr": 0.01}),
    ("adam", torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True, "betas": (0.8, 0.9), "eps": 1e-6}),
    ("adam", torch.optim.Adam, {"lr": 0.01, "maximize": True}),
    ("adamw", torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    ("adamw", torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    ("adagrad", torch.optim.Adagrad, {"lr": 0.1}),
    ("adagrad", torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.5}),
]

NADAM: list[tuple[str, type[torch.optim.Optimizer], dict[str, Any]]] = [
    ("nadam", torch.optim.NAdam, {"lr": 0.02}),
    ("nadam", torch.optim.NAdam, {"lr": 0.02, "weight_decay": 0.1, "betas": (0.99, 0.97), "eps": 1e-6, "momentum_decay": 0.1}),
    ("nadam", torch.optim.NAdam, {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
]
# torch rounds a sum of half precision in another way behind the last whole vector; weight decay with other betas is such a sum.
NADAM_TYPED = [
    (*case, dtype)
    for case in NADAM
    for dtype in (torch.float32, torch.float64, torch.bfloat16)
    if not (dtype == torch.bfloat16 and "betas" in case[2])
]


def flat(options: dict[str, Any]) -> dict[str, Any]:
    plain = {k: v for k, v in options.items() if k != "betas"}
    if "betas" in options:
        plain["beta1"], plain["beta2"] = options["betas"]
    return plain


def close(one: torch.Tensor, other: torch.Tensor, within: float = 1e-5) -> bool:
    return bool((one - other).abs().max() <= within * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "kind", "options"), CASES)
def test_rule_is_torchs_fused_kernel_and_near_the_default(name: str, kind: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(1000, generator=generator, dtype=dtype)
    fused, plain = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizers = [kind([fused], fused=True, **options), kind([plain], **options)]
    rule = rules.named(name)
    hyperparameters = check_hyperparameters(rule, flat(options))
    state = rule.init(start.clone())
    for _ in range(200):
        grad = torch.randn(1000, generator=generator, dtype=dtype)
        fused.grad, plain.grad = grad.clone(), grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        rule.apply(state, grad, hyperparameters)
    assert torch.equal(state.weights, fused.detach())
    assert close(state.weights, plain.detach())
    assert set(state.slots) <= set(rule.slots)
    assert state.steps == 200


@pytest.mark.parametrize(("name", "kind", "options", "dtype"), NADAM_TYPED)
def test_nadam_is_torchs_to_the_bit(name: str, kind: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    """For a tensor that is cut in blocks anywhere, is left out at times, and whose beta1 is changed by a scheduler."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(1003, generator=generator, dtype=dtype)
    parameters = [torch.nn.Parameter(start[:500].clone()), torch.nn.Parameter(start[500:].clone())]
    optimizer, rule = kind(parameters, **options), rules.named(name)
    states = [rule.init(start[:737].clone()), rule.init(start[737:].clone())]
    for step in range(60):
        grad = torch.randn(1003, generator=generator, dtype=dtype)
        first = step % 7 != 2
        parameters[0].grad, parameters[1].grad = grad[:500].clone() if first else None, grad[500:].clone()
        beta = optimizer.param_groups[0]["betas"][0] if step < 30 else 0.8 + step / 1000
        optimizer.param_groups[0]["betas"] = (beta, optimizer.param_groups[0]["betas"][1])
        optimizer.step()
        hyperparameters = check_hyperparameters(rule, {**flat(options), "beta1": beta})
        rule.apply(states[0], grad[:737], hyperparameters, UpdateFacts(None if first else [(500, 237)]))
        rule.apply(states[1], grad[737:], hyperparameters)
        if step == 40:
            states = [BlockState.of(one.weights, one.slots, json.loads(json.dumps(one.counts()))) for one in states]
    assert torch.equal(torch.cat([one.weights for one in states]), torch.cat([p.detach() for p in parameters]))
    for at, p in ((0, parameters[0]), (500, parameters[1])):
        _, count, product = states[0].segment_at(at)
        assert (count, product) == (float(optimizer.state[p]["step"]), float(optimizer.state[p]["mu_product"]))


@pytest.mark.parametrize("row", [[1003], [1003, -1], [1003, 1.0], [1003, 2, "1"], [1003, 2, float("nan")], [1003, 2, True]])
def test_counts_that_are_none_are_refused(row: list[Any]) -> None:
    with pytest.raises(ValueError, match="counts of a block are"):
        BlockState.of(torch.zeros(1003), {}, {"steps": 2, "segments": [row]})


@pytest.mark.parametrize(("name", "kind", "options"), CASES + NADAM)
def test_a_tensor_without_gradient_is_skipped_as_torch_skips_it(name: str, kind: Any, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(2)
    lengths = [64, 10, 128]
    spans = [(0, 64), (64, 10), (74, 128)]
    start = torch.randn(sum(lengths), generator=generator)
    parameters = [torch.nn.Parameter(part.clone()) for part in start.split(lengths)]
    optimizer = kind(parameters, **options)
    rule = rules.named(name)
    hyperparameters = check_hyperparameters(rule, flat(options))
    state = rule.init(start.clone())
    for step in range(40):
        grad = torch.randn(sum(lengths), generator=generator)
        live = [i for i in range(3) if not (i == 0 and step < 3) and not (i == 1 and step % 3 == 0) and not (i == 2 and step == 20)]
        for i, p in enumerate(parameters):
            p.grad = grad.split(lengths)[i].clone() if i in live else None
        optimizer.step()
        rule.apply(state, grad, hyperparameters, UpdateFacts(ranges=[spans[i] for i in live]))
        if step == 15:
            state = BlockState.of(state.weights, state.slots, state.counts())
    assert close(state.weights, torch.cat([p.detach() for p in parameters]))
    if name != "sgd":
        steps = [float(optimizer.state[p]["step"]) for p in parameters]
        assert [state.segment_at(offset)[1] for offset, _ in spans] == steps


@pytest.mark.parametrize("momentum", [[0.0, 0.9], [0.9, 0.0, 0.9], [0.0]])
def test_momentum_switched_on_and_off(momentum: list[float]) -> None:
    p = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=momentum[0], dampening=0.5)
    rule = rules.named("sgd")
    state = rule.init(torch.ones(8))
    for turn in range(12):
        value = momentum[turn * len(momentum) // 12]
        optimizer.param_groups[0]["momentum"] = value
        p.grad = torch.full((8,), float(turn))
        optimizer.step()
        rule.apply(state, p.grad, check_hyperparameters(rule, {"lr": 0.1, "momentum": value, "dampening": 0.5}))
    assert close(state.weights, p.detach())


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=3), max_size=8))
def test_counts_are_kept_per_element(updates: list[list[tuple[int, int]]]) -> None:
    rule = rules.named("adam")
    state = rule.init(torch.zeros(50))
    expected = torch.zeros(50, dtype=torch.int64)
    for draws in updates:
        ranges, at = [], 0
        for gap, length in draws:
            ranges.append((at + gap, length))
            at += gap + length
        rule.apply(state, torch.ones(50), rule.hyperparameters, UpdateFacts(ranges=ranges))
        for offset, length in ranges:
            expected[offset : offset + length] += 1
        state = BlockState.of(state.weights, state.slots, state.counts())
        assert [state.segment_at(i)[1] for i in range(50)] == expected.tolist()
        assert bool(((state.weights != 0) == (expected > 0)).all())
        assert all(one[1] != two[1] for one, two in zip(state.segments, state.segments[1:], strict=False))


def test_nan_and_inf_pass_through() -> None:
    rule = rules.named("sgd")
    state = rule.init(torch.zeros(3))
    rule.apply(state, torch.tensor([float("nan"), float("inf"), 1.0]), check_hyperparameters(rule, {"lr": 1.0}))
    assert torch.isnan(state.weights[0]) and torch.isinf(state.weights[1]) and state.weights[2] == -1


def test_a_copy_shares_nothing() -> None:
    rule = rules.named("adam")
    state = rule.init(torch.zeros(100))
    rule.apply(state, torch.ones(100), rule.hyperparameters)
    copy = state.copy()
    before = copy.weights.clone()
    rule.apply(state, torch.ones(100), rule.hyperparameters, UpdateFacts(ranges=[(0, 10)]))
    assert torch.equal(copy.weights, before) and copy.steps == 1 and copy.segments == [(100, 1)]


def test_reduce_leaves_the_weights_alone() -> None:
    rule = rules.named("reduce")
    state = rule.init(torch.ones(4))
    rule.apply(state, torch.ones(4), {})
    assert state.weights.tolist() == [1, 1, 1, 1] and state.steps == 1 and not state.slots


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_the_mean_is_summed_in_rank_order_and_multiplied_once(count: int) -> None:
    grads = [torch.randn(1003, generator=torch.Generator().manual_seed(i)) for i in range(count)]
    kept = [g.clone() for g in grads]
    expected = grads[0].clone()
    for grad in grads[1:]:
        expected.add_(grad)
    if count > 1:
        expected.mul_(1.0 / count)
    out = torch.empty(1003)
    mean_in_rank_order(grads, out)
    assert torch.equal(out, expected)
    assert all(torch.equal(one, other) for one, other in zip(grads, kept, strict=True))


def test_refusals_say_what_there_is() -> None:
    with pytest.raises(ValueError, match="no rule 'lion'; the rules are sgd, adam, adamw, nadam, adagrad, reduce, "):
        rules.named("lion")
    with pytest.raises(ValueError, match="rule adam updates floating point weights"):
        rules.named("adam").init(torch.zeros(2, dtype=torch.int64))
    sgd = rules.named("sgd")
    for hyperparameters, words in [
        ({"learning_rate": 1.0}, "no hyperparameter 'learning_rate'; it has lr"),
        ({"lr": float("nan")}, "lr is a finite number, got nan"),
        ({"lr": "1"}, "lr is a finite number, got '1'"),
        ({"nesterov": 1}, "nesterov is true or false, got 1"),
        ({"lr": True}, "lr is a finite number, got True"),
    ]:
        with pytest.raises(ValueError, match=words):
            check_hyperparameters(sgd, hyperparameters)
    for rule, hyperparameters, words in [
        ("adam-async", {"workers": 0.5}, "workers is 1 or more, got 0.5"),
        ("gap-aware", {"average": 1.0}, "average is 0 or more and below 1, got 1"),
        ("dc-asgd", {"decay": -3.0}, "decay is 0 or more and below 1, got -3"),
        ("adam", {"beta2": 1.0}, "beta2 is 0 or more and below 1, got 1"),
        ("ftrl", {"beta": 0.0}, "beta is above 0, since it divides, got 0"),
        ("ftrl", {"lr": 0.0}, "lr is above 0, since it divides, got 0"),
        ("ftrl", {"l1": -1.0}, "l1 is 0 or more, got -1"),
        ("delayed-nesterov", {"every": 1.5}, "every is a whole number of 1 or more, got 1.5"),
        ("delayed-nesterov", {"every": 0.0}, "every is a whole number of 1 or more, got 0"),
        ("delayed-nesterov", {"every": 2.0, "activation": 0.6}, "activation is at most 1 / every, with every 2 not 0.6"),
    ]:
        with pytest.raises(ValueError, match=f"rule {rule}: {words}"):
            check_hyperparameters(rules.named(rule), hyperparameters)
    for odd in ("", [], None):
        with pytest.raises(ValueError, match="hyperparameters of rule sgd are a map, got"):
            check_hyperparameters(sgd, odd)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="segments of a block have 3 elements, its weights 4"):
        BlockState.of(torch.zeros(4), {}, {"steps": 1, "segments": [[3, 1]]})
    with pytest.raises(ValueError, match="state 'sum' has shape"):
        BlockState.of(torch.zeros(4), {"sum": torch.zeros(5)}, {"steps": 1, "segments": [[4, 1]]})
    with pytest.raises(ValueError, match="whole numbers"):
        BlockState.of(torch.zeros(4), {}, {"steps": -1, "segments": [[4, 1]]})
    with pytest.raises(ValueError, match="at least one push"):
        mean_in_rank_order([], torch.zeros(1))


def test_every_rule_has_a_page() -> None:
    pages = {page.stem for page in (Path(__file__).resolve().parents[2] / "docs" / "rules").glob("*.md")}
    assert pages == {*rules.RULES, "index", "reductions"}


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Linear(50, 3))


class Mine(torch.optim.SGD):
    pass


@pytest.mark.parametrize(("kind", "options", "name", "some"), [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, "sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.1, "betas": (0.5, 0.6)}, "adam", {"beta1": 0.5, "beta2": 0.6}),
    (torch.optim.Adam, {"lr": torch.tensor(0.25)}, "adam", {"lr": 0.25}),
    (torch.optim.Adam, {"decoupled_weight_decay": True}, "adamw", {"lr": 0.001}),
    (torch.optim.AdamW, {"amsgrad": True, "fused": True}, "adamw", {"weight_decay": 0.01, "amsgrad": True}),
    (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 2}, "adagrad",
        {"lr_decay": 0.1, "initial_accumulator_value": 2.0}),
    (torch.optim.NAdam, {"betas": (0.5, 0.6), "momentum_decay": 0.1}, "nadam", {"beta1": 0.5, "beta2": 0.6, "momentum_decay": 0.1}),
    (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}, "nadam",
        {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (torch.optim.RMSprop, {}, None, {}),
    (Mine, {"lr": 0.1}, None, {}),
])  # fmt: skip
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
    assert optimizers.current_hyperparameters(optimizer)[0]["lr"] == 0.5


def test_complex_parameters_have_no_rule() -> None:
    assert optimizers.describe_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))], lr=0.1)) == (None, [])


def test_numbers_of_a_taken_over_optimizer_and_bad_ones() -> None:
    optimizer = torch.optim.AdamW(model().parameters())
    optimizer.__class__ = type("AdamW", (torch.optim.AdamW,), {})
    assert optimizers.current_hyperparameters(optimizer)[0]["beta1"] == 0.9
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr of parameter group 0 is nan"):
        optimizers.current_hyperparameters(optimizer)
    with pytest.raises(ValueError, match="RMSprop has no rule"):
        optimizers.current_hyperparameters(torch.optim.RMSprop(model().parameters()))


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
