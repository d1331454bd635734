"""Rules of asynchronous training: on torch and on numpy, and one worker alone, which is their sequential form.

How large a step may be before late gradients make it diverge: the rules on a quadratic, against the roots of their recurrences.

- Figures that are known from papers and theory come out of the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from psjob import rules
from psjob.modes import Async, Backup, Bounded, Softsync, Sync
from psjob.rules.base import BlockState, Hyperparameters, UpdateFacts, check_hyperparameters, of_worker
from psjob.rules.stale import stale_share
from psjob.simulate.engine import Stall, WorkerSpeeds, simulate
from psjob.simulate.training import Quadratic, SimulatedTraining
from tests.support.soaking import rotating

torch.set_num_threads(1)
Slope = Callable[[Any], Any]
KINDS: dict[str, Callable[[Any], Any]] = {"torch": lambda values: torch.tensor(np.asarray(values)), "numpy": np.array}
ON_TORCH = {"adam", "adamw", "nadam", "adagrad", "adam-async"}
"""These are torch's own kernels."""


def hyperparameters_of(name: str, **given: float | bool) -> Hyperparameters:
    return check_hyperparameters(rules.named(name), given)


def plain(array: Any) -> Any:
    """As numpy has it."""
    return array.numpy() if isinstance(array, torch.Tensor) else array


def gradients(count: int, length: int, seed: int = 0, dtype: Any = np.float64) -> list[Any]:
    return list(np.random.default_rng(seed).normal(size=(count, length)).astype(dtype))


class Job:
    """Workers that each have what they were last sent, and one block."""

    def __init__(self, name: str, hyperparameters: Hyperparameters, start: Any, workers: int = 1) -> None:
        self.rule, self.hyperparameters = rules.named(name), hyperparameters
        self.state = self.rule.init(start)
        self.halves = [BlockState(start) for _ in range(workers)]
        for worker in range(workers):
            self.halves[worker].weights = self._reply(worker)

    def _reply(self, worker: int) -> Any:
        sent = self.rule.reply(self.state, self.hyperparameters, worker)
        return sent if sent is not self.state.weights else sent + 0

    def sent(self, worker: int) -> Any:
        return self.halves[worker].weights

    def push(self, worker: int, grad: Any, staleness: int = 0) -> None:
        if isinstance(self.rule, rules.DanaSlim):
            grad = self.rule.outgoing(self.halves[worker], grad, self.hyperparameters)
        self.rule.apply(self.state, grad, self.hyperparameters, UpdateFacts(staleness=staleness, worker=worker))
        self.halves[worker].weights = self._reply(worker)


def torchs(kind: type[torch.optim.Optimizer], **options: Any) -> Callable[[Any, Slope, int], Any]:
    """Steps of a torch optimizer."""

    def run(start: Any, slope: Slope, steps: int) -> Any:
        p = torch.nn.Parameter(torch.tensor(start))
        optimizer = kind([p], **options)
        for _ in range(steps):
            p.grad = torch.tensor(slope(p.detach().numpy()))
            optimizer.step()
        return p.detach().numpy()

    return run


def dana_dc(start: Any, slope: Slope, steps: int) -> Any:
    """Nesterov's momentum whose gradient, taken ahead, is corrected for having been taken there."""
    weights, v = start.copy(), np.zeros_like(start)
    for _ in range(steps):
        g = slope(weights - 0.05 * 0.9 * v)
        v = 0.9 * v + g + 0.1 * g * g * (0.05 * 0.9 * v)
        weights = weights - 0.05 * v
    return weights - 0.05 * 0.9 * v


def gap_aware_dana(start: Any, slope: Slope, steps: int) -> Any:
    """The same, divided by how far ahead it was taken, in usual steps."""
    weights, v, mean = start.copy(), np.zeros_like(start), np.zeros_like(start)
    for t in range(steps):
        g = slope(weights - 0.05 * 0.9 * v) + 0.01 * weights
        if t:
            g = g / (1 + np.abs(0.05 * 0.9 * v) / (0.05 * (np.sqrt(mean / (1 - 0.999**t)) + 1e-8)))
        v = 0.9 * v + g
        weights = weights - 0.05 * v
        mean = 0.999 * mean + 0.001 * v * v
    return weights - 0.05 * 0.9 * v


