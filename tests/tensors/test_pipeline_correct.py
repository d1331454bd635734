"""Corrections of gradients of old weights: against their formulas in plain torch, and by what holds of them.

Corrections for late gradients, against literal loops of torch's own optimizers.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from psjob import contract, rules
from psjob.pipeline import predict, schedule
from psjob.pipeline.cuts import split_model
from psjob.rules.base import UpdateFacts, check_hyperparameters
from tests.support import pipeline_inprocess as inprocess
from tests.support import pipeline_reference as reference
from tests.support.pipeline_reference import adam_ahead, momentum_ahead, of_optimizer

LATE: list[schedule.TrainingWay] = [
    schedule.TwoBW(),
    schedule.PipeDream(),
    schedule.PipeDream(vertical_sync=True),
    schedule.FTPipe(recompute=False),
]


def begun(word: str, **options: float) -> predict.Corrector:
    begin = predict.corrector(schedule.PipeDream(), word, options)
    assert begin is not None
    return begin()


def draws(count: int, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(count)]


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_a_compensated_gradient_is_that_of_the_formula() -> None:
    g, now, opened = draws(3)
    close(begun("dc-asgd", adaptive=0, lam=0.5).corrected("w", g, now, opened, 0.1), g + 0.5 * g * g * (now - opened))
    corrector, mean = begun("dc-asgd", lam=0.5, decay=0.8), torch.zeros_like(g)
    for g, now, opened in zip(*[iter(draws(12))] * 3, strict=True):
        mean = 0.8 * mean + 0.2 * g * g
        close(corrector.corrected("w", g, now, opened, 0.1), g + 0.5 / (mean + 1e-7).sqrt() * g * g * (now - opened))


def test_a_gradient_by_its_gap_is_that_of_the_formula() -> None:
    """C is the highest rate times the root of the mean square of steps by their rate, free of its bias."""
    for max_lr in (0.0, 0.7):
        corrector, steps = begun("gap-aware", average=0.9, max_lr=max_lr), []
        g, now, opened = draws(3)
        assert torch.equal(corrector.corrected("w", g, now, opened, 0.3), g), "no step was seen yet"
        for turn, (before, after) in enumerate(zip(*[iter(draws(10))] * 2, strict=True), 1):
            lr = 0.1 * turn
            corrector.moved("w", before, after, lr)
            steps.append((after - before) / lr)
            mean = sum((0.1 * 0.9 ** (turn - n) * step**2 for n, step in enumerate(steps, 1)), torch.zeros_like(g))
            usual = (max_lr or 0.3) * ((mean / (1 - 0.9**turn)).sqrt() + 1e-8)
            close(corrector.corrected("w", g, now, opened, 0.3), g / (1 + (now - opened).abs() / usual))


@pytest.mark.parametrize("word", contract.CORRECTIONS[1:])
def test_the_arithmetic_is_that_of_the_rule_on_the_shards(word: str) -> None:
    """One worker whose pushes each answer an older reply: the rule has the same drift to correct by."""
    rule, corrector, plain = rules.named(word), begun(word), rules.named("heavy-ball")
    # With Nesterov's momentum, which gap-aware has, a step is more than the momentum that the rule counts.
    own = {"lr": 0.1, "momentum": 0.9 if word == "dc-asgd" else 0.0, "weight_decay": 0.0}
    options = check_hyperparameters(rule, own)
    begin = torch.randn(40, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    theirs, ours = rule.init(begin.clone()), plain.init(begin.clone())
    seen = [begin.clone()]
    for turn in range(8):
        grad = torch.randn(40, generator=torch.Generator().manual_seed(turn), dtype=torch.float64)
        theirs.slots["sent@0"] = seen[max(0, turn - 2)].clone()
        rule.apply(theirs, grad, options, UpdateFacts(staleness=2, worker=0))
        before = ours.weights.clone()
        plain.apply(ours, corrector.corrected("w", grad, before, seen[max(0, turn - 2)], 0.1), own)
        corrector.moved("w", before, ours.weights, 0.1)
        seen.append(ours.weights.clone())
    close(theirs.weights, ours.weights)
    assert len(seen) == 9


def test_with_a_heavy_ball_a_step_by_its_rate_is_the_momentum() -> None:
    sgd, corrector = rules.named("heavy-ball"), begun("gap-aware")
    state = sgd.init(torch.randn(40, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
    mean = torch.zeros_like(state.weights)
    for turn in range(6):
        before, grad = state.weights.clone(), torch.randn(40, generator=torch.Generator().manual_seed(turn), dtype=torch.float64)
        sgd.apply(state, grad, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0})
        corrector.moved("w", before, state.weights, 0.1)
        mean = 0.999 * mean + 0.001 * state.slots["momentum_buffer"] ** 2
    assert isinstance(corrector, predict.ByGap)
    torch.testing.assert_close(corrector._steps["w"][0], mean, rtol=1e-9, atol=1e-12)


numbers = st.floats(-100, 100, width=32)


@given(
    st.sampled_from(contract.CORRECTIONS[1:]), st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=9), st.floats(1e-4, 1)
)
def test_what_holds_of_each(word: str, elements: list[tuple[float, float, float]], lr: float) -> None:
    corrector = begun(word)
    g, now, opened = (torch.tensor(column, dtype=torch.float64) for column in zip(*elements, strict=True))
    kept = [tensor.clone() for tensor in (g, now, opened)]
    corrector.moved("w", opened, now, lr)
    made = corrector.corrected("w", g, now, opened, lr)
    assert all(torch.equal(one, other) for one, other in zip(kept, (g, now, opened), strict=True)), "it changes nothing that it is given"
    assert made.data_ptr() != g.data_ptr() and bool(torch.isfinite(made).all())
    assert torch.equal(corrector.corrected("w", g, opened, opened, lr), g), "what is not old stays as it is"
    if word == "gap-aware":
        assert bool((made.abs() <= g.abs()).all()) and bool((made * g >= 0).all()), "it shortens, and never turns"


def test_a_rate_of_zero_says_nothing_of_a_step() -> None:
    corrector = begun("gap-aware")
    g, now, opened = draws(3)
    corrector.moved("w", opened, now, 0.0)
    assert torch.equal(corrector.corrected("w", g, now, opened, 0.1), g)
    corrector.moved("w", opened, now, 0.1)
    assert torch.equal(corrector.corrected("w", g, now, opened, 0.0), g)


def test_a_sparse_gradient_becomes_a_dense_one() -> None:
    g, now, opened = draws(3)
    for word in contract.CORRECTIONS[1:]:
        assert torch.equal(begun(word).corrected("w", g.to_sparse(), now, opened, 0.1), begun(word).corrected("w", g, now, opened, 0.1))


@pytest.mark.parametrize(("way", "word", "options", "says"), [
    (schedule.Flush(), "dc-asgd", {}, "with schedule: flush no gradient is of old weights; leave correct out"),
    (schedule.Flush(recompute=True), "gap-aware", {}, "with schedule: flush"),
    (schedule.FTPipe(), "gap-aware", {}, "with weights: recompute a gradient is of the newest weights"),
    (schedule.FTPipe(predicts=False), "dc-asgd", {}, "with weights: recompute"),
    (schedule.Latest(), "dc-asgd", {}, "with weights: latest a stage keeps no older weights"),
    (schedule.TwoBW(), "dana-dc", {}, "correct is dana-dc, must be one of none, dc-asgd, gap-aware"),
    (schedule.TwoBW(), "none", {"lam": 1.0}, "correctOptions has lam, and training.pipeline.correct names no correction"),
    (schedule.TwoBW(), "dc-asgd", {"lr": 1.0},
        "has lr, which correct dc-asgd does not take; that is the script's optimizer's; it takes lam"),
    (schedule.TwoBW(), "dc-asgd", {"decay": 1.0}, "correctOptions: rule dc-asgd: decay is 0 or more and below 1, got 1"),
    (schedule.TwoBW(), "gap-aware", {"max_lr": float("nan")}, "max_lr is a finite number"),
])  # fmt: skip
def test_what_cannot_be_is_refused(way: schedule.TrainingWay, word: str, options: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError) as refused:
        predict.corrector(way, word, options)
    assert says in str(refused.value)


def test_what_the_script_steps_with_is_looked_at() -> None:
    predict.check_correction("none", {"maximize": True})
    predict.check_correction("gap-aware", {"maximize": True, "lr": 0.1})
    with pytest.raises(ValueError, match="leave maximize out"):
        predict.check_correction("dc-asgd", {"maximize": True, "lr": 0.1})
    with pytest.raises(ValueError, match="without a hyperparameter lr"):
        predict.check_correction("gap-aware", {})


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))


def tied() -> nn.Module:
    model: Any = net()
    model[3][0].weight = model[0][0].weight
    return model  # type: ignore[no-any-return]


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(9)
    return [(torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)) for _ in range(count)]


def outcome(train: Any, model: nn.Module, way: schedule.TrainingWay, word: str, **more: Any) -> dict[str, torch.Tensor]:
    made = train(
        model, nn.functional.mse_loss, batches(9), parts=split_model(model, [1, 2, 3]), way=way, microbatches=4,
        optimizer=lambda parameters, _delay: torch.optim.SGD(parameters, lr=0.2, momentum=0.9),
        correct=predict.corrector(way, word, {}), **more,
    )  # fmt: skip
    return dict(made.weights)


@pytest.mark.parametrize("word", contract.CORRECTIONS[1:])
@pytest.mark.parametrize("way", LATE, ids=lambda way: f"{type(way).__name__}{'-vertical' * way.vertical_sync}")
def test_stages_that_run_their_schedules_correct_as_the_reference_does(way: schedule.TrainingWay, word: str) -> None:
    made, wanted, plain = (
        outcome(train, net(), way, how) for train, how in ((inprocess.train, word), (reference.train, word), (reference.train, "none"))
    )
    assert all(torch.equal(made[name], wanted[name]) for name in wanted)
    assert not torch.equal(plain["0.0.weight"], wanted["0.0.weight"])


@pytest.mark.parametrize("word", contract.CORRECTIONS[1:])
def test_a_weight_of_two_stages_is_corrected_once_by_its_whole_gradient(word: str) -> None:
    made, wanted = (outcome(train, tied(), schedule.TwoBW(), word) for train in (inprocess.train, reference.train))
    assert all(torch.equal(made[name], wanted[name]) for name in wanted)


def test_the_gap_of_replicas_is_one_and_their_squares_are_their_own() -> None:
    """Gap-Aware is linear in the gradient, so replicas change no more than the order of a sum; DC-ASGD is not."""
    one, two = (outcome(reference.train, net(), schedule.TwoBW(), "gap-aware", replicas=counts) for counts in ((1,) * 4, (2, 1, 2, 1)))
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-6)
    one, two = (outcome(reference.train, net(), schedule.TwoBW(), "dc-asgd", replicas=counts) for counts in ((1,) * 4, (2, 1, 2, 1)))
    assert float((one["0.0.weight"] - two["0.0.weight"]).abs().max()) > 1e-6


torch.set_num_threads(1)


def trained(make: Any, steps: int = 5) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(7, 3, generator=generator, dtype=torch.float64))
    optimizer = make([p])
    for _ in range(steps):
        p.grad = torch.randn(7, 3, generator=generator, dtype=torch.float64)
        optimizer.step()
    return p, optimizer


@pytest.mark.parametrize("delay", [0, 1, 2, 7])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_sgd_goes_where_its_momentum_alone_leads(delay: int, momentum: float) -> None:
    p, optimizer = trained(lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=momentum))
    ahead = of_optimizer(optimizer, delay)[p]
    before = p.detach().clone()
    for _ in range(delay):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    torch.testing.assert_close(ahead, p.detach(), rtol=1e-12, atol=1e-12)
    assert ahead.data_ptr() != p.data_ptr()
    assert torch.equal(ahead, before) == (delay == 0 or momentum == 0)


@pytest.mark.parametrize("delay", [0, 1, 4])
def test_adam_goes_where_its_first_moment_alone_leads(delay: int) -> None:
    p, optimizer = trained(lambda ps: torch.optim.Adam(ps, lr=0.05, betas=(0.8, 0.95), eps=1e-6))
    ahead = of_optimizer(optimizer, delay)[p]
    second = optimizer.state[p]["exp_avg_sq"].clone()
    for _ in range(delay):
        p.grad = torch.zeros_like(p)
        optimizer.state[p]["exp_avg_sq"].copy_(second / 0.95)  # the formula lets it stay; a step multiplies it by beta2 first
        optimizer.step()
    torch.testing.assert_close(ahead, p.detach(), rtol=1e-10, atol=1e-12)


def test_adam_takes_a_learning_rate_for_each_update_to_come() -> None:
    w, m, v = (torch.tensor([x], dtype=torch.float64) for x in (1.0, 0.5, 0.04))
    ahead = adam_ahead(w, m, v, 3, [0.1, 0.0, 0.3], (0.9, 0.99), 0.0)
    by_hand = 1.0
    for i, lr in ((1, 0.1), (3, 0.3)):
        by_hand -= lr * 0.9**i * 0.5 / (1 - 0.9 ** (3 + i)) / math.sqrt(0.04 / (1 - 0.99 ** (3 + i)))
    assert float(ahead) == pytest.approx(by_hand, rel=1e-12)
    assert float(w) == 1.0


def test_nothing_is_predicted_before_the_first_update() -> None:
    p, optimizer = trained(lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), steps=0)
    assert torch.equal(of_optimizer(optimizer, 3)[p], p.detach())


def test_momentum_grows_with_delay_towards_the_highest() -> None:
    betas = [predict.momentum_by_stage(0.9, delay, 8) for delay in range(8)]
    assert betas[0] == 0.9 and betas == sorted(betas) and betas[4] == pytest.approx(0.945) and betas[-1] < 0.99


def test_the_learning_rate_of_late_stages_begins_low() -> None:
    assert predict.lr_by_delay(0.4, 4, 0, 100) == pytest.approx(0.1)
    assert predict.lr_by_delay(0.4, 4, 50, 100) == pytest.approx(0.2)
    assert [predict.lr_by_delay(0.4, 4, step, 100) for step in (100, 1000)] == [0.4, 0.4]
    assert [predict.lr_by_delay(0.4, delay, 0, 100) for delay in (0, 1)] == [0.4, 0.4]


@pytest.mark.parametrize(("make", "says"), [
    (lambda ps: torch.optim.AdamW(ps), "weights of AdamW cannot be predicted; take torch's SGD or Adam"),
    (lambda ps: torch.optim.SGD(ps, momentum=0.9, nesterov=True),
        "weights of SGD with nesterov=True cannot be predicted; leave nesterov out"),
    (lambda ps: torch.optim.Adam(ps, weight_decay=0.1), "weights of Adam with weight_decay=0.1 cannot be predicted"),
])  # fmt: skip
def test_an_optimizer_without_a_formula_is_refused(make: Any, says: str) -> None:
    _, optimizer = trained(make)
    with pytest.raises(ValueError, match=says):
        of_optimizer(optimizer, 1)


def test_numbers_out_of_range_are_refused() -> None:
    w = torch.zeros(1)
    with pytest.raises(ValueError, match=r"momentum is 1\.0, must be from 0 to below 1"):
        momentum_ahead(w, w, 0.1, 1.0, 2)
    with pytest.raises(ValueError, match="delay is -1, must be 0 or more"):
        predict.lr_by_delay(0.1, -1, 0, 10)
    with pytest.raises(ValueError, match=r"beta is 0\.995"):
        predict.momentum_by_stage(0.995, 1, 4)
    with pytest.raises(ValueError, match="step is -1"):
        adam_ahead(w, w, w, -1, [0.1])


def test_the_rate_of_each_group_goes_by_the_delay() -> None:
    groups = [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.4, "momentum": 0.0}]
    for delay, step, factor in ((0, 0, 1.0), (1, 0, 1.0), (4, 0, 0.25), (4, 5, 0.5), (4, 10, 1.0), (4, 99, 1.0), (9, 5, 1 / 3)):
        found = predict.annealed(groups, delay, step, 10)
        assert [group["lr"] for group in found] == pytest.approx([0.1 * factor, 0.4 * factor])
        assert [group["momentum"] for group in found] == [0.9, 0.0]
    assert groups[0]["lr"] == 0.1
    with pytest.raises(ValueError, match="a rule without a hyperparameter lr cannot be annealed"):
        predict.annealed([{"momentum": 0.9}], 1, 0, 10)


def test_the_momentum_of_each_group_goes_by_the_delay() -> None:
    groups = [{"lr": 0.1, "beta1": 0.9}, {"lr": 0.4, "beta1": 0.5}]
    for delay in range(4):
        found = predict.with_momentum("nadam", groups, delay, 4, 0.98)
        assert [group["beta1"] for group in found] == pytest.approx([0.9 + 0.02 * delay, 0.5 + 0.12 * delay])
        assert [group["lr"] for group in found] == [0.1, 0.4]
    assert groups[0]["beta1"] == 0.9
    with pytest.raises(ValueError, match=r"the momentum of adam does not go by stage; take torch\.optim\.NAdam"):
        predict.with_momentum("adam", groups, 1, 4, 0.98)
    with pytest.raises(ValueError, match=r"beta is 0\.9, highest 0\.8, stages 4"):
        predict.with_momentum("nadam", groups, 1, 4, 0.8)
