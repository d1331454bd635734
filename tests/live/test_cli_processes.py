"""The commands as processes: a terminal, a pipe that closes, Ctrl-C, the program that completes words for kubectl.

- `psjob doctor` on this machine.
- `psjob plan-topology --probe` on this machine's own loopback.
- `psjob-operator check` where no API server listens.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from hack.terminal import terminal
from psjob_client.cli import main
from psjob_client.cli.main import cli
from psjob_client.local import measure
from psjob_client.problems import BadInput
from psjob_operator.cluster.main import CheckFailed, CheckOptions, check_installation
from tests.support.typed import CliRunner
from tests.unit.api_manifest import GOOD, changed
from tests.unit.stages_cases import MS, chain
from tests.unit.topology_machines import switched

ROOT = Path(__file__).resolve().parents[2]
MAIN = [sys.executable, "-m", "psjob_client.cli.main"]


def test_on_a_terminal_it_is_a_table(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(yaml.safe_dump(switched(3)))
    with terminal(150) as shown:
        command = [*MAIN, "plan-topology", str(file)]
        process = subprocess.run(command, stdout=shown.theirs, stderr=shown.theirs, env=os.environ | shown.environment, check=False)
        shown.end()
        text = "\n".join(shown.all())
    assert process.returncode == 0
    assert "┃" in text and "pick: ps takes" in text


def test_a_reader_that_goes_away_gets_no_traceback(tmp_path: Path) -> None:
    made = asdict(chain([5 * MS] * 8, sent=100_000, parameters=4_000_000, saved=2_000_000))
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(made | {"format": 1, "samples": 16, "model": "Net"}))
    command = [*MAIN, "plan-stages", "--profile", str(file), "--preset", "ethernet-10"]
    done = subprocess.run(["sh", "-c", '"$@" | head -1', "sh", *command], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("Net on 4-hosts") and "Traceback" not in done.stderr


@pytest.mark.parametrize("entry", ["main", "complete_command_line"])
def test_ctrl_c_while_the_command_is_imported_shows_no_traceback(entry: str) -> None:
    program = f"""
import os, signal, sys

class Pressed:
    def find_spec(self, name, path=None, target=None):
        if name == "psjob_client.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Pressed())
from psjob_client.cli.entry import {entry}
{entry}()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == -signal.SIGINT and ended.stdout + ended.stderr == ""
    scripts = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts.values()) == {f"psjob_client.cli.entry:{name}" for name in ("main", "complete_command_line")}


def test_the_program_that_kubectl_looks_for_completes_words(tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "kubectl_complete-psjob"
    env = {"KUBECONFIG": str(tmp_path / "none"), "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run([program, "susp"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "suspend\n:4\n", "")


WORKER = "spec.workers.template.spec.containers.0"


def test_the_command_looks_at_this_machine_and_at_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(changed(GOOD, {f"{WORKER}.command": ["no-such-program"]})))
    done = CliRunner().invoke(main.cli, ["doctor", "job.yaml", "-o", "json"])
    told = json.loads(done.stdout)
    assert done.exit_code == 1 and told["problem"] is True
    (command,) = [row for row in told["findings"] if row["about"] == "job: command"]
    assert "no-such-program" in command["figure"]
    assert {"python", "psjob", "torch", "cores", "memory", "/dev/shm", "open files", "ports", "run folder", "cache", "GPU"} <= {
        row["about"] for row in told["findings"]
    }
    done = CliRunner().invoke(main.cli, ["doctor", "--kubeconfig", str(tmp_path / "none")])
    assert done.exit_code == 1 and done.stdout.startswith("PROBLEM  API server") and "1 problem, 0 warnings" in done.stdout


def said(*words: str) -> str:
    told = CliRunner().invoke(cli, ["plan-topology", *words], catch_exceptions=False)
    assert told.exit_code == 0, told.output
    return told.output


def test_the_probe_measures_every_pair_of_real_processes() -> None:
    told: list[str] = []
    raw = measure.measure(3, told.append)
    assert [link["between"] for link in raw["links"]] == [["p0", "p1"], ["p0", "p2"], ["p1", "p2"]]
    assert all(link["bandwidth"] > 1e6 and 0 < link["latency"] < 1 for link in raw["links"]) and raw["total"] > 1e6
    assert told[0] == "starting 3 processes" and "p0 to p2 (2 of 3)" in told and told[-1] == "all at once"


def test_a_probed_machine_is_planned() -> None:
    (plan,) = json.loads(said("--probe", "2", "-o", "json"))
    assert plan["machine"]["name"] == "2-processes-here" and plan["machine"]["total"] > 0
    assert {"ring", "ps", "tree"} <= {given["strategy"] for given in plan["strategies"]}


def test_a_probe_that_gets_no_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ANSWER_SECONDS", 0.001)
    with pytest.raises(BadInput, match=r"--probe 2: no answer in time \(0 s a step\); try fewer processes"):
        measure.measure(2, lambda _: None)


def test_a_process_that_ends_is_named() -> None:
    async def die() -> None:
        async with measure._Peer("p7") as peer:
            await peer.ask(do="send", port=1, seconds=0.1)

    with pytest.raises(OSError, match=r"process p7: .*refused"):
        asyncio.run(die())


def test_a_server_that_is_not_there_is_no_matter_of_rights(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        server = f"http://127.0.0.1:{taken.getsockname()[1]}"
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {}}],
        }  # fmt: skip
        (tmp_path / "config").write_text(yaml.safe_dump(config))
        with pytest.raises(CheckFailed) as told:
            asyncio.run(check_installation(CheckOptions(str(tmp_path / "config"), (), None, 1.0)))
    assert "cannot be asked" in str(told.value) and "rbac" not in str(told.value)