def adagrad(start: Any, slope: Slope, steps: int) -> Any:
    """By coordinate, with lr / (beta + sqrt(sum of squares))."""
    weights, total = start.copy(), np.zeros_like(start)
    for _ in range(steps):
        g = slope(weights)
        total += g * g
        weights = weights - 0.05 / (1.0 + np.sqrt(total)) * g
    return weights


SGD, HEAVY = torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
AHEAD = {"lr": 0.05, "momentum": 0.9}
SEQUENTIAL: dict[str, tuple[dict[str, float], Callable[[Any, Slope, int], Any]]] = {
    "sgd": ({"lr": 0.05, "weight_decay": 0.01}, torchs(SGD, lr=0.05, weight_decay=0.01)),
    "plain": ({"lr": 0.05, "weight_decay": 0.01}, torchs(SGD, lr=0.05, weight_decay=0.01)),
    "heavy-ball": (HEAVY, torchs(SGD, **HEAVY)),
    "nag": (HEAVY, torchs(SGD, nesterov=True, **HEAVY)),
    "multi-momentum": (AHEAD, torchs(SGD, nesterov=True, **AHEAD)),
    "dana-zero": (AHEAD, torchs(SGD, nesterov=True, **AHEAD)),
    "dana-slim": (HEAVY, torchs(SGD, nesterov=True, **HEAVY)),
    "dana-dc": ({**AHEAD, "lam": 0.1}, dana_dc),
    "dc-asgd": (HEAVY, torchs(SGD, **HEAVY)),
    "gap-aware": (HEAVY, torchs(SGD, nesterov=True, **HEAVY)),
    "gap-aware-dana": (HEAVY, gap_aware_dana),
    "lr-over-lag": (HEAVY, torchs(SGD, **HEAVY)),
    "adam": ({"lr": 0.01}, torchs(torch.optim.Adam, lr=0.01)),
    "adamw": ({"lr": 0.01}, torchs(torch.optim.AdamW, lr=0.01)),
    "adam-async": ({"lr": 0.01}, torchs(torch.optim.Adam, lr=0.01)),
    "nadam": ({"lr": 0.01}, torchs(torch.optim.NAdam, lr=0.01)),
    "adagrad": ({"lr": 0.1}, torchs(torch.optim.Adagrad, lr=0.1)),
    "ftrl": ({"lr": 0.05}, adagrad),
    "outer-nesterov": ({"lr": 0.1}, torchs(SGD, lr=0.1, momentum=0.9, nesterov=True)),
    "delayed-nesterov": ({**HEAVY, "every": 1.0}, torchs(SGD, nesterov=True, **HEAVY)),
}
"""A row a rule: its numbers, and what one worker alone must come to."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SEQUENTIAL)
def test_one_worker_alone_is_the_sequential_form(name: str, kind: str) -> None:
    if kind == "numpy" and name in ON_TORCH:
        with pytest.raises(ValueError, match=f"rule {name} is a kernel of torch's and takes its tensors"):
            rules.named(name).init(np.zeros(2))
        return
    given, sequential = SEQUENTIAL[name]
    start, curve = np.linspace(-2, 2, 97), np.linspace(0.1, 3, 97)

    def slope(at: Any) -> Any:
        return curve * at + np.sin(5 * at)

    job = Job(name, hyperparameters_of(name, **given), KINDS[kind](start))
    for step in range(1, 101):
        job.push(0, KINDS[kind](slope(plain(job.sent(0)))))
        if step in (1, 2, 3, 10, 30, 100):  # on the way too: what converges ends in one place, whatever its formula
            assert np.abs(plain(job.sent(0)) - sequential(start, slope, step)).max() <= 1e-12, step


@pytest.mark.parametrize("name", ["multi-momentum", "dana-zero"])
def test_decay_is_of_the_weights_and_not_of_the_look_ahead(name: str) -> None:
    """So not torch's Nesterov, which decays what it looks at."""
    start, curve = np.linspace(-2, 2, 97), np.linspace(0.1, 3, 97)
    job = Job(name, hyperparameters_of(name, **HEAVY), np.array(start))
    weights, v = start.copy(), np.zeros_like(start)
    for _ in range(50):
        v = 0.9 * v + curve * (weights - 0.05 * 0.9 * v) + 0.01 * weights
        weights = weights - 0.05 * v
        job.push(0, curve * job.sent(0))
        assert np.abs(job.state.weights - weights).max() <= 1e-12


