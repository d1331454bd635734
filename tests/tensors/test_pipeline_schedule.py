"""What a worker of a stage does next: the orders of the papers, over batches that come one by one, of any size.

Random bits of a pipeline's modules: by seed, step, micro-batch and name, and beside the script's own stream.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from psjob import contract
from psjob.pipeline import predict, random_draws
from psjob.pipeline.cuts import split_model
from psjob.pipeline.random_draws import Calls, Draw, drawn, generators_of, seed_for
from psjob.pipeline.schedule import (
    Backward,
    Flush,
    Forward,
    FTPipe,
    Latest,
    PipeDream,
    StageSchedule,
    TrainingWay,
    TwoBW,
    Update,
    Work,
    way_of,
)
from psjob.pipeline.stage import StageRun, arguments
from tests.support.pipeline_orders import Direction, StageWork, one_forward_one_backward, updates_before, without_flush
from tests.support.pipeline_reference import of_optimizer

F, B = Direction.FORWARD, Direction.BACKWARD


def all_of(schedule: StageSchedule, batches: list[int]) -> list[Work]:
    """A script of batches that are cut in so many parts."""
    done: list[Work] = []
    for microbatches in batches:
        done += [*schedule.batch(microbatches), *schedule.step()]
    return [*done, *schedule.drain()]


def passes(work: list[Work], microbatches: int) -> list[StageWork]:
    """Forwards and backwards, micro-batches counted over the run."""
    return [
        StageWork(F if isinstance(one, Forward) else B, one.batch * microbatches + one.micro) for one in work if not isinstance(one, Update)
    ]


@pytest.mark.parametrize("replicas", [(1, 1), (1, 1, 1, 1), (2, 1, 1), (1, 3)])
@pytest.mark.parametrize("each", [1, 2])
def test_batches_that_come_one_by_one_are_worked_on_as_in_one_run(replicas: tuple[int, ...], each: int) -> None:
    microbatches = 6 * each
    for stage, count in enumerate(replicas):
        for replica in range(count):
            late = StageSchedule(PipeDream(), stage, replicas, replica)
            assert passes(all_of(late, [microbatches] * 5), microbatches) == without_flush(stage, replicas, 5 * microbatches, replica)
    flush = StageSchedule(Flush(), 1, (1, 1, 1))
    both = one_forward_one_backward(1, 3, microbatches) + one_forward_one_backward(1, 3, microbatches, microbatches)
    assert passes(all_of(flush, [microbatches] * 2), microbatches) == both


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.sampled_from([Flush(), TwoBW(), PipeDream(), FTPipe()]),
    st.data(),
)
def test_whatever_the_batches_each_is_updated_once_and_in_order(
    batches: list[int], replicas: list[int], way: TrainingWay, data: st.DataObject
) -> None:
    """Also where batches have other sizes, or no micro-batch for this replica."""
    stage = data.draw(st.integers(0, len(replicas) - 1))
    replica = data.draw(st.integers(0, replicas[stage] - 1))
    first = data.draw(st.integers(0, 5))
    work = all_of(StageSchedule(way, stage, replicas, replica, first), batches)
    assert [one.batch for one in work if isinstance(one, Update)] == [first + number for number in range(len(batches))]
    opened: set[tuple[int, int]] = set()
    made = first
    for one in work:
        match one:
            case Forward():
                assert made >= way.awaits(one.batch) or one.batch == first
                opened.add((one.batch, one.micro))
            case Backward():
                opened.remove((one.batch, one.micro))
            case Update():
                assert not any(batch <= one.batch for batch, _ in opened)
                made += 1
    assert not opened
    own = sum(len(range(replica, count, replicas[stage])) for count in batches)
    assert sum(isinstance(one, Forward) for one in work) == own


def test_an_update_waits_for_the_step_of_its_batch() -> None:
    schedule = StageSchedule(PipeDream(), 1, (1, 1))
    assert list(schedule.batch(2)) == [Forward(0, 0), Backward(0, 0), Forward(0, 1), Backward(0, 1)]
    assert schedule.updates == 0
    assert list(schedule.step()) == [Update(0)] and schedule.updates == 1


def test_a_manifest_names_a_way_or_is_refused() -> None:
    assert way_of("flush") == Flush() and way_of("flush", "recompute") == Flush(recompute=True)
    assert way_of("2bw") == TwoBW() and way_of("pipedream") == PipeDream()
    assert way_of("pipedream", "recompute", "nesterov") == FTPipe()
    taken = 0
    for schedule in contract.SCHEDULES:
        for weights in contract.STAGE_WEIGHTS:
            for prediction in contract.PREDICTIONS:
                kept = weights in {"flush": ("stash", "recompute"), "2bw": ("stash",)}.get(schedule, contract.STAGE_WEIGHTS)
                predicted = prediction == "none" or (schedule == "pipedream" and weights in ("stash", "recompute"))
                if not (kept and predicted):
                    with pytest.raises(ValueError, match=r"take (schedule: pipedream|weights: stash or recompute)"):
                        way_of(schedule, weights, prediction)
                    continue
                way, taken = way_of(schedule, weights, prediction), taken + 1
                assert (way.flushes, way.recompute, way.predicts) == (schedule == "flush", weights == "recompute", prediction == "nesterov")
    assert taken == 9
    assert way_of("pipedream", "latest") == Latest() and way_of("pipedream", "vertical") == PipeDream(vertical_sync=True)
    with pytest.raises(ValueError, match="one of them is not known"):
        way_of("gpipe")


@pytest.mark.parametrize("delay", [0, 1, 3, 7])
def test_the_last_step_alone_tells_where_momentum_leads(delay: int) -> None:
    for kind, rule, options in (
        (torch.optim.SGD, "sgd", {"momentum": 0.9, "nesterov": False, "weight_decay": 0.0}),
        (torch.optim.Adam, "adam", {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0}),
    ):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 64))
        optimizer = kind([p], lr=0.02, **({"momentum": 0.9} if rule == "sgd" else {}))
        draw = torch.Generator().manual_seed(1)
        for step in range(1, 30):
            before = p.detach().clone()
            p.grad = torch.randn(64, generator=draw) + 0.5
            optimizer.step()
            (wanted,) = of_optimizer(optimizer, delay).values()
            found = predict.from_step(rule, before, p.detach(), step, options, delay)
            torch.testing.assert_close(found, wanted, atol=2e-6, rtol=2e-4)
    with pytest.raises(ValueError, match=r"weight_decay=0\.1 cannot be predicted; leave weight_decay out"):
        predict.from_step("sgd", p, p, 1, {"momentum": 0.9, "weight_decay": 0.1}, delay)
    with pytest.raises(ValueError, match=r"momentum is 1\.0, must be from 0 to below 1"):
        predict.from_step("sgd", p, p, 1, {"momentum": 1.0, "weight_decay": 0.0}, delay)
    with pytest.raises(ValueError, match="weights of lion cannot be predicted; known are sgd, adam"):
        predict.from_step("lion", p, p, 1, {}, delay)


@settings(max_examples=40, deadline=None)
@given(replicas=st.lists(st.integers(1, 3), min_size=1, max_size=5), data=st.data())
def test_the_formula_counts_the_updates_before_each_forward(replicas: list[int], data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, len(replicas) - 1))
    replica = data.draw(st.integers(0, replicas[stage] - 1))
    microbatches = replicas[stage] * data.draw(st.integers(1, 4))
    schedule = StageSchedule(Latest(), stage, replicas, replica)
    updates = 0
    for one in all_of(schedule, [microbatches] * 8):
        if isinstance(one, Forward):
            assert updates_before(stage, replicas, microbatches, one.batch, one.micro) == updates
        updates += isinstance(one, Update)
    assert updates == 8


torch.set_num_threads(1)
ONES = torch.ones(64, 8)


class Noisy(nn.Module):
    """Draws by a function, by a module twice, and by a function again."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([nn.functional.dropout(x, 0.5), self.drop(x), self.drop(x), nn.functional.dropout(x, 0.5)])


