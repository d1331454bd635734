"""`psjob run` of a script: the manifest that it stands for, and words that it cannot be given."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from psjob_client.cli.init import manifest_template
from psjob_client.cli.main import cli
from psjob_client.convert.draft import Script
from psjob_client.local.manifest import Request, read_job, worker_commands
from psjob_client.problems import BadInput
from tests.typed import CliRunner

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
    assert (spec["workers"]["replicas"], spec["ps"]["shards"], spec["training"]["mode"]) == (4, 2, "async")


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
