"""The commands as a user meets them: help, examples that the commands take, completion, one kind of error.

- What `--help` prints: examples that a shell reads as one command, and a whole sentence for each command.
- The version, however it is asked for; and what the operator's options refuse.
- `psjob run` of a script: the manifest that it stands for, and words that it cannot be given.
- `kubectl psjob`: words and names complete as kubectl asks for them, and Python has the verbs of the commands.
"""

from __future__ import annotations

import re
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import pytest
import typer
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command

from psjob_client.cli import entry, main
from psjob_client.cli.change_commands import parse_span
from psjob_client.cli.main import cli
from psjob_client.cli.manifest_commands import manifest_template
from psjob_client.cli.options import JobScope, bare_name, break_command, first_sentence
from psjob_client.convert.draft import Script
from psjob_client.local.manifest import Request, read_job, worker_commands
from psjob_client.problems import BadInput
from psjob_client.sdk.blocking import Client, Job
from psjob_operator import __main__ as operator
from tests.support.typed import CliRunner, built

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
    assert bare_name("pstrainingjob.psjob.dev/digits") == bare_name("digits") == "digits"
    for bad in ("", "--yes", "a/"):
        with pytest.raises(BadInput, match="is no name of a job"):
            bare_name(bad)


def test_which_jobs_are_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["psjob"])
    assert JobScope(local=True).says_local and JobScope(folder=tmp_path).says_local and not JobScope().says_local
    assert JobScope(namespace="n").says_cluster and JobScope(kubeconfig=tmp_path).says_cluster and not JobScope().says_cluster
    with pytest.raises(BadInput, match="use one of the two"):
        JobScope(local=True, context="c")
    monkeypatch.setattr(sys, "argv", ["/usr/bin/kubectl-psjob"])
    assert JobScope().says_cluster and not JobScope(local=True).says_cluster


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
        ("run job.yaml --set spec.shards.pl", {"spec.shards.placement="}),
        ("run job.yaml --set spec.training.updateAt", {"spec.training.updateAt=shard", "spec.training.updateAt=worker"}),
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


WIDE = 80


def test_no_sentence_is_cut_off() -> None:
    said = CliRunner().invoke(cli, ["--help"], env={"COLUMNS": str(WIDE)}).stdout
    assert "…" not in said and "..." not in said.partition("Commands:")[2], said
    assert "where it continues in the background" in " ".join(said.split())


@pytest.mark.parametrize("name", sorted(get_command(cli).commands))  # type: ignore[attr-defined]
def test_examples_are_as_wide_as_a_terminal(name: str) -> None:
    done = CliRunner().invoke(cli, [name, "--help"], env={"COLUMNS": str(WIDE)})
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= WIDE, done.stdout
    assert "examples/" not in done.stdout.partition("Example")[2], "who has installed psjob has no checkout"


@given(st.lists(st.sampled_from(["psjob", "run", "--set", "a=b", "'two words'", "|", "x" * 30]), min_size=1, max_size=12))
def test_a_broken_line_is_the_same_command(words: list[str]) -> None:
    command = " ".join(words)
    lines = break_command(command, 40)
    assert shlex.split(" ".join(line.removesuffix("\\").strip() for line in lines)) == shlex.split(command)
    assert all(line.endswith(" \\") for line in lines[:-1]) and all(len(line) <= 40 for line in lines)


def test_the_first_sentence() -> None:
    assert first_sentence("Show it; with more words.\n") == "Show it"
    assert first_sentence("Show\nit. Then more.") == "Show it"


@pytest.mark.parametrize(
    ("app", "words", "name"),
    [(main.cli, ["version"], "psjob"), (main.cli, ["--version"], "psjob"), (operator.app, ["--version"], "psjob-operator")],
)
def test_the_version_is_one_line(app: typer.Typer, words: list[str], name: str) -> None:
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0 and told.output == f"{name} {version('psjob-operator')}\n"


@pytest.mark.parametrize("user", ["root", "0", "-1", "2147483648", ""])
def test_a_shard_user_that_is_none_is_refused_in_a_sentence(user: str) -> None:
    told = CliRunner().invoke(operator.app, ["run", f"--shard-user={user}"])
    assert told.exit_code == 2 and "--shard-user" in told.output and "must be a number from 1 to 2147483647, or namespace" in told.output


ODD = ["$(HOME)", "$$x", "a: b", "#c", "'", "ü", "1", "-"]


