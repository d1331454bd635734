"""`psjob init`, then `psjob run`: what is written trains, passes validation, and is never written over."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from psjob_client.cli import main
from psjob_client.judge.files import judged
from psjob_client.local.errors import BadInput
from tests import warm


def init(*words: str) -> str:
    done = CliRunner().invoke(main.cli, ["init", *words], catch_exceptions=False)
    if isinstance(done.exception, BadInput):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def test_what_init_writes_trains(tmp_path: Path) -> None:
    code, told = warm.run(tmp_path, ["init", "first"])
    assert code == 0 and "psjob run job.yaml" in told and "psjob submit job.yaml" in told and "cd first" in told
    folder = tmp_path / "first"
    code, output = warm.run(folder, ["run", "job.yaml", "--summary", "summary.json", "--no-progress"])
    assert code == 0, output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["result"] == "Complete" and summary["restarts"] == {}
    assert summary["metrics"]["accuracy"] > 0.8, summary["metrics"]


def test_manifest_script_and_image_agree(tmp_path: Path) -> None:
    init(str(tmp_path / "My Job"), "--image", "registry.example.com/a/b:7", "--workers", "3", "--shards", "2")
    folder = tmp_path / "My Job"
    result = judged("job.yaml", (folder / "job.yaml").read_bytes(), strict=True)
    assert result.jobs == ("my-job",) and result.findings == ()
    ast.parse((folder / "train.py").read_text())
    assert not [file for file in folder.iterdir() if "$" in file.read_text()]
    assert "registry.example.com/a/b:7" in (folder / "Dockerfile").read_text()


def test_the_dockerfile_is_one(tmp_path: Path) -> None:
    """Its instructions, in an order that builds: a base with a tag, pinned packages, files that are there, no root."""
    init(str(tmp_path))
    lines = [line for line in (tmp_path / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    steps = [line.split(" ", 1) for line in lines]
    assert [name for name, _ in steps] == ["FROM", "RUN", "WORKDIR", "COPY", "USER", "CMD"]
    told = dict(steps)
    assert re.fullmatch(r"python:3\.\d+-slim", told["FROM"])
    assert re.fullmatch(r"pip install --no-cache-dir torch==\d+\.\d+\.\d+", told["RUN"])
    sources = told["COPY"].split()[:-1]
    assert all((tmp_path / source).is_file() for source in sources)
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
        (["--template", "keras"], "take plain"),
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
