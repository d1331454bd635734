"""`psjob init`, then `psjob run`: what is written trains, passes validation, and is never written over."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from psjob_client.cli import main
from psjob_client.cli.manifest_commands import TESTED
from psjob_client.lint import judge_text
from psjob_client.problems import BadInput
from tests.frameworks import IMPORTS, OFFLINE
from tests.support import warm
from tests.support.soaking import rotating
from tests.support.typed import CliRunner


def init(*words: str) -> str:
    done = CliRunner().invoke(main.cli, ["init", *words], catch_exceptions=False)
    if isinstance(done.exception, BadInput):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


LEARNED = {
    "pytorch": ("accuracy", lambda value: value > 0.8),
    "transformers": ("eval_loss", lambda value: value < 1.5),  # ln 16 = 2.8 at first, ln 4 / 15 = 0.1 at best
    "lightning": ("accuracy", lambda value: value > 0.8),
    "accelerate": ("accuracy", lambda value: value > 0.8),
}


def preloaded(template: str) -> Sequence[str]:
    """What its processes have imported before they begin."""
    return warm.PRELOADED if template == "pytorch" else IMPORTS


@pytest.mark.parametrize("template", ["pytorch", *map(rotating, sorted(LEARNED.keys() - {"pytorch"}))])
def test_what_init_writes_trains(tmp_path: Path, template: str) -> None:
    told = init(str(tmp_path / "first"), "--template", template)
    folder = tmp_path / "first"
    assert f"psjob run {folder}/job.yaml" in told and f"psjob submit {folder}/job.yaml" in told
    words = ["run", "first/job.yaml", "--summary", "summary.json", "--no-progress"]
    code, output = warm.run(tmp_path, words, OFFLINE, preloaded=preloaded(template))
    assert code == 0, output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["result"] == "Complete" and summary["restarts"] == {} and summary.get("warning") is None
    assert "same data" not in output, output
    name, learned = LEARNED[template]
    assert learned(summary["metrics"][name]), summary["metrics"]


def test_every_template_is_trained() -> None:
    with pytest.raises(BadInput, match=f"take {', '.join(sorted(LEARNED))}$"):
        main.cli(["init", "--template", "keras"], standalone_mode=False)


@pytest.mark.parametrize("template", ["pytorch", *map(rotating, sorted(LEARNED.keys() - {"pytorch"}))])
def test_a_script_trains_without_a_job(tmp_path: Path, template: str) -> None:
    init(str(tmp_path), "--template", template)
    imports = warm.COMPILING if template == "pytorch" else IMPORTS
    code, output = warm.call(tmp_path, "train", ["--epochs", "1"], OFFLINE, warm.SECONDS, imports)
    assert code == 0, output


def test_versions_that_are_named_are_those_that_are_tested() -> None:
    pins = (Path(__file__).resolve().parents[2] / "requirements" / "dev.txt").read_text()
    assert all(f"\n{package}=={tested} " in pins for package, tested in TESTED.items())


def test_a_package_that_is_not_there_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pip install" not in init(str(tmp_path / "a"), "--template", "lightning")

    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("psjob_client.cli.manifest_commands.version", version)
    told = init(str(tmp_path / "b"), "--template", "lightning")
    assert f"pip install -r {tmp_path}/b/requirements.txt" in told
    assert f"lightning=={TESTED['lightning']}" in (tmp_path / "b" / "requirements.txt").read_text()


def test_manifest_script_and_image_agree(tmp_path: Path) -> None:
    init(str(tmp_path / "My Job"), "--image", "registry.example.com/a/b:7", "--workers", "3", "--shards", "2")
    folder = tmp_path / "My Job"
    result = judge_text("job.yaml", (folder / "job.yaml").read_bytes(), strict=True)
    assert result.jobs == ("my-job",) and result.findings == ()
    ast.parse((folder / "train.py").read_text())
    assert not [file for file in folder.iterdir() if "$" in file.read_text()]
    assert "registry.example.com/a/b:7" in (folder / "Dockerfile").read_text()


@pytest.mark.parametrize("template", LEARNED)
def test_the_dockerfile_is_one(tmp_path: Path, template: str) -> None:
    """Its instructions, in an order that builds: a base with a tag, pinned packages, files that are there, no root."""
    init(str(tmp_path), "--template", template)
    lines = [line for line in (tmp_path / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    steps = [line.split(" ", 1) for line in lines]
    assert [name for name, _ in steps] == ["FROM", "WORKDIR", "COPY", "RUN", "COPY", "USER", "CMD"]
    assert [words for name, words in steps if name == "COPY"] == ["requirements.txt ./", "train.py ./"]
    told = dict(steps)
    assert re.fullmatch(r"python:3\.\d+-slim", told["FROM"])
    assert told["RUN"] == "pip install --no-cache-dir -r requirements.txt"
    packages = (tmp_path / "requirements.txt").read_text().split()
    assert packages and all(re.fullmatch(r"[a-z]+==\d+\.\d+\.\d+", package) for package in packages)
    imported = {name.partition(".")[0] for name in re.findall(r"^(?:import|from) (\S+)", (tmp_path / "train.py").read_text(), re.MULTILINE)}
    asked = {package.partition("==")[0] for package in packages}
    assert imported - {"argparse", "psjob"} <= asked and (template == "pytorch" or template in asked)
    manifest = (tmp_path / "job.yaml").read_text()
    assert f"command: [{', '.join(json.loads(told['CMD']))}]" in manifest
    assert not told["USER"].startswith(("0", "root"))


def test_nothing_is_written_over_without_force(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine")
    with pytest.raises(BadInput, match=r"train\.py already.*--force"):
        main.cli(["init", str(tmp_path)], standalone_mode=False)
    assert [file.name for file in tmp_path.iterdir()] == ["train.py"] and (tmp_path / "train.py").read_text() == "mine"
    init(str(tmp_path), "--force")
    assert "ps.attach" in (tmp_path / "train.py").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--template", "_common"], "take accelerate, lightning, pytorch, transformers"),
        (["--name", "Not A Name"], "metadata.name"),
        (["--workers", "0"], "1..4000"),
        (["--shards", "999"], "1..256"),
        (["--image", "a: b\nc"], "not YAML"),
        (["--image", "#x"], "--image #x"),
    ],
)
def test_what_cannot_be_written_is_said_and_nothing_is(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(BadInput) as refused:
        main.cli(["init", str(tmp_path / "new"), *words], standalone_mode=False)
    assert said in str(refused.value) and not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        main.cli(["init", str(tmp_path / "file" / "x")], standalone_mode=False)
