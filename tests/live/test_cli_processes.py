"""The commands as processes: a terminal, a pipe that closes, Ctrl-C, the program that completes words for kubectl."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from hack.terminal import terminal
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


@pytest.mark.parametrize("entry", ["main", "complete"])
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
    assert set(scripts.values()) == {f"psjob_client.cli.entry:{name}" for name in ("main", "complete")}


def test_the_program_that_kubectl_looks_for_completes_words(tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "kubectl_complete-psjob"
    env = {"KUBECONFIG": str(tmp_path / "none"), "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run([program, "susp"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "suspend\n:4\n", "")