def test_every_rule_that_updates_has_a_row() -> None:
    assert {*SEQUENTIAL, "reduce"} == set(rules.RULES)


WORKERS = [name for name, rule in rules.RULES.items() if rule.per_worker]


@pytest.mark.parametrize("name", [name for name in SEQUENTIAL if name not in ON_TORCH])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_torch_and_numpy_agree(name: str, dtype: Any) -> None:
    rule, hyperparameters = rules.named(name), hyperparameters_of(name, lr=0.01)
    states = {kind: rule.init(make(np.ones(40, dtype))) for kind, make in KINDS.items()}
    for state in states.values():
        for worker in range(4):
            rule.reply(state, hyperparameters, worker)
    for turn, grad in enumerate(gradients(200, 40, dtype=dtype)):
        for kind, state in states.items():
            given = KINDS[kind](grad)
            ranges = [(0, 10), (20, 20)] if turn % 3 == 0 else None
            rule.apply(state, given, hyperparameters, UpdateFacts(ranges, staleness=turn % 4, worker=turn % 4))
            assert np.array_equal(plain(given), grad), "a rule leaves the gradient as it is"
            rule.reply(state, hyperparameters, turn % 4)
    one, other = (plain(rule.reply(state, hyperparameters, 1)) for state in states.values())
    assert one.dtype == other.dtype == dtype
    assert np.abs(one - other).max() <= (1e-3 if dtype is np.float32 else 1e-10) * np.abs(one).max()
    assert states["torch"].slots.keys() == states["numpy"].slots.keys()
    assert states["torch"].slots.keys() <= {*rule.slots, *(of_worker(slot, worker) for slot in rule.per_worker for worker in range(4))}


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_elements_without_a_gradient_stay(name: str) -> None:
    rule, hyperparameters = rules.named(name), hyperparameters_of(name, **SEQUENTIAL[name][0])
    state = rule.init(torch.ones(12))
    rule.reply(state, hyperparameters, 0)
    for turn in range(5):
        rule.apply(state, torch.ones(12), hyperparameters, UpdateFacts(ranges=[(3, 4), (9, 1)], staleness=turn, worker=0))
    moved = [3 <= at < 7 or at == 9 for at in range(12)]
    assert (state.weights != 1).tolist() == moved
    for slot, values in state.slots.items():
        assert slot in ("sent@0", "z") or not values[torch.tensor(moved).logical_not()].any(), slot