def run(model: nn.Module, draw: Draw, cuts: Any = (), x: torch.Tensor = ONES) -> torch.Tensor:
    value: Any = arguments(x)
    for part in split_model(model, cuts):
        value = part.run(dict(model.named_parameters()), dict(model.named_buffers()), value, draw, Calls())
    assert isinstance(value, torch.Tensor)
    return value


def test_bits_depend_on_each_part_of_the_counter_and_come_again() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    base = run(model, Draw(1, 2, 3))
    assert torch.equal(base, run(model, Draw(1, 2, 3))) and 0.3 < float((base == 0).float().mean()) < 0.7
    for other in (Draw(2, 2, 3), Draw(1, 3, 3), Draw(1, 2, 4)):
        assert not torch.equal(base, run(model, other))


def test_bits_depend_on_the_name_and_not_on_the_cuts() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5), nn.Dropout(0.5))
    whole = run(model, Draw(0, 0, 0))
    assert torch.equal(whole, run(model, Draw(0, 0, 0), (1,))) and torch.equal(whole, run(model, Draw(0, 0, 0), (1, 2)))
    assert float((whole != 0).float().mean()) < 0.25  # three different masks, not one three times


def test_each_draw_of_a_module_has_bits_of_its_own() -> None:
    masks = run(Noisy(), Draw(0, 0, 0)) != 0
    assert all(not torch.equal(masks[i], masks[j]) for i in range(4) for j in range(i))


