"""Machines: what a description may say, the ways through it, and the rings in it.

`psjob plan-topology` as a user types it, and the probe on this machine's own loopback.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob_client.cli.main import cli
from psjob_client.problems import BadInput
from psjob_client.topology.choose import lane_disjoint_rings, widest_ring
from psjob_client.topology.machine import (
    DOUBLE_LINKS,
    FIGURES,
    SINGLE_LINKS,
    Figure,
    NoWay,
    Routes,
    parse_rate,
    parse_seconds,
    parse_size,
    read_machine,
    show_bytes,
    show_seconds,
)
from tests.support.typed import CliRunner
from tests.unit.topology_machines import machine, meshed, preset, problems, switched, two_hosts


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (parse_rate, "16GB/s", 16e9),
        (parse_rate, "10Gb/s", 1.25e9),
        (parse_rate, "1.5 MiB/s", 1.5 * 2**20),
        (parse_rate, "8kbps", 1e3),
        (parse_rate, 5, 5.0),
        (parse_size, "160MB", 160e6),
        (parse_size, "64KiB", 65536.0),
        (parse_size, "1e3", 1e3),
        (parse_seconds, "50us", 50e-6),
        (parse_seconds, "1.5 ms", 1.5e-3),
        (parse_seconds, "0", 0.0),
    ],
)
def test_quantities_are_read_as_people_write_them(read: Any, text: object, value: float) -> None:
    assert read(text) == pytest.approx(value)


@pytest.mark.parametrize(
    "given", ["", "fast", "-1", "16GB", "16 GB/s/s", "1e99999", "nan", "9" * 400, True, None, [], float("nan"), -1.0, 0]
)
def test_what_is_no_bandwidth_is_refused(given: object) -> None:
    with pytest.raises(ValueError):
        parse_rate(given)


@given(st.floats(1, 1e15))
def test_what_is_shown_can_be_read_again(value: float) -> None:
    assert parse_size(show_bytes(value)) == pytest.approx(value, rel=6e-3)
    assert parse_seconds(show_seconds(value / 1e9)) == pytest.approx(value / 1e9, rel=6e-3, abs=1e-11)


@pytest.mark.parametrize(("change", "said"), [
    ({"name": "x y"}, 'name: Invalid value: "x y": must be a name of letters'),
    ({"hosts": ["w0"], "switches": []}, "hosts: 1 devices in all, must be 2..128"),
    ({"hosts": ["w0", "w0"], "switches": []}, "the name w0 stands for 2 things"),
    ({"switches": [{"name": "s", "joins": ["w0", "w1"], "bandwidth": 0}]}, "switches[0].bandwidth: Invalid value: 0: must be more than 0"),
    ({"links": [{"between": ["w0", "w8"], "bandwidth": 1}]}, 'links[0].between: Invalid value: "w8": names nothing of this machine'),
    ({"links": [{"between": ["w0", "w0"], "bandwidth": 1}]}, "links[0].between: names w0 twice"),
    ({"links": [{"between": ["w0", "s"], "bandwidth": 1}]}, "links: 2 links between s and w0; write one link with `lanes`"),
    ({"links": [{"between": ["w0", "w1"], "bandwidth": "fast"}]}, 'links[0].bandwidth: Invalid value: "fast": must be a bandwidth such as'),
    ({"links": [{"between": ["w0", "w1"], "bandwidth": 1, "lane": 2}]}, "links[0].lane: unknown field"),
    ({"links": [{"between": ["w0", "w1"], "bandwidth": 1, "duplex": "no"}]}, "links[0].duplex: Unsupported value"),
    ({"links": [{"between": ["w0", "w1"]}]}, "links[0].bandwidth: Required value"),
    ({"links": 5}, "links: Invalid value: 5"),
    ({"total": -1}, "total: Invalid value: -1"),
])  # fmt: skip
def test_a_description_that_cannot_be_is_refused_in_a_sentence(change: dict[str, Any], said: str) -> None:
    assert any(told.startswith(said) for told in problems(switched(3) | change)), problems(switched(3) | change)


def test_a_cpu_has_no_more_lanes_than_it_has() -> None:
    gpus = ["g0", "g1"]
    links = [{"between": [gpu, "cpu"], "bandwidth": "pcie3-lane", "lanes": 16} for gpu in gpus]
    raw = {"name": "m", "hosts": [{"name": "h", "devices": gpus, "cpu": "cpu", "cpuLanes": 24}], "links": links}
    assert problems(raw)[0].startswith("hosts[0].cpuLanes: Invalid value: 24: its links have 32 lanes together, the CPU has 24; describe")
    raw["links"] = [links[0] | {"lanes": 12}, links[1] | {"lanes": 12}]
    assert problems(raw) == []


@settings(max_examples=30)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda part: (
            st.lists(part, max_size=3) | st.dictionaries(st.sampled_from(["name", "hosts", "links", "between", "x"]), part, max_size=3)
        ),
        max_leaves=12,
    )
)
def test_whatever_is_given_ends_in_sentences(raw: Any) -> None:
    found, told = read_machine(raw)
    assert found is None and told and all("\n" not in str(problem) for problem in told)


@pytest.mark.parametrize("raw", [switched(3, servers=["ps0"]), meshed(4), two_hosts(), *[given.to_manifest() for given in preset("d2l")]])
def test_a_machine_that_was_written_is_read_as_it_was(raw: dict[str, Any]) -> None:
    assert machine(machine(raw).to_manifest()) == machine(raw)


def test_measured_figures_hold_in_place_of_the_named_ones() -> None:
    figures = FIGURES | {"ethernet-10": Figure(1.1e9, 20e-6, "measured")}
    found, _ = read_machine(
        switched(2, "ethernet-10") | {"switches": [{"name": "s", "joins": ["w0", "w1"], "bandwidth": "ethernet-10"}]}, figures
    )
    assert found is not None
    way = Routes(found).pace([("w0", "w1")])
    assert (way.bandwidth, way.latency) == pytest.approx((1.1e9, 20e-6))


def test_flows_share_the_links_that_they_meet_on() -> None:
    routes = Routes(machine(two_hosts("1GB/s")))
    assert routes.pace([("a0", "a1")]).bandwidth == 16e9
    assert routes.pace([("a0", "b0")]).bandwidth == 1e9
    assert routes.pace([("a0", "b0"), ("a1", "b1")]).bandwidth == 0.5e9
    assert routes.pace([("a0", "b0"), ("b1", "a1")]).bandwidth == 1e9  # the other direction
    assert routes.pace([("a0", "b0")]).latency == pytest.approx(55e-6)  # half of each PCIe switch's 5 and the uplink's 50


def test_a_half_duplex_link_is_shared_by_its_directions() -> None:
    raw = switched(2) | {"switches": [], "links": [{"between": ["w0", "w1"], "bandwidth": 8, "duplex": "half"}]}
    assert Routes(machine(raw)).pace([("w0", "w1"), ("w1", "w0")]).bandwidth == 4


def test_all_flows_together_are_held_to_the_total() -> None:
    assert Routes(machine(meshed(4) | {"total": 1e9})).pace([("w0", "w1"), ("w2", "w3")]).bandwidth == 0.5e9


def test_devices_pass_nothing_on() -> None:
    raw = {
        "name": "chain",
        "hosts": ["a", "b", "c"],
        "links": [{"between": ["a", "b"], "bandwidth": 1}, {"between": ["b", "c"], "bandwidth": 1}],
    }
    with pytest.raises(NoWay, match="nothing joins a and c"):
        Routes(machine(raw)).way("a", "c")


def test_a_pair_that_was_measured_is_held_to_it_and_the_rest_is_not() -> None:
    routes = Routes(machine(switched(3) | {"measured": [{"between": ["w0", "w2"], "bandwidth": "10MB/s", "latency": "1ms"}]}))
    assert (routes.width("w0", "w2"), routes.width("w2", "w0"), routes.width("w0", "w1")) == (10e6, 10e6, 1e9)
    assert routes.pace([("w0", "w1"), ("w0", "w2")]).latency == 1e-3


def test_more_cannot_be_measured_than_the_ways_carry() -> None:
    routes = Routes(machine(switched(3) | {"measured": [{"between": ["w0", "w2"], "bandwidth": "2GB/s"}]}))
    with pytest.raises(NoWay, match=r"w0:w2 was measured at 2.00 GB/s, .*described with 1.00 GB/s; .*--measured w0:s=2.00GB/s"):
        routes.check(["w0", "w1", "w2"])


def test_a_measured_link_takes_the_place_of_its_description() -> None:
    routes = Routes(machine(switched(2) | {"measured": [{"between": ["w0", "s"], "bandwidth": "2GB/s"}]}))
    assert (routes.width("w0", "w1"), routes.pace([("w0", "s")]).bandwidth) == (1e9, 2e9)


NVIDIA_SMI = ["01122000", "10210200", "12020010", "21200001", "20000112", "02001021", "00101202", "00012120"]
"""NVLinks between each pair of a p3.16xlarge's GPUs, as `nvidia-smi topo -m` has them."""


