"""Both solvers against every plan there is, on random graphs; and what they say of models that everybody knows the answer of.

- The formulas and the played schedule: small tables by hand, and what always holds.

`psjob plan-stages` as a user types it, from a profile; what it refuses, and what it reads of a machine.
"""

from __future__ import annotations

import json
import random
import re
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob.planning.plan import Grid, ModelNode, ModelWork, Output, PipelineWay, PlannedStage, Profile, Tied, Wire
from psjob.planning.predict import Timed, alone, bound_of_plan, fits, in_flight, memory, play_schedule, predict, way_fits
from psjob.planning.solve import block_bounds, least_memory, mixed_pipe, most_blocks, noise, partition, solve
from psjob_client.cli.main import cli
from psjob_client.problems import BadInput
from psjob_client.stages import grid_of, read_profile
from psjob_operator.api.spec import JobSpec
from tests.support.soaking import rotating
from tests.support.typed import CliRunner
from tests.unit.stages_cases import MS, case, chain, every_mixed, every_plan, flat, random_case, random_profile, seconds, straight
from tests.unit.topology_machines import machine, preset, switched, two_hosts

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
        ModelNode(name=f"conv{i}", forward=4 * MS, backward=8 * MS, parameters=10**5, saved=10**7, outputs=(Output(10**5, (i + 1,)),))
        for i in range(7)
    ]
    nodes.append(ModelNode(name="fc", forward=8 * MS, backward=16 * MS, parameters=4 * 10**8))
    profile = Profile(tuple(nodes))
    grid = Grid(4, 1, Wire(1e9, 5e-5), Wire(1e9, 5e-5), False, 1e-10)
    answer = solve(case(profile, grid, PipelineWay("pipedream", accumulate=4), 8.2e8))
    assert answer is not None and [stage.replicas for stage in answer.plan] == [3, 1]
    assert nodes[answer.plan[1].first].name == "fc"


def test_a_model_that_no_device_holds_is_cut_until_it_fits() -> None:
    profile = chain([MS] * 8, sent=1000, parameters=100_000)
    given = case(profile, flat(4), PipelineWay("flush", 8), memory=2.2 * 200_000)
    answer = solve(given)
    assert answer is not None and len(answer.plan) == 4 and answer.memory <= given.memory  # type: ignore[operator]
    short = case(profile, flat(4), PipelineWay("flush", 8), memory=300_000)
    assert solve(short) is None and solve(short, "mixed") is None
    least = least_memory(short)
    assert 400_000 < least < 450_000 and solve(case(profile, flat(4), PipelineWay("flush", 8), memory=least)) is not None


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
    work = ModelWork(chain([MS, 5 * MS, MS, MS, 5 * MS]))
    assert block_bounds(work, 4) == [0, 1, 2, 4, 5] and block_bounds(work, 9) == [0, 1, 2, 3, 4, 5]
    long = case(random_profile(random.Random(2), 200), flat(4, Wire(1e9)), "flush")
    answer = solve(long)
    assert answer is not None and len(block_bounds(long.work, most_blocks(4))) == 65
    assert max(memory(long, answer.plan).values()) == answer.memory


def test_copies_of_a_pipeline_stay_inside_hosts() -> None:
    """Slow links across, weights too large for one device: two hosts, a pipeline of two devices in each, replicas across."""
    profile = chain([MS] * 4, sent=10**6, parameters=10**6)
    given = case(profile, Grid(2, 2, Wire(1e11), Wire(1e7), False, 1e-10), PipelineWay("flush", 8), memory=5 * 10**6 + 9 * 10**6)
    answer = solve(given)
    assert answer is not None
    hosts = [{device // 2 for device in stage.devices} for stage in answer.plan]
    assert all(home == {0, 1} for home in hosts)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 4, 8, 16])
