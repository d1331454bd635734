"""Where psjob cuts a model by itself: blocks that a stage may begin with, plans of given replicas, and what is refused."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import psjob as ps
from psjob.api import auto_cuts
from psjob.modes.stages import ChosenCuts, Stages
from psjob.pipeline.cuts import beginnings
from psjob.planning.plan import ModelNode, ModelWork, Output, PipelineWay, Plan, PlannedStage, Profile, Tied, in_blocks
from psjob.planning.predict import Case, fits, predict
from psjob.planning.solve import solve
from psjob.process.config import Config
from psjob.process.errors import Refused
from tests.live.live_shards import NEVER


def node(name: str, forward: float = 1.0, parameters: int = 4, to: tuple[int, ...] = ()) -> ModelNode:
    return ModelNode(name, forward, 2 * forward, parameters, saved=8, outputs=(Output(16, to),) if to else ())


def test_modules_that_train_nothing_belong_to_the_block_before_them() -> None:
    profile = Profile((node("0", to=(1,)), node("1", parameters=0, to=(2,)), node("2", to=(3,)), node("3", parameters=0)))
    made = in_blocks(profile, lambda i: profile.nodes[i].name)
    assert [one.name for one in made.nodes] == ["0", "2"]
    assert [one.forward for one in made.nodes] == [2.0, 2.0] and [one.saved for one in made.nodes] == [16, 16]
    assert made.nodes[0].outputs == (Output(16, (1,)),) and made.nodes[1].outputs == ()


@pytest.mark.parametrize(
    ("parameters", "cuts", "blocks"),
    [
        ([4, 4, 4], ["a", "b", "c"], ["a", "b", "c"]),
        ([4, 4, 4], ["a", None, "c"], ["a", "c"]),
        ([0, 4, 4], ["a", "b", "c"], ["a", "c"]),
        ([4, 0, 0], ["a", "b", "c"], ["a"]),
        ([4, 0, 4], ["a", "b", None], ["a", "b"]),
        ([4, 4, 4], ["a", "enc", None], ["a", "enc"]),
    ],
)
def test_blocks(parameters: list[int], cuts: list[str | None], blocks: list[str]) -> None:
    profile = Profile(tuple(node(name, parameters=size) for name, size in zip("abc", parameters, strict=True)))
    assert [one.name for one in in_blocks(profile, lambda i: cuts[i]).nodes] == blocks


def test_tied_weights_count_as_trained_and_stay_tied() -> None:
    profile = Profile((node("a", parameters=0), node("b"), node("c", parameters=0)), (Tied(100, (0, 2)),))
    made = in_blocks(profile, lambda i: profile.nodes[i].name)
    assert [one.name for one in made.nodes] == ["a", "b", "c"] and made.tied == (Tied(100, (0, 2)),)
    inside = in_blocks(profile, lambda i: None)
    assert inside.tied == () and inside.nodes[0].parameters == 104


def test_places_where_a_stage_can_begin() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), enc=inner, b=nn.TransformerEncoderLayer(2, 1, 2)))
    assert beginnings(model, ["a", "enc", "b.self_attn", "b.linear1"]) == ["a", "enc", "b", None]
    assert beginnings(model, ["a", "enc.0", "enc.1", "b"]) == ["a", "enc.0", "enc.1", "b"]
    assert beginnings(nn.TransformerEncoderLayer(2, 1, 2), ["self_attn", "linear1"]) == ["self_attn", "linear1"]


def plans(count: int, replicas: tuple[int, ...]) -> list[Plan]:
    found = []
    for cuts in itertools.combinations(range(1, count), len(replicas) - 1):
        ends, at, stages = itertools.pairwise([0, *cuts, count]), 0, []
        for (first, end), many in zip(ends, replicas, strict=True):
            stages.append(PlannedStage(first, end, tuple(range(at, at + many))))
            at += many
        found.append(tuple(stages))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_given_replicas_the_answer_is_near_the_best_of_all(seed: int) -> None:
    """Within a twentieth, as without given replicas; with a limit of memory it fits, and there is one where any plan fits."""
    chance = random.Random(seed)
    count = chance.randrange(3, 10)
    nodes = tuple(
        ModelNode(str(i), one := chance.uniform(1e-4, 1e-2), 2 * one, chance.randrange(10**6), saved=chance.randrange(10**6),
             outputs=(Output(chance.choice([10**4, 10**6]), (i + 1,)),) if i + 1 < count else ())
        for i in range(count)
    )  # fmt: skip
    replicas = tuple(chance.choice([1, 1, 2, 3]) for _ in range(chance.randrange(2, min(count, 4) + 1)))
    grid = auto_cuts.Grid(sum(replicas), 1, auto_cuts.LINK, auto_cuts.LINK, False, 2 / auto_cuts.LINK.bandwidth)
    way = chance.choice([PipelineWay("flush", 8), PipelineWay("pipedream", accumulate=8), PipelineWay("2bw", accumulate=8)])
    case = Case(ModelWork(Profile(nodes)), grid, way, chance.choice([None, 1.2e7]))
    every = [predict(case, plan) for plan in plans(count, replicas) if fits(case, plan)]
    answer = solve(case, shape=replicas)
    assert (answer is None) == (not every)
    if answer is not None:
        assert tuple(stage.replicas for stage in answer.plan) == replicas and fits(case, answer.plan)
        assert answer.step <= 1.05 * min(one.step for one in every)


def test_more_stages_than_modules_are_refused() -> None:
    profile = Profile((node("a"), node("b")), model="Net")
    with pytest.raises(Refused, match=r"Net has 2 modules that a stage could begin with.*spec.stages has 3 stages"):
        auto_cuts.solved(profile, (1, 1, 1), PipelineWay("flush", 4), None)


def test_a_limit_that_nothing_fits_is_refused() -> None:
    profile = Profile((node("a", parameters=1 << 20), node("b", parameters=1 << 20)))
    with pytest.raises(Refused, match=r"no cuts into 2 stages fit workers with 1 MiB for the model, and the fastest ones need 2 MiB"):
        auto_cuts.solved(profile, (1, 1), PipelineWay("flush", 4), float(1 << 20))
    assert len(auto_cuts.solved(profile, (1, 1), PipelineWay("flush", 4), float(3 << 20)).plan) == 2


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({}, "expected a list"),
        ({"cuts": "ab", "seconds": 1.0}, "expected a list"),
        ({"cuts": ["a", 1], "seconds": 1.0}, "expected a list"),
        ({"cuts": ["a", "a"], "seconds": 1.0}, "different"),
        ({"cuts": ["a", "x" * 513], "seconds": 1.0}, "expected a list"),
        ({"cuts": ["a"], "seconds": 1.0}, "1 cuts were chosen"),
        ({"cuts": ["a", "b"], "seconds": float("nan")}, "a number from 0"),
        ({"cuts": ["a", "b"], "seconds": True}, "a number from 0"),
    ],
)
def test_what_is_no_choice(raw: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ChosenCuts.from_json(raw, 3)


def test_a_choice_is_read_back() -> None:
    chosen = ChosenCuts(("a", "b"), 0.5)
    assert chosen.told(["x", "y", "z"]) == (
        "cuts: auto cuts the model at a, b; a step is predicted to take 500 ms; "
        'to pin that, spec.stages: {name: y, cut: "a"}, {name: z, cut: "b"}'
    )
    assert ChosenCuts.from_json(chosen.to_json(), 3) == chosen


def config(*replicas: int, **more: Any) -> Config:
    made = Config("job", "run", "0" * 64, "sync", 5, None, sum(replicas), (), NEVER, "AllWorkers", 10.0, 60.0)
    return replace(made, stages=Stages(replicas), **more)


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 8))


def test_choosing_leaves_the_model_and_the_random_numbers_as_they_were() -> None:
    model, x = net(), torch.ones(4, 8)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    stream = torch.get_rng_state()
    chosen = auto_cuts.choose_cuts(config(1, 1), model, 4, ((x,), {}), None)
    assert chosen.cuts[0] in ("1", "4", "5") and chosen.seconds > 0
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and torch.equal(stream, torch.get_rng_state())


class Counts(nn.Module):
    """Its buffer is another tensor after each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.inner(x)