def nvlinks(rows: list[str]) -> dict[frozenset[int], int]:
    return {frozenset((i, j)): int(lanes) for i, row in enumerate(rows) for j, lanes in enumerate(row) if lanes != "0"}


def text_links() -> dict[frozenset[int], int]:
    rings = ((2, DOUBLE_LINKS), (1, SINGLE_LINKS))
    return {frozenset((a - 1, b - 1)): lanes for lanes, ring in rings for a, b in zip(ring, ring[1:] + ring[:1], strict=True)}


@pytest.mark.parametrize("lanes", [text_links(), nvlinks(NVIDIA_SMI)], ids=["text", "nvidia-smi"])
def test_eight_v100_make_two_rings_of_all_24_links(lanes: dict[frozenset[int], int]) -> None:
    assert sum(lanes.values()) == 24
    rings = lane_disjoint_rings(8, lanes)
    assert [ring.lanes for ring in rings] == [2, 1]
    used: Counter[frozenset[int]] = Counter()
    for ring in rings:
        assert sorted(ring.order) == list(range(8))
        for edge in ring.edges:
            used[edge] += ring.lanes
    assert used == lanes


def test_the_rings_found_are_those_of_the_text() -> None:
    first, second = lane_disjoint_rings(8, text_links())
    assert set(first.edges) == {edge for edge, lanes in text_links().items() if lanes == 2}
    assert set(second.edges) == {edge for edge, lanes in text_links().items() if lanes == 1}


