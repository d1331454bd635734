"""Both solvers against every plan there is, on random graphs; and what they say of models that everybody knows the answer of."""

from __future__ import annotations

import random
import statistics

import pytest

from psjob.planning.plan import Grid, Way, Wire
from psjob.planning.predict import fits, memory, predict
from psjob.planning.profile import Node, Output, Profile, Work
from psjob.planning.solve import blocks, least_memory, mixed_pipe, most_blocks, noise, partition, solve
from tests.soaking import rotating
from tests.unit.stages_cases import MS, case, chain, every_mixed, every_plan, flat, random_case, random_profile, seconds

MACHINES = [(4, 1), (1, 4), (2, 2), (3, 1), (2, 3), (3, 2)]


@pytest.mark.parametrize("graphs", [80, rotating(500)])
def test_the_programme_is_the_best_of_all_on_random_graphs(graphs: int) -> None:
    chance = random.Random(1)
    none = 0
    for _ in range(graphs):
        given = random_case(chance, random_profile(chance, chance.randrange(2, 13)), MACHINES if chance.random() < 0.3 else MACHINES[:4])
        least = min((seconds(given, plan) for plan in every_plan(given)), default=None)
        plans = partition(given)
        if least is None:
            assert not plans
            none += 1
            continue
        assert fits(given, plans[0])
        assert seconds(given, plans[0]) == pytest.approx(least, rel=1e-9)
    assert none < graphs / 4


@pytest.mark.parametrize("graphs", [12, rotating(40)])
def test_the_answer_is_within_a_twentieth_of_the_best_that_is_played(graphs: int) -> None:
    chance = random.Random(5)
    ratios = []
    for _ in range(graphs):
        given = random_case(chance, random_profile(chance, chance.randrange(2, 8)), MACHINES[:4])
        answer = solve(given)
        if answer is not None:
            near = [answer.plan, *(plan for plan in every_plan(given) if seconds(given, plan) < 1.4 * answer.step)]
            ratios.append(answer.step / min(predict(given, plan).step for plan in near))
    assert max(ratios) <= 1.05 and statistics.median(ratios) == pytest.approx(1)


@pytest.mark.parametrize("graphs", [10, rotating(25)])
def test_the_mixed_pipe_is_within_a_twentieth_of_the_best_of_all(graphs: int) -> None:
    chance = random.Random(9)
    ratios = []
    for _ in range(graphs):
        given = random_case(chance, random_profile(chance, chance.randrange(2, 8)), [(2, 1), (1, 2), (3, 1), (1, 3)])
        least = min((seconds(given, plan) for plan in every_mixed(given)), default=None)
        plans = mixed_pipe(given)
        assert (least is None) == (not plans)
        if least is not None:
            ratios.append(seconds(given, plans[0]) / least)
    assert len(ratios) > graphs * 0.4 and max(ratios) <= 1.05


def test_few_weights_and_wide_activations_call_for_replicas_alone() -> None:
    profile = chain([MS] * 6, sent=10**7, parameters=10**4)
    (stage,) = solve(case(profile, flat(4, Wire(1e9, 5e-5), 1e-9))).plan  # type: ignore[union-attr]
    assert stage.replicas == 4


def test_the_front_is_replicated_where_no_device_holds_it_together_with_heavy_layers() -> None:
    """The shape of VGG16: much work and few weights first, nearly all weights last, as in the 7-1 and 15-1 of the paper."""
    nodes = [
        Node(name=f"conv{i}", forward=4 * MS, backward=8 * MS, parameters=10**5, saved=10**7, outputs=(Output(10**5, (i + 1,)),))
        for i in range(7)
    ]
    nodes.append(Node(name="fc", forward=8 * MS, backward=16 * MS, parameters=4 * 10**8))
    profile = Profile(tuple(nodes))
    grid = Grid(4, 1, Wire(1e9, 5e-5), Wire(1e9, 5e-5), False, 1e-10)
    answer = solve(case(profile, grid, Way("pipedream", accumulate=4), 8.2e8))
    assert answer is not None and [stage.replicas for stage in answer.plan] == [3, 1]
    assert nodes[answer.plan[1].first].name == "fc"


def test_a_model_that_no_device_holds_is_cut_until_it_fits() -> None:
    profile = chain([MS] * 8, sent=1000, parameters=100_000)
    given = case(profile, flat(4), Way("flush", 8), memory=2.2 * 200_000)
    answer = solve(given)
    assert answer is not None and len(answer.plan) == 4 and answer.memory <= given.memory  # type: ignore[operator]
    short = case(profile, flat(4), Way("flush", 8), memory=300_000)
    assert solve(short) is None and solve(short, "mixed") is None
    least = least_memory(short)
    assert 400_000 < least < 450_000 and solve(case(profile, flat(4), Way("flush", 8), memory=least)) is not None


def test_a_mixed_pipe_balances_what_neighbours_cannot() -> None:
    profile = chain([3 * MS, 1 * MS, 1 * MS, 3 * MS, 2 * MS, 2 * MS], sent=1000)
    given = case(profile, flat(2), "pipedream")
    assert seconds(given, partition(given, replicated=False)[0]) == pytest.approx(21 * MS)  # 3 + 1 + 1 | 3 + 2 + 2
    assert seconds(given, mixed_pipe(given)[0]) == pytest.approx(18 * MS)
    mixed = solve(given, "mixed")
    assert mixed is not None and mixed.step < 19.5 * MS and len(mixed.plan) > 2


def test_the_same_seed_gives_the_same_plans() -> None:
    chance = random.Random(3)
    given = case(random_profile(chance, 10), flat(2, Wire(1e9)), "pipedream")
    assert mixed_pipe(given, 4) == mixed_pipe(given, 4)
    assert 0 <= min(noise(s, n) for s in range(9) for n in range(9)) < max(noise(s, n) for s in range(9) for n in range(9)) < 1


def test_many_modules_are_merged_where_that_costs_least() -> None:
    work = Work(chain([MS, 5 * MS, MS, MS, 5 * MS]))
    assert blocks(work, 4) == [0, 1, 2, 4, 5] and blocks(work, 9) == [0, 1, 2, 3, 4, 5]
    long = case(random_profile(random.Random(2), 200), flat(4, Wire(1e9)), "flush")
    answer = solve(long)
    assert answer is not None and len(blocks(long.work, most_blocks(4))) == 65
    assert max(memory(long, answer.plan).values()) == answer.memory


def test_copies_of_a_pipeline_stay_inside_hosts() -> None:
    """Slow links across, weights too large for one device: two hosts, a pipeline of two devices in each, replicas across."""
    profile = chain([MS] * 4, sent=10**6, parameters=10**6)
    given = case(profile, Grid(2, 2, Wire(1e11), Wire(1e7), False, 1e-10), Way("flush", 8), memory=5 * 10**6 + 9 * 10**6)
    answer = solve(given)
    assert answer is not None
    hosts = [{device // 2 for device in stage.devices} for stage in answer.plan]
    assert all(home == {0, 1} for home in hosts)
