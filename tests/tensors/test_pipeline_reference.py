"""Every way of training: stages that run their schedules against each other, the reference, and rules written out here."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from psjob.pipeline import predict, schedule
from psjob.pipeline.cuts import split_model
from psjob.pipeline.random_draws import Calls, Draw
from psjob.pipeline.stage import ChangedInPlace, StagePart, StageRun, arguments, cut
from tests.support import pipeline_inprocess as inprocess
from tests.support import pipeline_reference as reference
from tests.support.pipeline_orders import Direction, GPipe, StageWork
from tests.support.pipeline_reference import Outcome
from tests.support.soaking import rotating
from tests.tensors.pipeline_models import NET_CUTS, ROW_CUTS, Mean, Net, net_loss, row, tokens

torch.set_num_threads(1)
LOSS = nn.functional.cross_entropy
PLAIN = 0.05


def sgd(parameters: list[nn.Parameter], _delay: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=PLAIN, momentum=0.9)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def both(model: nn.Module, parts: list[StagePart], way: schedule.TrainingWay, microbatches: int, count: int, **options: Any) -> Outcome:
    """What the reference comes to; the stages must come to the same bits, numbers and delays."""
    given: dict[str, Any] = {"parts": parts, "way": way, "microbatches": microbatches, "optimizer": sgd, "seed": 5, **options}
    loss = net_loss if isinstance(model, Net) else LOSS
    expected = reference.train(model, loss, tokens(count), **given)
    found = inprocess.train(model, loss, tokens(count), **given)
    assert same(found.weights, expected.weights) and same(found.buffers, expected.buffers)
    assert found.losses == expected.losses and len(found.losses) == count
    assert found.delays == expected.delays
    return found


@functools.cache
def one_stage(microbatches: int, minibatches: int, tied: bool = True) -> Outcome:
    """The plain loop over micro-batches: one model, one optimizer, `backward` of each weighted loss."""
    model = row(tied=tied)
    part = split_model(model)[0]
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    optimizer = sgd(list(parameters.values()), 0)
    losses = []
    for number, (x, y) in enumerate(tokens(minibatches)):
        optimizer.zero_grad()
        total = 0.0
        for place, micro in enumerate(cut((arguments(x), y), microbatches)):
            draw = Draw(5, number, place)
            loss = LOSS(part.run(parameters, buffers, micro.value[0], draw, Calls()), micro.value[1]) * micro.weight
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        optimizer.step()
        losses.append(float(total))
    return Outcome(losses, {n: p.detach() for n, p in parameters.items()}, buffers, [Counter({0: minibatches})])


def in_turn(given: Sequence[schedule.TrainingWay], sizes: Sequence[tuple[int, int]]) -> list[Any]:
    """Each way with each third of the sizes, so that every size has a way; the rest of the product rotates."""
    return [
        (pytest.param if (number + place) % 3 == 0 else rotating)(way, *size, id=f"{way}-{size[0]}-{size[1]}")
        for number, way in enumerate(given)
        for place, size in enumerate(sizes)
    ]


FLUSH = [GPipe(), schedule.Flush(), schedule.Flush(recompute=True)]
SIZES = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 1), (4, 4), (4, 8)]


@pytest.mark.parametrize(("way", "stages", "microbatches"), in_turn(FLUSH, SIZES))
def test_flush_is_one_process_bit_by_bit(way: schedule.TrainingWay, stages: int, microbatches: int) -> None:
    """Weights after steps, with dropout, BatchNorm and a tied weight, which an equal gradient only in each step gives."""
    model = row()
    found = both(model, split_model(model, ROW_CUTS[stages]), way, microbatches, 3)
    plain = one_stage(microbatches, 3)
    assert same(found.weights, plain.weights) and same(found.buffers, plain.buffers) and found.losses == plain.losses
    assert found.delays == [Counter({0: 3})] * stages


def test_flush_of_an_exported_model_is_one_process_too() -> None:
    outcomes = []
    for stages in (1, 4):
        model = Net()
        parts = split_model(model, NET_CUTS[stages], arguments(tokens(1)[0][0][:4]))
        outcomes.append(both(model, parts, schedule.Flush(), 4, 2))
    assert same(outcomes[0].weights, outcomes[1].weights) and same(outcomes[0].buffers, outcomes[1].buffers)
    assert outcomes[0].losses == outcomes[1].losses


def test_flush_adds_up_a_weight_of_many_stages_as_one_process_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 12), Mean(), *(nn.Sequential(nn.Tanh(), nn.Linear(12, 12)) for _ in range(4)))
    for block in model[3:]:
        block[1].weight = model[2][1].weight  # type: ignore[index]
    found = both(model, split_model(model, [3, 4, 5]), schedule.Flush(), 2, 4)
    assert same(found.weights, both(model, split_model(model), schedule.Flush(), 2, 4).weights)


ASYNC = [
    schedule.PipeDream(),
    schedule.PipeDream(vertical_sync=True),
    schedule.Latest(),
    schedule.TwoBW(),
    schedule.FTPipe(),
    schedule.FTPipe(predicts=False),
    schedule.FTPipe(recompute=False),
]


@pytest.mark.parametrize(("way", "stages", "microbatches"), in_turn(ASYNC, [(2, 1), (2, 4), (4, 1), (4, 4)]))
def test_late_gradients_have_the_delay_of_the_formula_and_the_bits_of_the_rule(
    way: schedule.TrainingWay, stages: int, microbatches: int
) -> None:
    """The stages measure their delays; the reference takes them from the formula."""
    model = row(tied=False)
    parts = split_model(model, ROW_CUTS[stages])
    if isinstance(way, schedule.TwoBW) and microbatches < stages:
        with pytest.raises(ValueError, match=f"microbatches is {microbatches} with {stages} stages: 2BW needs"):
            inprocess.train(model, LOSS, tokens(1), parts=parts, way=way, microbatches=microbatches, optimizer=sgd)
        return
    found = both(model, parts, way, microbatches, 8)
    for stage, counted in enumerate(found.delays):
        late = way.delay(stage, [1] * stages, microbatches)
        assert counted == Counter(min(number, late) for number in range(8))
    assert not same(found.weights, one_stage(microbatches, 8, tied=False).weights)


@pytest.mark.parametrize("way", [schedule.PipeDream(), schedule.Latest()], ids=str)
def test_a_forward_under_autocast_casts_the_weights_of_now(way: schedule.TrainingWay) -> None:
    """Autocast keeps the cast of a leaf as long as it is on, also where the leaf's memory has changed meanwhile."""
    model = row(tied=False)
    with torch.autocast("cpu", torch.bfloat16):
        both(model, split_model(model, ROW_CUTS[4]), way, 2, 6)