@pytest.mark.parametrize(("n", "rings"), [(2, 0), (3, 1), (4, 1), (5, 2), (7, 3)])
def test_a_full_mesh_of_single_links_makes_as_many_rings_as_it_can(n: int, rings: int) -> None:
    found = lane_disjoint_rings(n, {frozenset((i, j)): 1 for i in range(n) for j in range(i)})
    assert len(found) == rings
    edges = [edge for ring in found for edge in ring.edges]
    assert len(edges) == len(set(edges))


@given(st.integers(3, 7), st.data())
def test_no_ring_is_wider_than_the_one_found(n: int, data: st.DataObject) -> None:
    widths = {frozenset(pair): data.draw(st.integers(0, 4)) for pair in itertools.combinations(range(n), 2)}
    found = widest_ring(n, lambda i, j: widths[frozenset((i, j))])

    def narrowest(order: tuple[int, ...]) -> int:
        return min(widths[frozenset(pair)] for pair in zip(order, order[1:] + order[:1], strict=True))

    best = max(narrowest((0, *rest)) for rest in itertools.permutations(range(1, n)))
    assert (0 if found is None else narrowest(found)) == best


ROOT = Path(__file__).resolve().parents[2]


def said(*words: str) -> str:
    told = CliRunner().invoke(cli, ["plan-topology", *words], catch_exceptions=False)
    assert told.exit_code == 0, told.output
    return told.output


def refused(*words: str) -> list[str]:
    told = CliRunner().invoke(cli, ["plan-topology", *words])
    assert isinstance(told.exception, BadInput), told.output
    return list(told.exception.lines)


def rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split() for line in text.splitlines() if line and not line.startswith("not here")}


def test_the_founding_texts_machine_prints_60_80_15_and_6() -> None:
    text = said("--preset", "d2l")
    pcie = rows(text.split("8-v100-nvlink")[0])
    assert [pcie[name][1:3] for name in ("ps-one-device", "ps-cpu", "ps-split")] == [["60.0", "ms"], ["80.0", "ms"], ["15.0", "ms"]]
    assert "chapter Parameter Servers: 60 ms on one GPU, 80 ms on the CPU, 15 ms split in four; 6 ms by NVLink rings" in text
    assert rows(text)["double-ring"][1:3] == ["5.19", "ms"]
    assert "pick: ps-split takes 15.0 ms; the runner-up ring takes as long. Every device sums one part" in text
    assert "not here: hierarchical: it needs two hosts" in text


