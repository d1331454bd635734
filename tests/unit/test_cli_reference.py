"""The commands as a user meets them: help, examples that the commands take, completion, one kind of error."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from psjob_client.cli.main import cli
from psjob_client.cli.options import Where, plain
from psjob_client.problems import BadInput
from tests.typed import CliRunner, built

ROOT = Path(__file__).resolve().parents[2]
COMMAND = built(cli)


def leaves(command: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Every command that does something, with its words."""
    children = getattr(command, "commands", {})
    return [leaf for name, child in children.items() for leaf in leaves(child, (*path, name))] if children else [(path, command)]


def examples() -> list[list[str]]:
    """Every psjob command line of these pages, without pipes and redirections."""
    found = []
    for page in ("cli.md", "python.md", "ui.md", "compare.md", "quickstart.md"):
        for block in re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL):
            for part in re.split(r"[|>;\n]|&&", block):
                words = shlex.split(part.strip(), comments=True) if part.count("'") % 2 == 0 else []
                words = words[1:] if words[:1] == ["kubectl"] else words
                if words[:1] == ["psjob"]:
                    found.append(words[1:])
    return found


@pytest.mark.parametrize("path", [" ".join(path) for path, _ in leaves(COMMAND)])
def test_each_command_has_a_sentence_and_an_example(path: str) -> None:
    command = {" ".join(words): one for words, one in leaves(COMMAND)}[path]
    assert command.help and command.help.strip().endswith((".", "ways."))
    assert "psjob" in (command.epilog or ""), "help ends with an example"


@pytest.mark.parametrize("words", examples(), ids=" ".join)
def test_each_example_on_the_pages_is_taken(words: list[str]) -> None:
    command: Any = COMMAND
    context = typer.Context(COMMAND, info_name="psjob")
    while words and hasattr(command, "commands"):
        assert words[0] in command.commands, words
        command, words = command.commands[words[0]], words[1:]
    command.make_context(command.name, list(words), parent=context, resilient_parsing=True)


def test_a_name_is_taken_as_kubectl_prints_it() -> None:
    assert plain("pstrainingjob.psjob.dev/digits") == plain("digits") == "digits"
    for bad in ("", "--yes", "a/"):
        with pytest.raises(BadInput, match="is no name of a job"):
            plain(bad)


def test_which_jobs_are_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["psjob"])
    assert Where(local=True).says_local and Where(folder=tmp_path).says_local and not Where().says_local
    assert Where(namespace="n").says_cluster and Where(kubeconfig=tmp_path).says_cluster and not Where().says_cluster
    with pytest.raises(BadInput, match="use one of the two"):
        Where(local=True, context="c")
    monkeypatch.setattr(sys, "argv", ["/usr/bin/kubectl-psjob"])
    assert Where().says_cluster and not Where(local=True).says_cluster


def test_names_of_runs_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("digits-1-a", "lda-1-b"):
        folder = tmp_path / ".psjob" / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(f'{{"job": "{name.split("-")[0]}", "created": 1}}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("COMP_WORDS", "psjob get di")
    monkeypatch.setenv("COMP_CWORD", "2")
    done = CliRunner().invoke(cli, prog_name="psjob", env={"_PSJOB_COMPLETE": "complete_bash"})
    assert set(done.stdout.split()) == {"digits", "digits-1-a"}, done.stderr


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("compare job.yaml --modes as", {"async"}),
        ("compare job.yaml --modes sync,as", {"sync,async"}),
        ("run job.yaml --set spec.training.mo", {"spec.training.mode="}),
        ("run job.yaml --set spec.ps.pl", {"spec.ps.placement="}),
        ("run job.yaml --set spec.training.updateAt", {"spec.training.updateAt=server", "spec.training.updateAt=worker"}),
        ("submit job.yaml --set spec.susp", {"spec.suspend="}),
        ("render job.yaml --set nonsense", set()),
    ],
)
def test_modes_and_paths_complete(typed: str, completed: set[str]) -> None:
    words = f"psjob {typed}"
    given = {"_PSJOB_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = CliRunner().invoke(cli, prog_name="psjob", env=given)
    assert set(done.stdout.split()) == completed, done.stderr


def test_an_unknown_option_is_one_sentence() -> None:
    done = CliRunner().invoke(cli, ["list", "--no-such"])
    assert done.exit_code == 2 and "No such option" in done.output and "Traceback" not in done.output