def gradient(weights: dict[str, torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a small model without dropout, by plain torch."""
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    loss = LOSS(torch.func.functional_call(tanh(), leaves, (batch[0],)), batch[1])
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def tanh() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def points(count: int, samples: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator)) for _ in range(count)]


def plain_sgd(parameters: list[nn.Parameter], _delay: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-5, atol=1e-6)


def test_2bw_is_the_rule_of_its_paper() -> None:
    """w_{t+1} = w_t - lr g(w_{t-1})."""
    model, batches = tanh(), points(6)
    found = inprocess.train(
        model, LOSS, batches, parts=split_model(model, [2, 4]), way=schedule.TwoBW(), microbatches=4, optimizer=plain_sgd
    )
    weights = [dict(model.state_dict())]
    for number, batch in enumerate(batches):
        grads = gradient(weights[max(number - 1, 0)], batch)
        weights.append({name: w - 0.1 * grads[name] for name, w in weights[-1].items()})
    close(found.weights, weights[-1])


@pytest.mark.parametrize("vertical_sync", [False, True])
def test_pipedream_is_the_rule_of_its_paper(vertical_sync: bool) -> None:
    """w_{t+1} = w_t - lr g(w_0^(t-K+1), …, w_{K-1}^(t)); with vertical sync all of them are of t-K+1."""
    model, batches = tanh(), points(6)
    found = inprocess.train(
        model,
        LOSS,
        batches,
        parts=split_model(model, [2, 4]),
        way=schedule.PipeDream(vertical_sync=vertical_sync),
        microbatches=1,
        optimizer=plain_sgd,
    )
    late = {name: 2 if vertical_sync else 2 - int(name[0]) // 2 for name in model.state_dict()}
    weights = [dict(model.state_dict())]
    for number, batch in enumerate(batches):
        grads = gradient({name: weights[max(number - late[name], 0)][name] for name in late}, batch)
        weights.append({name: w - 0.1 * grads[name] for name, w in weights[-1].items()})
    close(found.weights, weights[-1])


def test_ftpipe_without_delay_is_plain_training_and_predicts_what_momentum_says() -> None:
    model, batches = tanh(), points(7)
    options: dict[str, Any] = {"microbatches": 1, "optimizer": sgd}
    alone = inprocess.train(model, LOSS, batches, parts=split_model(model), way=schedule.FTPipe(), **options)
    flush = inprocess.train(model, LOSS, batches, parts=split_model(model), way=schedule.Flush(), **options)
    assert same(alone.weights, flush.weights)
    stashed = inprocess.train(model, LOSS, batches, parts=split_model(model, [2]), way=schedule.FTPipe(recompute=False), **options)
    w = [dict(model.state_dict())]
    v = {name: torch.zeros_like(p) for name, p in w[0].items()}
    seen = [v]
    for number, batch in enumerate(batches):
        old = max(number - 1, 0)
        ahead = {n: w[old][n] - PLAIN * 0.9 * seen[old][n] if n[0] == "0" else w[number][n] for n in v}
        grads = gradient(ahead, batch)
        v = {name: 0.9 * v[name] + grads[name] for name in v}
        seen.append(v)
        w.append({name: w[-1][name] - PLAIN * v[name] for name in v})
    close(stashed.weights, w[-1])


def test_learning_rate_and_momentum_go_by_the_stages_delay() -> None:
    model = row(tied=False)
    parts = split_model(model, ROW_CUTS[4])
    asked, betas = [], {}

    def rate(delay: int, step: int) -> float:
        asked.append((delay, step))
        return predict.lr_by_delay(0.01, delay, step, 6)

    def nadam(parameters: list[nn.Parameter], delay: int) -> torch.optim.Optimizer:
        betas[delay] = predict.momentum_by_stage(0.9, delay, 4)
        return torch.optim.NAdam(parameters, betas=(betas[delay], 0.999))

    both(model, parts, schedule.PipeDream(), 1, 5, optimizer=nadam, rate=rate)
    assert set(asked) == {(delay, step) for delay in range(4) for step in range(5)}
    assert len({*betas.values()}) == 4


def test_a_weight_of_two_stages_needs_one_delay() -> None:
    model = row()
    parts = split_model(model, ROW_CUTS[4])
    for train in (inprocess.train, reference.train):
        with pytest.raises(
            ValueError, match=r"0\.weight is shared by stages 0, 3, whose delays are 3, 0 updates; take a way with one delay"
        ):
            train(model, LOSS, tokens(1), parts=parts, way=schedule.PipeDream(), microbatches=1, optimizer=sgd)
    both(model, parts, schedule.TwoBW(), 4, 6)
    both(model, parts, schedule.PipeDream(vertical_sync=True), 2, 6)


def test_weights_pulled_in_place_fail_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of all these tests: one stage that takes each version into the same memory."""
    model = row(tied=False)
    held: dict[str, torch.Tensor] = {}
    load = StageRun.load

    def in_place(self: StageRun, number: int, tensors: dict[str, torch.Tensor]) -> None:
        if self.part.index == 0:
            for name, tensor in tensors.items():
                held.setdefault(name, tensor.detach().clone().requires_grad_()).data.copy_(tensor)
            tensors = held
        load(self, number, tensors)

    monkeypatch.setattr(StageRun, "load", in_place)
    options: dict[str, Any] = {"parts": split_model(model, ROW_CUTS[2]), "way": schedule.PipeDream(), "microbatches": 1, "optimizer": sgd}
    with pytest.raises(ChangedInPlace, match="stage 0"):
        inprocess.train(model, LOSS, tokens(4), **options)


@pytest.mark.parametrize("way", [schedule.Flush(), GPipe(), schedule.PipeDream(), schedule.TwoBW(), schedule.FTPipe()], ids=str)
def test_stages_hold_no_more_than_the_formulas_say(way: schedule.TrainingWay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches in flight, and for PipeDream versions of weights under their graphs."""
    stages, microbatches = 4, 1 if isinstance(way, schedule.PipeDream) else 4
    flying, versions = [0] * stages, [0] * stages
    forward = StageRun.forward

    def counting(self: StageRun, *args: Any) -> Any:
        output = forward(self, *args)
        flying[self.part.index] = max(flying[self.part.index], len(self.opened))
        versions[self.part.index] = max(versions[self.part.index], len(set(self.opened.values())))
        return output

    monkeypatch.setattr(StageRun, "forward", counting)
    model = row(tied=False)
    inprocess.train(model, LOSS, tokens(8), parts=split_model(model, ROW_CUTS[stages]), way=way, microbatches=microbatches, optimizer=sgd)
    expected = [4] * stages if way == GPipe() else [stages - k for k in range(stages)]
    assert flying == expected
    if isinstance(way, schedule.PipeDream):
        assert versions == expected
    elif not isinstance(way, schedule.FTPipe):
        assert max(versions) <= 2


def test_a_backward_frees_what_its_forward_kept() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    run = StageRun(split_model(model)[0], {})
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    kept = [weakref.ref(tensor) for tensor in weights.values()]
    run.load(0, weights)
    run.forward(0, arguments(torch.ones(2, 3)), Draw(0, 0, 0), torch.sum)
    run.load(1, dict(model.named_parameters()))
    del weights
    assert all(one() is not None for one in kept)
    run.backward(0)
    assert all(one() is None for one in kept)


def test_training_leaves_the_model_as_it_was() -> None:
    model = row()
    both(model, split_model(model, ROW_CUTS[2]), schedule.TwoBW(), 2, 3)
    assert same(dict(model.state_dict()), dict(row().state_dict())) and all(p.grad is None for p in model.parameters())


def test_frozen_weights_stay() -> None:
    model = row()
    model[3].weight.requires_grad_(False)
    for way in (schedule.Flush(), schedule.FTPipe(predicts=False), schedule.TwoBW()):
        if isinstance(way, schedule.FTPipe):
            model[10].weight = nn.Parameter(model[10].weight.detach().clone())
        found = both(model, split_model(model, ROW_CUTS[2]), way, 2, 3)
        assert torch.equal(found.weights["3.weight"], model[3].weight) and not torch.equal(found.weights["7.weight"], model[7].weight)


def test_schedules_that_wait_for_each_other_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = row()
    backward_first = [StageWork(Direction.BACKWARD, 0), StageWork(Direction.FORWARD, 0)]
    monkeypatch.setattr(inprocess, "work_of", lambda *_: backward_first)
    with pytest.raises(RuntimeError, match=r"stages wait for each other after \[0, 0\] pieces of work"):
        inprocess.train(model, LOSS, tokens(1), parts=split_model(model, [5]), way=schedule.Flush(), microbatches=1, optimizer=sgd)
    with pytest.raises(ValueError, match="minibatch 0 has 16 samples for 17 micro-batches; leave it out"):
        inprocess.train(model, LOSS, tokens(1), parts=split_model(model, [5]), way=schedule.Flush(), microbatches=17, optimizer=sgd)