def test_one_module_in_two_places_draws_by_its_place() -> None:
    drop = nn.Dropout(0.5)
    models = [nn.Sequential(drop, nn.Identity(), drop), nn.Sequential(nn.Sequential(drop, drop), nn.Identity())]
    for model, cuts in zip(models, ((2,), ("0.1",)), strict=True):
        whole, cut = run(model, Draw(0, 0, 0)), run(model, Draw(0, 0, 0), cuts)
        assert torch.equal(whole, cut) and float((whole != 0).float().mean()) < 0.35


@pytest.mark.parametrize("fails", [False, True])
def test_the_scripts_own_stream_is_left_where_it_was(fails: bool) -> None:
    class Maybe(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.dropout(x, 0.5)
            if fails:
                raise ZeroDivisionError
            return x

    torch.manual_seed(4)
    state = torch.get_rng_state()
    try:
        run(nn.Sequential(Noisy(), Maybe()), Draw(0, 0, 0), (1,), torch.ones(4, 2))
        assert not fails
    except ZeroDivisionError:
        assert fails
    assert torch.equal(torch.get_rng_state(), state)
    assert not nn.modules.module._global_forward_pre_hooks and not nn.modules.module._global_forward_hooks


class Saving(nn.Module):
    """Keeps no activations of its block and runs it again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


@pytest.mark.parametrize(
    "inner", [lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh())]
)
def test_activation_checkpointing_draws_the_same_bits_again(inner: Any) -> None:
    def gradient(saving: bool) -> torch.Tensor:
        torch.manual_seed(0)
        block = inner()
        model = nn.Sequential(nn.Linear(8, 8), Saving(block) if saving else nn.ModuleDict({"block": block}))
        if not saving:
            model[1].forward = block.forward  # type: ignore[assignment]
        run = StageRun(split_model(model)[0], {})
        run.load(0, dict(model.named_parameters()))
        run.forward(0, arguments(ONES), Draw(0, 0, 0), torch.sum)
        return run.backward(0)[1]["1.block.0.weight"]

    assert torch.equal(gradient(True), gradient(False))


def test_activation_checkpointing_of_a_module_that_is_called_twice_is_refused() -> None:
    class Twice(Saving):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(super().forward(x))

    model = nn.Sequential(Twice(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))))
    run = StageRun(split_model(model)[0], {})
    run.load(0, dict(model.named_parameters()))
    run.forward(0, arguments(ONES), Draw(0, 0, 0), torch.sum)
    with pytest.raises(RuntimeError, match=r"0\.block\.1 is called 2 times in a forward, and activation checkpointing calls it again"):
        run.backward(0)


def test_seeds_are_fixed_for_ever() -> None:
    """A run that continues in a later version draws what it would have drawn."""
    assert seed_for(1, 2, 3, "layers.0", 0, 0) == 4150260176314746304
    assert seed_for("1", 2) != seed_for(1, "2") and seed_for("a", "b") != seed_for("ab") and seed_for(1, 23) != seed_for(12, 3)


def test_generators_are_those_of_the_tensors_of_weights_and_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part without weights draws where its input lies."""
    asked: list[set[str]] = []
    own = random_draws.generators_of
    monkeypatch.setattr(random_draws, "generators_of", lambda devices: asked.append({d.type for d in devices}) or own([]))
    run(nn.Sequential(nn.Dropout(0.5)), Draw(0, 0, 0), x=ONES.to("meta"))
    run(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), Draw(0, 0, 0), cuts=(1,))
    assert asked == [{"meta"}, {"cpu"}]


def test_generators_of_other_devices_are_refused() -> None:
    assert generators_of([torch.device("cpu"), torch.device("meta")]) == [torch.default_generator]
    with pytest.raises(ValueError, match="random draws on device mps cannot be repeated; use cpu, cuda or xpu"):
        generators_of([torch.device("mps")])


def test_a_graphs_operator_draws_from_the_scripts_stream_outside_a_part() -> None:
    torch.manual_seed(0)
    first = drawn(torch.ops.aten.dropout.default, "a", 0, 0, ONES, 0.5, True)
    torch.manual_seed(0)
    assert torch.equal(first, nn.functional.dropout(ONES, 0.5))