@pytest.mark.parametrize(
    ("script", "name", "words"),
    [
        (Script("train.py"), "train", ["train.py"]),
        (Script("sub/My_Net.v2.py", ["--lr", "0.1"]), "my-net-v2", ["sub/My_Net.v2.py", "--lr", "0.1"]),
        (Script("pkg.train", ["--flag"], module=True), "train", ["-m", "pkg.train", "--flag"]),
        (Script("train.py", ODD), "train", ["train.py", *ODD]),
        (Script("train.py", ["word " * 100]), "train", ["train.py", "word " * 100]),
    ],
)  # fmt: skip
def test_a_script_gets_the_words_that_were_typed(tmp_path: Path, script: Script, name: str, words: list[str]) -> None:
    for file in ("train.py", "sub/My_Net.v2.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("")
    job = read_job(Path(script.path), made=script.manifest(manifest_template()))
    assert job.metadata.name == name
    for command in worker_commands(job, tmp_path):
        assert list(command.argv[1:]) == words


def test_what_was_chosen_stands_in_the_manifest() -> None:
    spec = yaml.safe_load(Script("train.py", workers=4, shards=2, mode="async").manifest(manifest_template()))["spec"]
    assert (spec["workers"]["replicas"], spec["shards"]["replicas"], spec["training"]["mode"]) == (4, 2, "async")


def test_the_command_to_go_on_is_that_of_the_script() -> None:
    made = Request(Path("train.py"), ("spec.training.seed=1",), text="", options=("--workers", "4"), arguments=("--lr", "0.1"))
    words = "psjob run --workers 4 train.py --set spec.training.seed=1 --resume .psjob/train-1 -- --lr 0.1"
    assert made.words("--resume", ".psjob/train-1") == words.split()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["tran.py"], "tran.py: there is no such file"),
        (["train.py", "--mode", "asynch"], "did you mean async?"),
        (["train.py", "--workers", "0"], "spec.workers.replicas"),
        (["train.py", "--save", "sub/job.yaml"], "--save sub/job.yaml: a manifest's folder is its working folder"),
        (["train.py", "--save", "other.yaml"], "other.yaml: is there already, with another text, and was not changed"),
        (["job.yaml", "--save", "new.yaml"], "job.yaml is a manifest already"),
        (["train.py", "--logs", "7"], "there is no worker 7; this job has 2"),
    ],
)
def test_other_words_are_refused_with_what_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], told: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for file, text in {"train.py": "", "other.yaml": "other", "job.yaml": Script("train.py").manifest(manifest_template())}.items():
        (tmp_path / file).write_text(text)
    refused = CliRunner().invoke(cli, ["run", *words]).exception
    assert isinstance(refused, BadInput) and told in str(refused), refused
    assert not (tmp_path / ".psjob").exists() and not (tmp_path / "new.yaml").exists()
    assert (tmp_path / "other.yaml").read_text() == "other"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["job.yaml", "--sumary", "s.json"], "No such option: --sumary; did you mean --summary?"),
        (["job.yaml", "--lr=0.1"], "No such option: --lr"),
        (["job.yaml", "epochs"], "epochs: is one word too many behind job.yaml"),
        (["python", "train.py"], "psjob run train.py"),
        (["-", "--epochs", "3"], "No such option: --epochs"),
    ],
)
def test_a_manifest_takes_no_words_of_a_script(words: list[str], told: str) -> None:
    refused = CliRunner().invoke(cli, ["run", *words], env={"COLUMNS": "200"})
    assert refused.exit_code == 2 and told in refused.output, refused.output


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
        entry.complete_command_line()
        said = capsys.readouterr()
        assert said.err == ""
        return said.out.splitlines()

    return completed


@pytest.mark.parametrize(("words", "candidates", "directive"), [
    (("susp",), {"suspend"}, ONLY_THESE),
    (("simulate", "sch"), {"schedule"}, ONLY_THESE),
    (("logs", "digits", "--fol"), {"--folder", "--follow"}, ONLY_THESE),
    (("submit", "job"), set(), FILES_TOO),
], ids=lambda value: " ".join(value) if isinstance(value, tuple) else None)  # fmt: skip
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


def test_parts_of_a_span_of_time_add_up() -> None:
    assert [parse_span(text) for text in ("90s", "1h0m5s", "1440m", "7", "0.5")] == [90, 3605, 86_400, 7, 0.5]
    for text in ("", "-5s", "1d", "5 m", "1m1h", "٣s", "30s\n", "1.5h"):
        with pytest.raises(BadInput, match="is no span of time"):
            parse_span(text)