def test_equal_stages_have_the_bubble_of_the_books(stages: int, microbatches: int) -> None:
    profile = chain([1 * MS] * 8)
    plan = straight(profile, *range(8 // stages, 8, 8 // stages))
    given = case(profile, flat(8), PipelineWay("flush", microbatches))
    found = predict(given, plan)
    one = 24 * MS / stages
    assert found.step == pytest.approx((microbatches + stages - 1) * one) == pytest.approx(seconds(given, plan))
    assert found.idle == pytest.approx((stages - 1) / (microbatches + stages - 1))
    endless = case(profile, flat(8), "pipedream")
    assert predict(endless, plan).step == pytest.approx(one) and predict(endless, plan).idle == pytest.approx(0)


def test_replicas_divide_the_time_of_a_slow_stage() -> None:
    profile = chain([3 * MS, 1 * MS])
    plan = (PlannedStage(0, 1, (0, 1, 2)), PlannedStage(1, 2, (3,)))
    given = case(profile, flat(4), "pipedream")
    assert seconds(given, plan) == pytest.approx(3 * MS) == pytest.approx(predict(given, plan).step)
    assert in_flight(given, plan) == [2, 1]  # ⌈4/3⌉: the 3-1 of the paper has two versions of the first stage
    many = case(chain([15 * MS, 1 * MS]), flat(16), "pipedream")
    assert in_flight(many, (PlannedStage(0, 1, tuple(range(15))), PlannedStage(1, 2, (15,)))) == [2, 1]


@pytest.mark.parametrize(
    ("way", "held"),
    [
        # 3 stages of W = 10, A = 100 + 7 that came in (the first: 100 + 5), and a gradient of W.
        (PipelineWay("flush", 8), [20 + 3 * 105, 20 + 2 * 107, 20 + 107]),
        (PipelineWay("flush", 2), [20 + 2 * 105, 20 + 2 * 107, 20 + 107]),
        (PipelineWay("pipedream"), [40 + 3 * 105, 30 + 2 * 107, 20 + 107]),
        (PipelineWay("2bw", accumulate=3), [30 + 3 * 105, 30 + 2 * 107, 30 + 107]),
        (PipelineWay("flush", 8, recompute=True), [20 + 3 * 5 + 100, 20 + 2 * 7 + 100, 20 + 107]),
        (PipelineWay("2bw", accumulate=3, recompute=True), [30 + 3 * 5 + 100, 30 + 2 * 7 + 100, 30 + 107]),
    ],
)
def test_memory_is_that_of_the_formulas(way: PipelineWay, held: list[float]) -> None:
    profile = replace(chain([MS] * 3, sent=7, parameters=10, saved=100), input=5)
    assert list(memory(case(profile, flat(3), way), straight(profile, 1, 2)).values()) == pytest.approx(held)


def test_what_is_frozen_or_tied_is_held_once_a_stage() -> None:
    nodes = [ModelNode(name=f"n{i}", forward=MS, backward=MS, parameters=10, fixed=3) for i in range(3)]
    profile = Profile(tuple(nodes), (Tied(1000, (0, 2)),))
    work = ModelWork(profile)
    assert [work.weights(*pair) for pair in ((0, 3), (0, 1), (1, 2), (1, 3))] == [1030, 1010, 10, 1020]
    assert memory(case(profile, flat(1)), straight(profile)) == {0: 2 * 1030 + 9}


def test_a_cut_sends_what_any_later_module_reads_once() -> None:
    to = [(Output(10, (1, 3)),), (Output(20, (2,)),), (Output(40, (3,)),), ()]
    nodes = [ModelNode(name=f"n{i}", forward=MS, backward=MS, outputs=outputs) for i, outputs in enumerate(to)]
    assert ModelWork(Profile(tuple(nodes), input=5)).crossing == [5, 10, 30, 50, 0]


def test_recomputing_costs_a_forward_pass_but_in_the_last_stage() -> None:
    profile = chain([1 * MS, 1 * MS])
    found = predict(case(profile, flat(2), PipelineWay("flush", 4, recompute=True)), straight(profile, 1))
    assert [(round(one.forward / MS), round(one.backward / MS)) for one in found.stages] == [(1, 3), (1, 2)]


def test_messages_that_nothing_hides_slow_a_pipeline_that_holds_few_micro_batches() -> None:
    profile = chain([1 * MS, 1 * MS], sent=1_000_000)
    given = case(profile, flat(2, Wire(1e9, 0.5 * MS)), "pipedream")  # 1.5 ms a message
    found = bound_of_plan(given, straight(profile, 1))
    assert found.latency == pytest.approx(9 * MS)  # 2 × 3 ms of work, 2 × 1.5 ms on the way
    assert found.pace == pytest.approx(4.5 * MS)  # two in flight; the stages alone would take 3 ms
    assert predict(given, straight(profile, 1)).step == pytest.approx(4.5 * MS)


def test_weights_are_pushed_and_pulled_after_a_flush_and_meanwhile_without_one() -> None:
    profile = chain([1 * MS, 1 * MS], parameters=1_000_000)
    grid = flat(2, push_byte=1e-8)  # 10 ms
    plan = straight(profile, 1)
    assert predict(case(profile, grid, PipelineWay("flush", 4)), plan).step == pytest.approx((5 * 3 + 10) * MS)
    assert predict(case(profile, grid, PipelineWay("flush", 4, accumulate=5)), plan).step == pytest.approx((5 * 3 + 2) * MS)
    assert predict(case(profile, grid, "pipedream"), plan).step == pytest.approx(10 * MS)
    assert predict(case(profile, grid, PipelineWay("pipedream", accumulate=5)), plan).step == pytest.approx(3 * MS)
    assert alone(case(profile, grid, PipelineWay("flush", 4))) == pytest.approx((6 + 20 / 4) * MS)


def test_2bw_needs_a_micro_batch_a_stage() -> None:
    profile = chain([MS] * 3)
    assert [fits(case(profile, flat(3), PipelineWay("2bw", accumulate=n)), straight(profile, 1, 2)) for n in (2, 3)] == [False, True]
    assert way_fits(PipelineWay("pipedream"), 99)


def test_a_shared_uplink_is_one_port() -> None:
    profile = chain([MS, MS], sent=2_500_000)
    plan = (PlannedStage(0, 1, (0, 1)), PlannedStage(1, 2, (2, 3)))
    own, shared = (case(profile, Grid(2, 2, Wire(1e12), Wire(1e9), one, 0.0), PipelineWay("flush", 8)) for one in (False, True))
    assert seconds(own, plan) == pytest.approx((11 + 11) * MS)  # 6 ms of work, 2 × 2.5 on the way; then once more, with 2 × 2 in flight
    assert seconds(shared, plan) == pytest.approx((11 + 7 * 2.5) * MS)
    assert predict(own, plan).step < 0.9 * predict(shared, plan).step == pytest.approx(seconds(shared, plan), rel=0.15)


def test_a_device_with_two_stages_does_one_thing_at_a_time() -> None:
    stages = [Timed(1.0, 2.0, (0,), 3), Timed(1.0, 2.0, (1,), 2), Timed(1.0, 2.0, (0,), 1)]
    line = play_schedule(stages, 6)
    assert len(line.done) == 6 and line.busy == {0: 36.0, 1: 18.0}
    assert line.done[-1] >= 36.0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_a_played_schedule_takes_as_long_as_the_formulas_say(seed: int) -> None:
    chance = random.Random(seed)
    given = random_case(chance, random_profile(chance, chance.randrange(2, 7)), [(3, 1), (1, 3), (2, 2)])
    plans = list(every_plan(given))
    for plan in chance.sample(plans, min(3, len(plans))):
        found = predict(given, plan)
        low, high = (0.7, 1.6) if given.way.flushes else (0.999, 1.6)
        assert low <= found.step / seconds(given, plan) <= high
        assert -1e-9 <= found.idle < 1 and all(-1e-9 <= one.idle <= 1 for one in found.stages)
        assert found.memory == max(memory(given, plan).values())
        busy = sum((one.forward + one.backward) / one.stage.replicas for one in found.stages)
        assert found.microbatch >= busy / given.grid.count * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(1e-4, 1), st.floats(1e-4, 1), st.integers(1, 3)), min_size=1, max_size=5), st.integers(1, 20))
