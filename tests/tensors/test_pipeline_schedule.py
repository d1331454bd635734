"""What a worker of a stage does next: the orders of the papers, over batches that come one by one, of any size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob import contract
from psjob.pipeline import predict
from psjob.pipeline.schedule import (
    Backward,
    Direction,
    Flush,
    Forward,
    FTPipe,
    Latest,
    PipeDream,
    StageSchedule,
    StageWork,
    TrainingWay,
    TwoBW,
    Update,
    Work,
    one_forward_one_backward,
    updates_before,
    way_of,
    without_flush,
)

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
            (wanted,) = predict.of_optimizer(optimizer, delay).values()
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
