"""Corrections of gradients of old weights: against their formulas in plain torch, and by what holds of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from psjob import contract, rules
from psjob.pipeline import predict, schedule
from psjob.pipeline.cuts import split_model
from psjob.rules.base import check_hyperparameters
from tests.support import pipeline_inprocess as inprocess
from tests.support import pipeline_reference as reference

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
        rule.apply(theirs, grad, options, staleness=2, worker=0)
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


@pytest.mark.parametrize(
    ("way", "word", "options", "says"),
    [
        (schedule.Flush(), "dc-asgd", {}, "with schedule: flush no gradient is of old weights; leave correct out"),
        (schedule.Flush(recompute=True), "gap-aware", {}, "with schedule: flush"),
        (schedule.FTPipe(), "gap-aware", {}, "with weights: recompute a gradient is of the newest weights"),
        (schedule.FTPipe(predicts=False), "dc-asgd", {}, "with weights: recompute"),
        (schedule.Latest(), "dc-asgd", {}, "with weights: latest a stage keeps no older weights"),
        (schedule.TwoBW(), "dana-dc", {}, "correct is dana-dc, must be one of none, dc-asgd, gap-aware"),
        (schedule.TwoBW(), "none", {"lam": 1.0}, "correctOptions has lam, and training.pipeline.correct names no correction"),
        (
            schedule.TwoBW(),
            "dc-asgd",
            {"lr": 1.0},
            "has lr, which correct dc-asgd does not take; that is the script's optimizer's; it takes lam",
        ),
        (schedule.TwoBW(), "dc-asgd", {"decay": 1.0}, "correctOptions: rule dc-asgd: decay is 0 or more and below 1, got 1"),
        (schedule.TwoBW(), "gap-aware", {"max_lr": float("nan")}, "max_lr is a finite number"),
    ],
)
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
@pytest.mark.parametrize("way", LATE, ids=lambda way: f"{way.name}{'-vertical' * way.vertical_sync}")
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