@pytest.mark.parametrize("name", WORKERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_is_gone_leaves_nothing(name: str, kind: str) -> None:
    job = Job(name, hyperparameters_of(name, lr=0.01), KINDS[kind](np.zeros(20)), workers=5)
    chance = np.random.default_rng(3)
    for turn, grad in enumerate(gradients(400, 20)):
        worker = int(chance.integers(5))
        job.push(worker, KINDS[kind](grad), staleness=turn % 5)
        if turn % 50 == 49:
            job.rule.forget(job.state, worker)
            assert not [slot for slot in job.state.slots if slot.endswith(f"@{worker}")]
            job.rule.reply(job.state, job.hyperparameters, worker)
        if "sum" in job.rule.slots:
            whole = sum(plain(slot) for label, slot in job.state.slots.items() if label.startswith("v@"))
            assert np.abs(plain(job.state.slots["sum"]) - whole).max() <= 1e-12
    for worker in range(5):
        job.rule.forget(job.state, worker)
    assert set(job.state.slots) <= set(job.rule.slots)
    if "sum" in job.rule.slots:
        assert np.abs(plain(job.state.slots["sum"])).max() <= 1e-12


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_state_survives_a_checkpoint(name: str) -> None:
    job = Job(name, hyperparameters_of(name, lr=0.01), torch.zeros(8), workers=3)
    for turn in range(7):
        job.push(turn % 3, torch.full((8,), float(turn)))
    back = BlockState.of(job.state.weights.clone(), {slot: values.clone() for slot, values in job.state.slots.items()}, job.state.counts())
    for state in (job.state, back):
        job.rule.apply(state, torch.ones(8), job.hyperparameters, UpdateFacts(staleness=1, worker=2))
    assert torch.equal(job.state.weights, back.weights)
    assert torch.equal(job.rule.reply(job.state, job.hyperparameters, 0), job.rule.reply(back, job.hyperparameters, 0))


@pytest.mark.parametrize("name", WORKERS)
def test_a_mean_of_several_is_refused_where_workers_have_state(name: str) -> None:
    rule = rules.named(name)
    with pytest.raises(ValueError, match="keeps state for each worker and takes the push of one, not a mean of several"):
        rule.apply(rule.init(torch.zeros(2)), torch.ones(2), rule.hyperparameters, UpdateFacts(staleness=0))


@pytest.mark.parametrize("name", [name for name, rule in rules.RULES.items() if rule.needs_staleness])
def test_a_push_of_an_unknown_base_is_refused_where_it_matters(name: str) -> None:
    rule = rules.named(name)
    with pytest.raises(
        ValueError, match=rf"rule {name} needs the staleness of a push; it is not known of one that is based on an earlier attempt"
    ):
        rule.apply(rule.init(torch.zeros(2)), torch.ones(2), rule.hyperparameters, UpdateFacts(worker=0))


@pytest.mark.parametrize("name", ["dc-asgd", "dana-dc", "gap-aware", "gap-aware-dana"])
def test_a_push_before_any_reply_is_refused(name: str) -> None:
    rule = rules.named(name)
    with pytest.raises(ValueError, match=f"rule {name}: worker 3 pushes, but has not been sent weights"):
        rule.apply(rule.init(torch.zeros(2)), torch.ones(2), rule.hyperparameters, UpdateFacts(staleness=0, worker=3))


@pytest.mark.parametrize("fused", [False, True])
def test_dana_slim_alone_is_torchs_nesterov_bit_for_bit(fused: bool) -> None:
    """float32, 500 steps: the worker's half and a plain step on the shard round as torch's kernels do."""
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(5000, generator=generator)
    p = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([p], lr=0.05, momentum=0.9, nesterov=True, foreach=False, fused=fused)
    job = Job("dana-slim", hyperparameters_of("dana-slim", lr=0.05), start.clone())
    for _ in range(500):
        p.grad = torch.randn(5000, generator=generator)
        job.push(0, p.grad)
        optimizer.step()
    assert torch.equal(job.sent(0), p.detach())


@pytest.mark.parametrize("workers", [1, 4, 16])
def test_dana_slim_sends_what_dana_zero_sends(workers: int) -> None:
    """600 pushes on one schedule, each worker's gradient taken at what it was sent."""
    curve = torch.linspace(0.1, 1, 30, dtype=torch.float64)
    jobs = [
        Job(name, hyperparameters_of(name, lr=0.02), torch.ones(30, dtype=torch.float64), workers) for name in ("dana-zero", "dana-slim")
    ]
    chance, noise = np.random.default_rng(11), torch.Generator().manual_seed(11)
    for _ in range(600):
        worker, jolt = int(chance.integers(workers)), torch.randn(30, generator=noise, dtype=torch.float64)
        for job in jobs:
            job.push(worker, curve * job.sent(worker) + jolt)
        assert float((jobs[0].sent(worker) - jobs[1].sent(worker)).abs().max()) <= 1e-12


@pytest.mark.parametrize("constant", [True, False])
def test_delay_compensation_by_hand(constant: bool) -> None:
    """Zheng et al. 2017, equations 10 and 14: worker 0 has weights that worker 1 has moved by -0.1."""
    given = {"lr": 0.1, "momentum": 0.0, "adaptive": not constant}
    job = Job("dc-asgd", hyperparameters_of("dc-asgd", **given), torch.zeros(1, dtype=torch.float64), workers=2)
    job.push(1, torch.ones(1, dtype=torch.float64))
    assert float(job.state.weights[0]) == pytest.approx(-0.1)
    job.push(0, torch.full((1,), 3.0, dtype=torch.float64), staleness=1)
    strength = 2.0 if constant else 2.0 / (0.05 * 9 + 1e-7) ** 0.5
    assert float(job.state.weights[0]) == pytest.approx(-0.1 - 0.1 * (3 + strength * 9 * -0.1), rel=1e-12)


def test_delay_compensation_remembers_the_squares_of_its_own_worker() -> None:
    """DC-ASGD-a, push after push of two workers: a running mean by 0.95 of each worker's squares, and 1e-7 where they are small."""
    hyperparameters = hyperparameters_of("dc-asgd", lr=0.1, momentum=0.0)
    job = Job("dc-asgd", hyperparameters, torch.zeros(1, dtype=torch.float64), workers=2)
    weights, sent, mean = 0.0, [0.0, 0.0], [0.0, 0.0]
    for worker, g in [(0, 1e-3), (1, 3.0), (0, -2.0), (0, 0.5), (1, -1.0), (0, 1e-4), (1, 2.0)]:
        mean[worker] = 0.95 * mean[worker] + 0.05 * g * g
        weights -= 0.1 * (g + 2.0 / (mean[worker] + 1e-7) ** 0.5 * g * g * (weights - sent[worker]))
        sent[worker] = weights
        job.push(worker, torch.full((1,), g, dtype=torch.float64), staleness=1)
        assert float(job.state.weights[0]) == pytest.approx(weights, rel=1e-12)


def test_gap_aware_by_hand() -> None:
    """Worker 0's weights are one usual step old: its gradient, and its decay, count half."""
    given = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.5}
    job = Job("gap-aware", hyperparameters_of("gap-aware", **given), torch.zeros(1, dtype=torch.float64), workers=2)
    job.push(1, torch.ones(1, dtype=torch.float64))
    job.push(0, torch.full((1,), 3.0, dtype=torch.float64), staleness=1)
    assert float(job.state.weights[0]) == pytest.approx(-0.1 - 0.1 * (3 + 0.5 * -0.1) / 2, rel=1e-6)


