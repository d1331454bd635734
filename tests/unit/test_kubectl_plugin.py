"""`kubectl psjob`: words and names complete as kubectl asks for them, and Python has the verbs of the commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from psjob_client.cli.main import cli
from psjob_client.sdk.blocking import Client, Job

ONLY_THESE, FILES_TOO = ":4", ":0"


def completed(tmp_path: Path, *words: str) -> list[str]:
    """What the script that kubectl looks for prints for these words, of which the last is unfinished."""
    program = Path(sys.executable).parent / "kubectl_complete-psjob"
    env = {"KUBECONFIG": str(tmp_path / "none"), "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run([program, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "candidates", "directive"),
    [
        (("susp",), {"suspend"}, ONLY_THESE),
        (("simulate", "sch"), {"schedule"}, ONLY_THESE),
        (("logs", "digits", "--fol"), {"--folder", "--follow"}, ONLY_THESE),
        (("submit", "job"), set(), FILES_TOO),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_kubectl_is_told_what_completes(tmp_path: Path, words: tuple[str, ...], candidates: set[str], directive: str) -> None:
    *found, last = completed(tmp_path, *words)
    assert set(found) == candidates and last == directive


def test_an_empty_word_lists_every_command(tmp_path: Path) -> None:
    assert {"list", "get", "logs", "suspend", "resume", "delete"} < set(completed(tmp_path, ""))


def test_a_cluster_that_is_not_there_completes_no_name(tmp_path: Path) -> None:
    assert completed(tmp_path, "get", "") == [FILES_TOO]


def test_python_has_the_verbs_of_the_commands() -> None:
    commands = {command.name or getattr(command.callback, "__name__", "") for command in cli.registered_commands}
    verbs = {"list", "get", "logs", "events", "metrics", "submit", "wait", "suspend", "resume", "checkpoint", "checkpoints", "delete"}
    assert verbs <= commands
    python = {name for client in (Client, Job) for name in dir(client) if not name.startswith("_")}
    assert verbs <= python, verbs - python