def test_a_schedule_loses_nothing_and_does_nothing_twice(stages: list[tuple[float, float, int]], count: int) -> None:
    device, timed = 0, []
    behind = sum(many for *_, many in stages)
    for forth, back, many in stages:
        timed.append(Timed(forth, back, tuple(range(device, device + many)), -(-behind // many)))
        device, behind = device + many, behind - many
    line = play_schedule(timed, count)
    assert len(line.done) == count and line.done == sorted(line.done)
    assert sum(line.busy.values()) == pytest.approx(count * sum(forth + back for forth, back, _ in stages))
    assert line.done[-1] >= max(-(-count // many) * (forth + back) for forth, back, many in stages) * (1 - 1e-9)


FOUR = ("--preset", "ethernet-10")


def said(*words: str, code: int = 0) -> str:
    told = CliRunner().invoke(cli, ["plan-stages", *words], catch_exceptions=False)
    assert told.exit_code == code, told.output
    return told.output


def refused(*words: str) -> list[str]:
    told = CliRunner().invoke(cli, ["plan-stages", *words])
    assert isinstance(told.exception, BadInput), told.output
    return list(told.exception.lines)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    made = asdict(chain([5 * MS] * 8, sent=100_000, parameters=4_000_000, saved=2_000_000))
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(made | {"format": 1, "samples": 16, "model": "Net"}))
    return str(file)


def test_a_model_is_cut_until_it_fits_and_the_plan_can_be_judged_again(profile: str) -> None:
    text = said("--profile", profile, *FOUR, "--memory", "60MB")
    lines = text.splitlines()
    assert lines[0] == "Net on 4-hosts-ethernet-10: 4 devices, flush of 8 micro-batches; a micro-batch is 16 samples"
    (pick,) = [line for line in lines if line.startswith("pick: ")]
    cuts = pick.split("cuts: ")[1].split(";")[0]
    replicas = pick.split("replicas: ")[1]
    again = said("--profile", profile, *FOUR, "--memory", "60MB", "--cuts", cuts, "--replicas", replicas)
    assert [line for line in again.splitlines() if line.startswith("step of 8")] == [line for line in lines if line.startswith("step of 8")]
    assert "plan: " in again
    spec = yaml.safe_load(text.split("in a PSTrainingJob:\n")[1].split("to judge it again")[0])["spec"]
    assert [stage.get("cut") for stage in spec["stages"]] == [None, *cuts.split(",")]
    assert ",".join(str(stage["replicas"]) for stage in spec["stages"]) == replicas
    container = {"name": "worker", "image": "i", "command": ["c"]}
    job = {"shards": {"replicas": 1}, "workers": {"template": {"spec": {"containers": [container]}}}, **spec}
    assert JobSpec.model_validate(job).workers.replicas == sum(stage["replicas"] for stage in spec["stages"])
    assert text.endswith(f"to judge it again: --cuts {cuts} --replicas {replicas}\n")


def test_without_a_limit_copies_of_the_whole_model_need_no_cut(profile: str) -> None:
    text = said("--profile", profile, "--preset", "ethernet-100")
    assert "pick: no cut; an ordinary job with workers.replicas: 4" in text and "has no field" not in text
    assert any(line.startswith("0      layers.0 … layers.7 (8)  w0,w1,w2,w3  40.0 ms") for line in text.splitlines())


def test_json_has_the_same_plan(profile: str) -> None:
    words = ("--profile", profile, *FOUR, "--way", "2bw", "--memory", "80MB", "--recompute")
    plan = json.loads(said(*words, "-o", "json"))
    assert plan["way"] == {"name": "2bw", "microbatches": None, "accumulate": 4, "recompute": True}
    assert len(plan["stages"]) == len(plan["cuts"]) + 1 == len(plan["replicas"]) and plan["fits"] and plan["memory"] <= 80e6
    assert [name for stage in plan["stages"] for name in stage["modules"]] == [f"layers.{i}" for i in range(8)]
    assert plan["microbatchSeconds"] == plan["stepSeconds"] and 0 <= plan["idle"] < 1
    assert f"cuts: {','.join(plan['cuts'])}" in said(*words)


def test_a_plan_by_hand_that_does_not_fit_is_shown_and_ends_with_1(profile: str) -> None:
    text = said("--profile", profile, *FOUR, "--cuts", "layers.4", "--memory", "20MB", code=1)
    assert "does not fit: a device needs" in text and "--memory is 20.0 MB" in text


def test_the_mixed_solver_shares_devices(profile: str, tmp_path: Path) -> None:
    raw = json.loads(Path(profile).read_text())
    for node, forward in zip(raw["nodes"], (3, 1, 1, 3, 2, 2, 1, 1), strict=True):
        node |= {"forward": forward * MS, "backward": 2 * forward * MS, "parameters": 1000}
    uneven = tmp_path / "uneven.json"
    uneven.write_text(json.dumps(raw))
    text = said("--profile", str(uneven), *FOUR, "--workers", "2", "--solver", "mixed", "--way", "pipedream", "--seed", "3")
    assert "w0" in text and "pick: " in text


@pytest.mark.parametrize(("words", "line"), [
    ((), "no machine given: give one of --machine FILE, --preset NAME and --probe N"),
    (FOUR, "no model given: give one of train.py, train.py:build and --profile FILE"),
    (("train.py", "--profile", "p.json", *FOUR), "train.py and --profile given: give one of train.py"),
    (("nowhere.py", *FOUR), "nowhere.py: there is no such file; give the path of a training script"),
    (("train.py:", *FOUR), "train.py:: nothing is no name of a function; write train.py:build"),
    (("--profile", "nowhere.json", *FOUR), "nowhere.json: cannot be read: No such file"),
    (("--profile", "P", "--preset", "d2l"), "2 machines given (d2l-4-gpus-pcie, 8-v100-nvlink); stages are planned for one"),
    (("--profile", "P", *FOUR, "--way", "gpipe"), "--way gpipe: no way to train stages; known are flush, pipedream, 2bw"),
    (("--profile", "P", *FOUR, "--way", "2bw", "--microbatches", "4"), "--microbatches 4: only --way flush has a number of them"),
    (("--profile", "P", *FOUR, "--microbatches", "0"), "--microbatches 0: must be 1..1024"),
    (("--profile", "P", *FOUR, "--accumulate", "99999"), "--accumulate 99999: must be 1..10000"),
    (("--profile", "P", *FOUR, "--solver", "ilp"), "--solver ilp: no solver; known are pipedream, mixed"),
    (("--profile", "P", *FOUR, "--memory", "much"), "--memory much: must be a size such as 16GiB"),
    (("--profile", "P", *FOUR, "--memory", "1MB"),
        "--memory 1.00 MB: no plan fits on 4 devices, and about 30.7 MB a device would do; give more memory, more devices"),
    (("--profile", "P", *FOUR, "--replicas", "2"), "--replicas 2: goes with --cuts"),
    (("--profile", "P", *FOUR, "--cuts", "layer.4"), "--cuts layer.4: no module of the profile; did you mean layers.4?"),
    (("--profile", "P", *FOUR, "--cuts", "layers.0"), "--cuts layers.0: is the first module, where the first stage begins anyway"),
    (("--profile", "P", *FOUR, "--cuts", "layers.5,layers.2"), "--cuts layers.2: comes before layers.5; name modules in the order"),
    (("--profile", "P", *FOUR, "--cuts", "layers.5", "--replicas", "1"), "--replicas 1: 1 numbers for 2 stages"),
    (("--profile", "P", *FOUR, "--cuts", "layers.5", "--replicas", "0,1"), "--replicas 0,1: each must be at least 1"),
    (("--profile", "P", *FOUR, "--cuts", "layers.5", "--replicas", "4,1"), "--replicas 4,1: 5 devices in all, the machine has 4"),
    (("--profile", "P", *FOUR, "--cuts", "layers.5", "--replicas", "a"), "--replicas a: must be numbers such as 2,1,1"),
    (("--profile", "P", *FOUR, "--way", "2bw", "--accumulate", "1", "--cuts", "layers.5"), "--accumulate 1: 2bw needs at least one"),
    (("--profile", "P", "--preset", "ethernet-10", "--workers", "64"),
        "64-hosts-ethernet-10: 64 devices, stages are planned for at most 32"),
    (("--profile", "P", *FOUR, "--meta"), "--meta: goes with a script"),
    (("cli.py", *FOUR, "--deadline", "0"), "--deadline 0: must be more than 0"),
])  # fmt: skip
def test_what_cannot_be_planned_is_refused_in_a_sentence(profile: str, words: tuple[str, ...], line: str) -> None:
    assert refused(*(profile if word == "P" else word for word in words))[0].startswith(line)


@pytest.mark.parametrize(("change", "line"), [
    ({"format": 2}, "format: Unsupported value: 2: this psjob reads format 1; profile again"),
    ({"nodes": []}, 'nodes: Invalid value: "array": list should have at least 1 item'),
    ({"color": 1}, "color: unknown field; see docs/stages.md"),
    ({"nodes": [{"name": "a", "forward": 1.0}]}, "nodes[0].backward: Required value"),
    ({"nodes": [{"name": "a", "forward": -1.0, "backward": 0.0}]}, "nodes[0].forward: Invalid value: -1.0: input should be greater"),
    ({"nodes": [{"name": "a", "forward": float("nan"), "backward": 0.0}]}, "nodes[0].forward: Invalid value: NaN"),
    ({"nodes": [{"name": "a", "forward": "1", "backward": 0.0}]}, 'nodes[0].forward: Invalid value: "1": input should be a valid number'),
    ({"nodes": [{"name": "a", "forward": 0.0, "backward": 0.0}]}, "nodes: no module takes any time"),
    ({"nodes": [{"name": "a", "forward": 1.0, "backward": 1.0}] * 2}, 'nodes[1].name: Invalid value: "a": is the name of nodes[0] too'),
    ({"nodes": [{"name": "a", "forward": 1.0, "backward": 1.0, "outputs": [{"bytes": 1, "to": [0]}]}]},
        "nodes[0].outputs[0].to: Invalid value: 0: the last module has no later one"),
    ({"tied": [{"bytes": 1, "nodes": [0, 9]}]}, "tied[0].nodes: Invalid value: 9: must be 0..0"),
])  # fmt: skip
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, change: dict[str, Any], line: str) -> None:
    raw = {"format": 1, "nodes": [{"name": "a", "forward": 1.0, "backward": 1.0}]} | change
    found, problems = read_profile(raw)
    assert found is None and str(problems[0]).startswith(line)
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(raw))
    assert refused("--profile", str(file), *FOUR)[0].startswith(f"{file}: {line}")


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "[" * 100_000])
def test_what_is_not_even_an_object_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    (line,) = refused("--profile", str(file), *FOUR)
    assert line.startswith(f"{file}: ") and len(line) < 300