def test_choosing_puts_back_a_buffer_that_was_replaced() -> None:
    """Worker 0 alone chooses: its model would differ from that of all others."""
    model = nn.Sequential(Counts(), Counts())
    held = [id(one) for one in model.buffers()]
    auto_cuts.choose_cuts(config(1, 1), model, 4, ((torch.ones(4, 8),), {}), None)
    assert [float(one) for one in model.buffers()] == [0.0, 0.0] and [id(one) for one in model.buffers()] == held


def test_a_model_that_would_not_fit_is_counted_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    model[5].weight = model[0].weight
    monkeypatch.setattr(auto_cuts.system, "memory_left", lambda: 100)
    made = auto_cuts.profile(model, ((torch.ones(4, 8),), {}))
    assert made.estimated and [tied.bytes for tied in made.tied] == [256]
    assert not any(one.is_meta for one in model.parameters())


class Adds(nn.Module):
    """No nn.Sequential: it is exported to be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_a_model_that_must_be_exported_is_cut_too() -> None:
    chosen = auto_cuts.choose_cuts(config(1, 1), Adds(), 4, ((torch.ones(4, 8),), {}), None)
    assert chosen.cuts[0] in ("layers.1", "layers.2", "layers.3")


def test_an_example_that_does_not_go_through_is_refused() -> None:
    with pytest.raises(Refused, match=r"cannot run Sequential on its example: RuntimeError"):
        auto_cuts.choose_cuts(config(1, 1), net(), 4, ((torch.ones(4, 9),), {}), None)


def test_a_name_that_shard_0_would_not_keep_is_refused_at_once() -> None:
    layers = OrderedDict((letter * 600, nn.Linear(8, 8)) for letter in "ab")
    with pytest.raises(Refused, match=r'cuts="auto": cuts are .*expected a list of different names of modules; name the cuts'):
        auto_cuts.choose_cuts(config(1, 1), nn.Sequential(layers), 4, ((torch.ones(4, 8),), {}), None)


@pytest.mark.parametrize(
    ("more", "way"),
    [
        ({}, PipelineWay("flush", 6)),
        ({"stage_weights": "recompute"}, PipelineWay("flush", 6, recompute=True)),
        ({"schedule": "2bw"}, PipelineWay("2bw", accumulate=6)),
        ({"schedule": "pipedream"}, PipelineWay("pipedream", accumulate=6)),
    ],
)
def test_the_way_is_the_jobs(more: dict[str, Any], way: PipelineWay) -> None:
    assert auto_cuts.planned_way(config(1, 1, **more), 6) == way


def test_outside_a_job_it_is_plain_torch() -> None:
    """With the numbers of any cuts."""

    def grads(cuts: Any) -> list[torch.Tensor]:
        model = net()
        ps.pipeline(model, nn.functional.mse_loss, cuts=cuts, microbatches=2, seed=3).step(torch.ones(4, 8), torch.zeros(4, 8))
        return [p.grad for p in model.parameters() if p.grad is not None]

    one, other = grads("auto"), grads([1, 4])
    assert len(one) == 8 and all(map(torch.equal, one, other))
