"""`psjob plan-stages` as a user types it, from a profile; what it refuses, and what it reads of a machine."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from psjob_client.cli.main import cli
from psjob_client.problems import BadInput
from psjob_client.stages import grid_of, read_profile
from psjob_operator.api.spec import JobSpec
from tests.support.typed import CliRunner
from tests.unit.stages_cases import MS, chain
from tests.unit.topology_machines import machine, preset, switched, two_hosts

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


@pytest.mark.parametrize(
    ("words", "line"),
    [
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
        (
            ("--profile", "P", *FOUR, "--memory", "1MB"),
            "--memory 1.00 MB: no plan fits on 4 devices, and about 30.7 MB a device would do; give more memory, more devices",
        ),
        (("--profile", "P", *FOUR, "--replicas", "2"), "--replicas 2: goes with --cuts"),
        (("--profile", "P", *FOUR, "--cuts", "layer.4"), "--cuts layer.4: no module of the profile; did you mean layers.4?"),
        (("--profile", "P", *FOUR, "--cuts", "layers.0"), "--cuts layers.0: is the first module, where the first stage begins anyway"),
        (("--profile", "P", *FOUR, "--cuts", "layers.5,layers.2"), "--cuts layers.2: comes before layers.5; name modules in the order"),
        (("--profile", "P", *FOUR, "--cuts", "layers.5", "--replicas", "1"), "--replicas 1: 1 numbers for 2 stages"),
        (("--profile", "P", *FOUR, "--cuts", "layers.5", "--replicas", "0,1"), "--replicas 0,1: each must be at least 1"),
        (("--profile", "P", *FOUR, "--cuts", "layers.5", "--replicas", "4,1"), "--replicas 4,1: 5 devices in all, the machine has 4"),
        (("--profile", "P", *FOUR, "--cuts", "layers.5", "--replicas", "a"), "--replicas a: must be numbers such as 2,1,1"),
        (("--profile", "P", *FOUR, "--way", "2bw", "--accumulate", "1", "--cuts", "layers.5"), "--accumulate 1: 2bw needs at least one"),
        (
            ("--profile", "P", "--preset", "ethernet-10", "--workers", "64"),
            "64-hosts-ethernet-10: 64 devices, stages are planned for at most 32",
        ),
        (("--profile", "P", *FOUR, "--meta"), "--meta: goes with a script"),
        (("cli.py", *FOUR, "--deadline", "0"), "--deadline 0: must be more than 0"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(profile: str, words: tuple[str, ...], line: str) -> None:
    assert refused(*(profile if word == "P" else word for word in words))[0].startswith(line)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"format": 2}, "format: Unsupported value: 2: this psjob reads format 1; profile again"),
        ({"nodes": []}, 'nodes: Invalid value: "array": list should have at least 1 item'),
        ({"color": 1}, "color: unknown field; see docs/stages.md"),
        ({"nodes": [{"name": "a", "forward": 1.0}]}, "nodes[0].backward: Required value"),
        ({"nodes": [{"name": "a", "forward": -1.0, "backward": 0.0}]}, "nodes[0].forward: Invalid value: -1.0: input should be greater"),
        ({"nodes": [{"name": "a", "forward": float("nan"), "backward": 0.0}]}, "nodes[0].forward: Invalid value: NaN"),
        (
            {"nodes": [{"name": "a", "forward": "1", "backward": 0.0}]},
            'nodes[0].forward: Invalid value: "1": input should be a valid number',
        ),
        ({"nodes": [{"name": "a", "forward": 0.0, "backward": 0.0}]}, "nodes: no module takes any time"),
        ({"nodes": [{"name": "a", "forward": 1.0, "backward": 1.0}] * 2}, 'nodes[1].name: Invalid value: "a": is the name of nodes[0] too'),
        (
            {"nodes": [{"name": "a", "forward": 1.0, "backward": 1.0, "outputs": [{"bytes": 1, "to": [0]}]}]},
            "nodes[0].outputs[0].to: Invalid value: 0: the last module has no later one",
        ),
        ({"tied": [{"bytes": 1, "nodes": [0, 9]}]}, "tied[0].nodes: Invalid value: 9: must be 0..0"),
    ],
)
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