def test_the_file_of_the_docs_is_read() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "stages.md").read_text()
    (text,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    found, problems = read_profile(json.loads(text))
    assert found is not None, problems
    assert [node.name for node in found.nodes] == ["words", "layers.0", "head"]


def test_a_machine_becomes_levels() -> None:
    grid = grid_of(machine(two_hosts()))
    assert (grid.hosts, grid.each, grid.count, grid.shared_uplink) == (2, 4, 8, True)
    assert grid.inside.bandwidth > 10 * grid.across.bandwidth and grid.across.latency > grid.inside.latency
    flat = grid_of(machine(switched(4, "10GB/s", "50us")))
    assert (flat.hosts, flat.each, flat.inside) == (4, 1, flat.across) and flat.across.bandwidth == 1e10
    assert flat.across.seconds(1e7) == pytest.approx(1e-3 + 50e-6)
    assert flat.push_byte == pytest.approx(2 * 0.75 / 1e10) and flat.update(0) == 0  # plan-topology's `ps`, a shard beside each
    box = grid_of(preset("dgx1")[0])
    assert (box.hosts, box.each) == (1, 8) and box.push_byte > 0


def test_hosts_of_different_sizes_are_refused(tmp_path: Path, profile: str) -> None:
    raw = two_hosts()
    raw["hosts"][1]["devices"].remove("b3")
    for switch in raw["switches"]:
        if "b3" in switch["joins"]:
            switch["joins"].remove("b3")
    raw["links"] = [link for link in raw["links"] if "b3" not in link["between"]]
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(raw))
    assert (
        "hosts: they have 3 and 4 devices; stages are planned for hosts of equally many"
        in refused("--profile", profile, "--machine", str(file))[0]
    )
