"""`psjob plan-topology` as a user types it, and the probe on this machine's own loopback."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from psjob_client.cli.main import cli
from psjob_client.problems import BadInput
from tests.support.typed import CliRunner
from tests.unit.topology_machines import two_hosts

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


@pytest.mark.parametrize(
    ("words", "line"),
    [
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
        (
            ["--preset", "d2l", "--measured", "pcie9=1GB/s"],
            "--measured pcie9=1GB/s: pcie9 is neither two ends, such as w0:w1, nor a figure",
        ),
        (["--preset", "d2l", "--measured", "a:b"], "--measured a:b: must be a bandwidth"),
        (["--preset", "d2l", "--measured", "a:b=1GB/s"], "--measured a:b: no machine here has both ends"),
        (["--preset", "ethernet-1", "--measured", "w0:w9=1GB/s"], '--measured: measured[0].between: Invalid value: "w9": names nothing'),
        (["--preset", "ethernet-1", "--measured", "w0:w1=1GB/s"], "4-hosts-ethernet-1: w0:w1 was measured at 1.00 GB/s"),
        (["--probe", "1"], "--probe 1: must be 2..16 processes"),
        (["nowhere.yaml"], "nowhere.yaml: cannot be read: No such file or directory; give the path of a machine's description"),
    ],
)
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