def test_the_highest_learning_rate_of_a_schedule_can_be_told_to_gap_aware() -> None:
    moved = []
    for highest in (0.0, 1.0):
        job = Job("gap-aware", hyperparameters_of("gap-aware", lr=0.1, max_lr=highest), torch.zeros(1, dtype=torch.float64), workers=2)
        for worker in (1, 0):
            job.push(worker, torch.ones(1, dtype=torch.float64))
        moved.append(-float(job.state.weights[0]))
    assert moved[0] < moved[1], "the same gap is fewer of the larger steps"


@pytest.mark.parametrize(("staleness", "expected"), [(0, 1.0), (1, 1.0), (2, 0.5), (10, 0.1)])
def test_a_late_push_counts_less(staleness: int, expected: float) -> None:
    job = Job("lr-over-lag", hyperparameters_of("lr-over-lag", lr=0.5), torch.zeros(1))
    job.push(0, torch.ones(1), staleness=staleness)
    assert -float(job.state.weights[0]) == pytest.approx(0.5 * expected) and stale_share(staleness) == expected


@pytest.mark.parametrize("workers", [2, 8])
def test_adams_averages_fade_by_rounds(workers: int) -> None:
    """m pushes of one gradient leave the averages, and the bias correction, where one update of Adam with their mean does."""
    one, many = rules.named("adam"), rules.named("adam-async")
    states = [rule.init(torch.zeros(6, dtype=torch.float64)) for rule in (one, many)]
    for grad in gradients(20, 6):
        one.apply(states[0], torch.tensor(grad), hyperparameters_of("adam"))
        for _ in range(workers):
            many.apply(states[1], torch.tensor(grad), hyperparameters_of("adam-async", workers=float(workers)))
    for slot in ("exp_avg", "exp_avg_sq"):
        assert torch.allclose(states[0].slots[slot], states[1].slots[slot], rtol=1e-12)
    beta = hyperparameters_of("adam")["beta2"]
    assert 1 - beta ** states[0].segment_at(0)[1] == pytest.approx(1 - (beta ** (1 / workers)) ** states[1].segment_at(0)[1])