def test_the_machine_of_the_docs_is_planned(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(name: two-hosts.*?)```", (ROOT / "docs" / "topology.md").read_text(), re.DOTALL)
    file = tmp_path / "machine.yaml"
    file.write_text(text)
    told = rows(said(str(file)))
    assert {"ps", "ring", "hierarchical", "pipelined-tree"} <= set(told)


def test_measured_values_override_presets() -> None:
    assert rows(said("--preset", "d2l", "--measured", "pcie3-x16=8GB/s").split("8-v100")[0])["ps-one-device"][1:3] == ["120", "ms"]
    assert "goes round the slow w0:w2 (80.0 MB/s)" in said("--preset", "ethernet-10", "--measured", "w0:w2=80MB/s,1ms")
    assert rows(said("--preset", "d2l", "--measured", "gpu1:switch=8GB/s").split("8-v100")[0])["ps-split"][1:3] == ["30.0", "ms"]


def test_a_described_machine_is_planned_and_its_json_can_be_given_again(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(yaml.safe_dump(two_hosts()))
    (plan,) = json.loads(said(str(file), "-o", "json", "--bytes", "16MB"))
    assert plan["pick"] == plan["strategies"][0]["strategy"] == "hierarchical" and plan["bytes"] == 16e6
    assert sorted(plan["strategies"][0]["order"]) == sorted(f"{host}{i}" for host in "ab" for i in range(4))
    again = tmp_path / "again.json"
    again.write_text(json.dumps([plan]))
    assert said(str(again), "--bytes", "16MB") == said(str(file), "--bytes", "16MB")


@pytest.mark.parametrize(("words", "line"), [
    ([], "no machine given: give one of MACHINE.yaml, --preset NAME and --probe N"),
    (["--preset", "d2l", "--probe", "2"], "--preset and --probe given: give one of"),
    (["--preset", "dgx9"], "--preset dgx9: no such machine; known are d2l, dgx1, ethernet-1"),
    (["--preset", "d2l", "--bytes", "3x"], "--bytes 3x: must be a size such as 160MB"),
    (["--preset", "d2l", "--bytes", "0"], "--bytes 0: must be 1 byte to 1000000TB"),
    (["--preset", "d2l", "--bytes", "9e99TB"], "--bytes 9e99TB: must be 1 byte to 1000000TB"),
    (["."], ". is a folder; give the path of a machine's description"),
    (["--preset", "d2l", "--workers", "3"], "--workers 3: only the ethernet presets"),
    (["--preset", "ethernet-1", "--workers", "1"], "--workers 1: must be 2..128"),
    (["--preset", "ethernet-1", "--servers", "129"], "--servers 129: must be 0..128"),
    (["--preset", "d2l", "--current", "star"], "--current star: no strategy; known are ps, ps-split, ring"),
    (["--preset", "d2l", "--current", "hierarchical"], "--current hierarchical: hierarchical cannot run on d2l-4-gpus-pcie: it needs"),
    (["--preset", "d2l", "--measured", "pcie9=1GB/s"], "--measured pcie9=1GB/s: pcie9 is neither two ends, such as w0:w1, nor a figure"),
    (["--preset", "d2l", "--measured", "a:b"], "--measured a:b: must be a bandwidth"),
    (["--preset", "d2l", "--measured", "a:b=1GB/s"], "--measured a:b: no machine here has both ends"),
    (["--preset", "ethernet-1", "--measured", "w0:w9=1GB/s"], '--measured: measured[0].between: Invalid value: "w9": names nothing'),
    (["--preset", "ethernet-1", "--measured", "w0:w1=1GB/s"], "4-hosts-ethernet-1: w0:w1 was measured at 1.00 GB/s"),
    (["--probe", "1"], "--probe 1: must be 2..16 processes"),
    (["nowhere.yaml"], "nowhere.yaml: cannot be read: No such file or directory; give the path of a machine's description"),
])  # fmt: skip
def test_what_cannot_be_planned_is_refused_in_a_sentence(words: list[str], line: str) -> None:
    assert refused(*words)[0].startswith(line)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("hosts: [a", "the manifest is not YAML"),
        ("a: 1\n---\nb: 2", "the manifest holds 2 documents, not one machine"),
        ("[1]", 'Invalid value: "array": must be an object'),
        ("[]", 'Invalid value: "array": must be an object'),
        ("name: x\nhosts: [a, b]", ": nothing joins a and b; describe the link or the switch between them"),
    ],
)
def test_a_file_that_describes_no_machine_is_refused(tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(text)
    assert line in refused(str(file))[0]
