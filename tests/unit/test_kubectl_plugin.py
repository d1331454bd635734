"""`kubectl psjob`: words and names complete as kubectl asks for them, and Python has the verbs of the commands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Protocol

import pytest

from psjob_client.cli import entry
from psjob_client.cli.main import cli
from psjob_client.sdk.blocking import Client, Job

ONLY_THESE, FILES_TOO = ":4", ":0"


class Complete(Protocol):
    def __call__(self, *words: str) -> list[str]: ...


@pytest.fixture
def complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Complete:
    """What the script that kubectl looks for prints for some words, of which the last is unfinished. No cluster is there."""
    monkeypatch.setattr(entry.signal, "signal", lambda *_: None)  # type: ignore[attr-defined]
    monkeypatch.chdir(tmp_path)
    for name, value in {"KUBECONFIG": str(tmp_path / "none"), "_PSJOB_COMPLETE": "", "COMP_WORDS": "", "COMP_CWORD": ""}.items():
        monkeypatch.setenv(name, value)

    def completed(*words: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["kubectl_complete-psjob", *words])
        entry.complete()
        said = capsys.readouterr()
        assert said.err == ""
        return said.out.splitlines()

    return completed


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
def test_kubectl_is_told_what_completes(complete: Complete, words: tuple[str, ...], candidates: set[str], directive: str) -> None:
    *found, last = complete(*words)
    assert set(found) == candidates and last == directive


def test_an_empty_word_lists_every_command(complete: Complete) -> None:
    assert {"list", "get", "logs", "suspend", "resume", "delete"} < set(complete(""))


def test_a_cluster_that_is_not_there_completes_no_name(complete: Complete) -> None:
    assert complete("get", "") == [FILES_TOO]


def test_python_has_the_verbs_of_the_commands() -> None:
    commands = {command.name or getattr(command.callback, "__name__", "") for command in cli.registered_commands}
    verbs = {"list", "get", "logs", "events", "metrics", "submit", "wait", "suspend", "resume", "checkpoint", "checkpoints", "delete"}
    assert verbs <= commands
    python = {name for client in (Client, Job) for name in dir(client) if not name.startswith("_")}
    assert verbs <= python, verbs - python