def test_ftrl_makes_zeros_and_begins_at_the_weights_it_is_given() -> None:
    rule, hyperparameters = rules.named("ftrl"), hyperparameters_of("ftrl", lr=0.1, l1=0.5, l2=0.1)
    start = torch.linspace(-1, 1, 21, dtype=torch.float64)
    state = rule.init(start.clone())
    rule.apply(state, torch.zeros(21, dtype=torch.float64), hyperparameters)
    assert torch.allclose(state.weights, start, atol=1e-15)
    for grad in gradients(200, 21):
        rule.apply(state, state.weights + 0.1 * torch.tensor(grad), hyperparameters)
    assert int((state.weights == 0).sum()) > 0


@pytest.mark.parametrize("l1", [0.0, 30.0])
def test_another_rate_moves_no_weight_of_ftrl(l1: float) -> None:
    """A run that continues with other numbers keeps its weights, and then is the paper's sum with s = Δ((beta + sqrt(n)) / lr + l2)."""
    rule, state = rules.named("ftrl"), rules.named("ftrl").init(np.linspace(-1, 1, 21))
    z, n, before, zeros = np.zeros(21), np.zeros(21), None, 0
    for turn, grad in enumerate(gradients(90, 21)):
        lr, beta, l2 = ((0.1, 1.0, 0.0), (0.02, 1.0, 0.0), (0.3, 2.0, 0.1))[turn // 30]
        if turn % 30 == 0:
            kept = state.weights.copy()
            rule.apply(state, np.zeros(21), hyperparameters_of("ftrl", lr=lr, beta=beta, l1=l1, l2=l2))
            assert np.abs(state.weights - kept).max() <= 1e-15
        n += grad * grad
        down = (beta + np.sqrt(n)) / lr + l2
        z = -kept * down - l1 * np.sign(kept) + grad if before is None else z + grad - (down - before) * state.weights
        before = down
        rule.apply(state, grad, hyperparameters_of("ftrl", lr=lr, beta=beta, l1=l1, l2=l2))
        assert np.abs(state.weights - np.where(np.abs(z) <= l1, 0, -(z - np.sign(z) * l1) / down)).max() <= 1e-12
        zeros += int((state.weights == 0).sum())
    assert (zeros > 0) == (l1 > 0)


def test_delayed_pushes_come_to_nesterov_of_their_mean() -> None:
    """Twelve pushes, four at a time, against three by the mean; with `activation` the momentum comes earlier, and less of it late."""
    deltas = gradients(12, 5)
    states = {name: rules.named(name).init(np.zeros(5)) for name in ("delayed-nesterov", "outer-nesterov")}
    for turn, delta in enumerate(deltas):
        rules.named("delayed-nesterov").apply(
            states["delayed-nesterov"], delta, hyperparameters_of("delayed-nesterov"), UpdateFacts(worker=turn % 4)
        )
        if turn % 4 == 3:
            mean = np.mean(deltas[turn - 3 : turn + 1], axis=0)
            rules.named("outer-nesterov").apply(states["outer-nesterov"], mean, hyperparameters_of("outer-nesterov"))
            assert np.abs(states["delayed-nesterov"].weights - states["outer-nesterov"].weights).max() <= 1e-14
    early = rules.named("delayed-nesterov").init(np.zeros(5))
    for delta in deltas[:9]:
        rules.named("delayed-nesterov").apply(early, delta, hyperparameters_of("delayed-nesterov", activation=0.25))
    v1 = np.mean(deltas[:4], axis=0)
    v2 = 0.9 * v1 + np.mean(deltas[4:8], axis=0)
    momentum = 0.25 * v1 + 0.75 * v1 + 0.25 * v2 + 0.25 * v2
    assert np.abs(early.weights + 0.7 * (np.sum(deltas[:9], axis=0) / 4 + 0.9 * momentum)).max() <= 1e-14


def test_delayed_pushes_are_counted_by_tensor() -> None:
    """The second tensor of a block has a gradient at each third push only: it is as a block of its own."""
    rule, hyperparameters = rules.named("delayed-nesterov"), hyperparameters_of("delayed-nesterov", every=2.0, activation=0.3)
    both, first, second = (rule.init(np.zeros(length)) for length in (5, 3, 2))
    for turn, grad in enumerate(gradients(30, 5)):
        rule.apply(both, grad, hyperparameters, UpdateFacts(ranges=None if turn % 3 == 0 else [(0, 3)]))
        rule.apply(first, grad[:3], hyperparameters)
        if turn % 3 == 0:
            rule.apply(second, grad[3:], hyperparameters)
    assert np.array_equal(both.weights, np.concatenate([first.weights, second.weights]))


def grows(name: str, step: float, workers: int, rounds: int, momentum: float | None = None) -> bool:
    """m workers push in turn (staleness m - 1) on f = x²/2: is x larger in the second half of the run than in the first?"""
    rule = rules.named(name)
    hyperparameters = check_hyperparameters(rule, {"lr": step} | ({} if momentum is None else {"momentum": momentum}))
    state = rule.init(np.ones(1))
    sent: list[Any] = [rule.reply(state, hyperparameters, worker).copy() for worker in range(workers)]
    size = []
    for turn in range(rounds * workers):
        worker = turn % workers
        rule.apply(state, sent[worker], hyperparameters, UpdateFacts(staleness=min(turn, workers - 1), worker=worker))
        sent[worker] = rule.reply(state, hyperparameters, worker).copy()
        size.append(abs(float(state.weights[0])))
        if size[-1] > 1e9:
            return True
    half = len(size) // 2
    return max(size[half:]) > max(size[:half])


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_plain_steps_are_stable_below_the_bound_and_not_above(workers: int) -> None:
    """eta a < 2 sin(pi / (2 (2 staleness + 1))): row C1."""
    bound = 2 * math.sin(math.pi / (2 * (2 * (workers - 1) + 1)))
    assert not grows("plain", 0.97 * bound, workers, 120)
    assert grows("plain", 1.03 * bound, workers, 120)


TABLE = {
    "plain": (None, {4: 0.445, 8: 0.209, 16: 0.101}),
    "nag": (0.9, {4: 0.046, 8: 0.0176, 16: 0.0083}),
    "multi-momentum": (0.9, {4: 0.1418, 8: 0.0370, 16: 0.0148}),
    "dana-zero": (0.9, {4: 0.220, 8: 0.0971, 16: 0.0455}),
}


@pytest.mark.parametrize("workers", [4, 8, rotating(16)])
@pytest.mark.parametrize("name", TABLE)
def test_how_large_a_step_may_be(name: str, workers: int) -> None:
    """Row C8: DANA allows five times NAG's step, half of what steps without momentum allow."""
    momentum, largest = TABLE[name]
    assert not grows(name, 0.96 * largest[workers], workers, 200, momentum)
    assert grows(name, 1.04 * largest[workers], workers, 200, momentum)


STALLS = WorkerSpeeds(stall=Stall(0.01, extra=4.0))


@pytest.mark.parametrize(
    ("backups", "speeds", "interrupt", "interval"),
    [
        (0, STALLS, False, 4.14),
        (4, STALLS, True, 1.19),
        rotating(4, STALLS, False, 1.48),
        rotating(0, WorkerSpeeds(), False, 1.27),
        rotating(4, WorkerSpeeds(), True, 1.18),
        rotating(4, WorkerSpeeds(), False, 1.18),
    ],
)
def test_backup_workers_against_the_slowest_of_96(backups: int, speeds: WorkerSpeeds, interrupt: bool, interval: float) -> None:
    """Chen et al. 2016. If late workers finish their step first, a stall of several steps costs several clocks."""
    workers = 96 + backups
    outcome = simulate(Backup(backups) if backups else Sync(), workers, speeds, 300 * workers, seed=1, interrupt=interrupt)
    assert outcome.elapsed / outcome.updates / 128 == pytest.approx(interval, rel=0.06 if speeds.stall else 0.01)


@pytest.mark.parametrize(("workers", "staleness"), [(8, 6.99), (16, 14.95), (32, 30.8), (64, 62.2)])
def test_mean_staleness_of_async(workers: int, staleness: float) -> None:
    assert np.mean(simulate(Async(), workers, WorkerSpeeds(), 2640).staleness) == pytest.approx(staleness, abs=0.05)


FRACTIONS = {
    "equal": (WorkerSpeeds(), (0.88, 0.99, 1.0, 1.0, 1.0)),
    "5 % of steps 5 times as long": (WorkerSpeeds(stall=Stall(0.05, 5)), (0.41, 0.54, 0.68, 0.79, 0.84)),
    "one worker always 4 times": (WorkerSpeeds(slow={0: 4}), (0.25, 0.25, 0.25, 0.25, 0.91)),
}


@pytest.mark.parametrize("name", FRACTIONS)
def test_useful_time_under_a_bound(name: str) -> None:
    """A bound helps against slow steps, never against a slow worker."""
    speeds, fractions = FRACTIONS[name]
    for staleness, fraction in zip((0, 1, 3, 8, 10**9), fractions, strict=True):
        outcome = simulate(Bounded(staleness), 8, speeds, 8000, seed=1)
        assert outcome.kept * 128 / (8 * outcome.elapsed) == pytest.approx(fraction, abs=0.035), staleness


@pytest.mark.parametrize(("splits", "staleness"), [(1, 0.97), rotating(2, 1.93), rotating(15, 14.5), (30, 29.0)])
def test_staleness_of_softsync_is_about_its_splits(splits: int, staleness: float) -> None:
    """Zhang et al. 2016: about n, practically never above 2 n."""
    seen = np.array(simulate(Softsync(splits), 30, WorkerSpeeds(), 20_000).staleness)
    assert seen.mean() == pytest.approx(staleness, rel=0.01)
    assert (seen > 2 * splits).mean() < 1e-3


@pytest.mark.parametrize(("spread", "part"), [(0.0, 0.0094), (0.6, 0.278)])
def test_how_many_steps_are_a_quarter_too_long(spread: float, part: float) -> None:
    draws = WorkerSpeeds(spread=spread).draws(400, 3)
    times = np.array([next(one) for one in draws for _ in range(100)])
    assert (times > 1.25 * 128).mean() == pytest.approx(part, rel=0.25)


@pytest.mark.parametrize("workers", [2, 4, rotating(8)])
def test_async_is_stable_up_to_its_bound(workers: int) -> None:
    """Round robin has staleness m - 1 exactly: stable iff lr x curvature < 2 sin(pi / (2 (2 staleness + 1)))."""
    bound = 2 * math.sin(math.pi / (2 * (2 * (workers - 1) + 1)))
    ends = []
    for factor in (0.97, 1.03):
        rule = rules.named("plain")
        hyperparameters = {**rule.hyperparameters, "lr": factor * bound}
        work = SimulatedTraining(Quadratic(1), rule, lambda batches, hyperparameters=hyperparameters: hyperparameters)
        simulate(Async(), workers, WorkerSpeeds(shape=math.inf), 250 * workers * workers, work=work)
        ends.append(work.score())
    assert ends[0] < 0.1 and ends[1] > 10
