"""Rules of asynchronous training: on torch and on numpy, alone as their sequential forms, with many workers as the theory says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from psjob import rules
from psjob.rules.base import BlockState, Numbers, check_numbers, of_worker

torch.set_num_threads(1)
KINDS: dict[str, Callable[[Any], Any]] = {"torch": lambda values: torch.tensor(np.asarray(values)), "numpy": np.array}


def numbers_of(name: str, **given: float | bool) -> Numbers:
    return check_numbers(rules.named(name), given)


def gradients(count: int, length: int, seed: int = 0, dtype: Any = np.float64) -> list[Any]:
    return list(np.random.default_rng(seed).normal(size=(count, length)).astype(dtype))


def alone(name: str, numbers: Numbers, kind: str, slope: Callable[[Any], Any], start: Any, steps: int) -> Any:
    """What one worker is sent after `steps` pushes; `slope` is the gradient at what it was sent before."""
    rule = rules.named(name)
    state = rule.init(KINDS[kind](start))
    for _ in range(steps):
        rule.apply(state, KINDS[kind](slope(np.array(rule.reply(state, numbers, 0)))), numbers, lag=0, worker=0)
    return np.array(rule.reply(state, numbers, 0))


def torchs(start: Any, slope: Callable[[Any], Any], steps: int, **options: Any) -> Any:
    """The same with torch's SGD."""
    p = torch.nn.Parameter(torch.tensor(start))
    optimizer = torch.optim.SGD([p], **options)
    for _ in range(steps):
        p.grad = torch.tensor(slope(p.detach().numpy()))
        optimizer.step()
    return p.detach().numpy()


HEAVY = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
SEQUENTIAL: list[tuple[str, dict[str, float], dict[str, Any]]] = [
    ("sgd", {"lr": 0.05, "weight_decay": 0.01}, {"lr": 0.05, "weight_decay": 0.01}),
    ("heavy-ball", HEAVY, HEAVY),
    ("nag", HEAVY, {**HEAVY, "nesterov": True}),
    ("multi-momentum", HEAVY, HEAVY),
    ("dana-zero", {**HEAVY, "weight_decay": 0.0}, {**HEAVY, "weight_decay": 0.0, "nesterov": True}),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "given", "options"), SEQUENTIAL, ids=[row[0] for row in SEQUENTIAL])
def test_one_worker_alone_is_the_sequential_form(name: str, given: dict[str, float], options: dict[str, Any], kind: str) -> None:
    start = np.linspace(-2, 2, 97)
    curve = np.linspace(0.1, 3, 97)

    def slope(at: Any) -> Any:
        return curve * at + np.sin(5 * at)

    ours = alone(name, numbers_of(name, **given), kind, slope, start, 300)
    assert np.abs(ours - torchs(start, slope, 300, **options)).max() <= 1e-12


@pytest.mark.parametrize("name", ["multi-momentum", "dana-zero"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_torch_and_numpy_agree(name: str, dtype: Any) -> None:
    rule, numbers = rules.named(name), numbers_of(name, lr=0.05)
    states = {kind: rule.init(make(np.ones(40, dtype))) for kind, make in KINDS.items()}
    for turn, grad in enumerate(gradients(200, 40, dtype=dtype)):
        for kind, state in states.items():
            given = KINDS[kind](grad)
            rule.apply(state, given, numbers, ranges=[(0, 10), (20, 20)] if turn % 3 == 0 else None, lag=turn % 4, worker=turn % 4)
            assert np.array_equal(np.array(given), grad), "a rule leaves the gradient as it is"
    one, other = (np.array(rule.reply(state, numbers, 1)) for state in states.values())
    assert one.dtype == other.dtype == dtype
    assert np.abs(one - other).max() <= (1e-4 if dtype is np.float32 else 1e-12) * np.abs(one).max()
    assert states["torch"].slots.keys() == states["numpy"].slots.keys()
    assert states["torch"].slots.keys() <= {*rule.slots, *(of_worker(slot, worker) for slot in rule.per_worker for worker in range(4))}


@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_of_dana_is_the_sum_of_its_workers_whoever_leaves(kind: str) -> None:
    rule, numbers = rules.named("dana-zero"), numbers_of("dana-zero", lr=0.05)
    state = rule.init(KINDS[kind](np.zeros(20)))
    chance = np.random.default_rng(3)
    for turn, grad in enumerate(gradients(400, 20)):
        worker = int(chance.integers(5))
        rule.apply(state, KINDS[kind](grad), numbers, worker=worker)
        if turn % 50 == 49:
            rule.forget(state, worker)
            assert of_worker("v", worker) not in state.slots
        whole = sum(np.array(slot) for name, slot in state.slots.items() if name.startswith("v@"))
        assert np.abs(np.array(state.slots["sum"]) - whole).max() <= 1e-13
    for worker in range(5):
        rule.forget(state, worker)
    assert np.abs(np.array(state.slots["sum"])).max() <= 1e-13


def test_state_of_workers_survives_a_checkpoint() -> None:
    rule, numbers = rules.named("dana-zero"), numbers_of("dana-zero", lr=0.05)
    state = rule.init(torch.zeros(8))
    for worker in range(3):
        rule.apply(state, torch.ones(8), numbers, worker=worker)
    back = BlockState.of(state.weights.clone(), {name: slot.clone() for name, slot in state.slots.items()}, state.counts())
    for one in (state, back):
        rule.apply(one, torch.ones(8), numbers, worker=2)
    assert torch.equal(rule.reply(state, numbers, 0), rule.reply(back, numbers, 0))


@pytest.mark.parametrize("name", ["multi-momentum", "dana-zero"])
def test_a_mean_of_several_is_refused_where_workers_have_state(name: str) -> None:
    rule = rules.named(name)
    with pytest.raises(ValueError, match=f"rule {name} keeps state for each worker and takes the push of one, not a mean of several"):
        rule.apply(rule.init(torch.zeros(2)), torch.ones(2), rule.numbers)
