"""What `psjob run` sees of a run to continue from before it starts anything: real checkpoints, whole, cut and missing."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from psjob.checkpoint import manifest
from psjob_client.local import run_folder
from psjob_client.local.run_folder import resumed_folder
from psjob_client.problems import BadInput
from psjob_operator.api.spec import JobSpec, PSTrainingJob
from tests.tensors.checkpoint_parts import save
from tests.unit.api_manifest import GOOD, changed


def spec(workers: int = 1, mode: str = "sync", run: str | None = None, **training: Any) -> JobSpec:
    job = copy.deepcopy(GOOD)
    job["spec"]["workers"]["replicas"] = workers
    job["spec"]["training"] = {"mode": mode, **training}
    job["spec"]["checkpoint"] = {"resumeFrom": {"run": run}} if run else {}
    return PSTrainingJob.model_validate(job).spec


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`.psjob/old` with a config and no manifest, seen from beside .psjob."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ".psjob" / "old"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


STEP = 5
"""Of the newest whole checkpoint."""


def commit(folder: Path, step: int, **facts: Any) -> Path:
    """Commit a checkpoint of one sync worker; its manifest's path."""
    return manifest.commit(folder, save(folder, step, **facts))


def refusal(option: str | None, wanted: JobSpec) -> str:
    with pytest.raises(BadInput) as refused:
        resumed_folder(None if option is None else Path(option), wanted)
    (line,) = refused.value.lines
    return line


def test_the_operator_knows_the_runtimes_manifests(old: Path) -> None:
    assert (run_folder.MANIFEST.pattern, run_folder.LARGEST) == (manifest._NAME.pattern, manifest.MAX_BYTES)
    path = commit(old, 5)
    assert run_folder._whole(path) == {key: value for key, value in json.loads(path.read_bytes()).items() if key != "sha256"}


def test_a_run_that_fits_is_taken(old: Path) -> None:
    commit(old, 0)
    commit(old, 5, term=2)
    assert resumed_folder(None, spec()) is None
    assert resumed_folder(Path(".psjob/old"), spec()) == (old, STEP) == resumed_folder(None, spec(run="old"))
    assert resumed_folder(Path(".psjob/old"), spec(run="gone")) == (old, STEP)
    assert resumed_folder(Path(".psjob/old"), spec(mode="bounded")) == (old, STEP) == resumed_folder(Path(".psjob/old"), spec(mode="async"))


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (spec(workers=3), "had 1 workers, spec.workers.replicas is 3; continue with --set spec.workers.replicas=1 "),
        (spec(mode="local", local={"quorum": 1}), "was sync, spec.training.mode is local with a quorum; continue with"),
        (spec(mode="local", update_rule="delayed-nesterov"), "was sync, spec.training.mode is local with delayed-nesterov; continue with"),
        (spec(mode="local"), "was sync, spec.training.mode is local; continue with --set spec.training.mode=sync"),
    ],
)
def test_another_number_of_workers_or_mode_is_refused(old: Path, wanted: JobSpec, sentence: str) -> None:
    commit(old, 5)
    line = refusal(".psjob/old", wanted)
    assert line.startswith("--resume .psjob/old: that run ") and sentence in line and line.endswith("or start anew without --resume")


@pytest.mark.parametrize(
    ("was", "training", "field"),
    [
        ("local-async", {}, "updateRule=delayed-nesterov"),
        ("local-async", {"local": {"quorum": 1}}, "updateRule=delayed-nesterov"),
        ("local", {"update_rule": "delayed-nesterov"}, "updateRule=null"),
        ("local", {"local": {"quorum": 1}}, "local.quorum=0"),
    ],
)
def test_a_kind_of_local_rounds_goes_on_in_itself(old: Path, was: str, training: dict[str, Any], field: str) -> None:
    commit(old, 5, mode=was)
    assert f"that run was {was}, spec.training.mode is local" in (line := refusal(".psjob/old", spec(mode="local", **training)))
    assert f"continue with --set spec.training.{field}, or" in line


def test_a_complete_run_is_refused(old: Path) -> None:
    commit(old, 5)
    commit(old, 9, final=True)
    line = refusal(".psjob/old", spec())
    assert "that run is complete (step 9); load .psjob/old/final.safetensors" in line and "without --resume" in line


def test_a_run_without_a_manifest_is_refused(old: Path) -> None:
    assert "that run has no checkpoint" in refusal(".psjob/old", spec())
    assert "start anew without --resume" in refusal(".psjob/old", spec())


@pytest.mark.parametrize("harm", ["cut", "emptied", "flipped", "no file", "short file", "no json", "deep"])
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(old: Path, harm: str) -> None:
    commit(old, 5)
    newest = commit(old, 9, final=True)
    (file,) = old.glob("v000001-c000009-shard000*.safetensors")
    text = newest.read_text()
    harms = {
        "cut": text[:-9],
        "emptied": "",
        "flipped": text.replace('"final": true', '"final": null'),
        "no json": "[1]",
        "deep": "[" * 100_000,
    }
    newest.write_text(harms.get(harm, text))
    if harm == "no file":
        file.unlink()
    elif harm == "short file":
        file.write_bytes(file.read_bytes()[:-1])
    assert manifest.newest_manifest(old, None)[0] is not None
    assert resumed_folder(Path(".psjob/old"), spec()) == (old, STEP)
    for path in old.glob("manifest-*"):
        path.write_text("{")
    line = refusal(".psjob/old", spec())
    assert "no whole checkpoint" in line and newest.name in line and "start anew without --resume" in line


def test_a_run_that_is_not_here_is_named_as_the_user_wrote_it(old: Path) -> None:
    line = refusal(None, spec(run="abc"))
    assert line.startswith("spec.checkpoint.resumeFrom.run: abc: .psjob/abc is not the folder of a run of psjob")
    assert "--resume" not in line and "(old in .psjob)" in line and "--set spec.checkpoint.resumeFrom=null" in line
    assert refusal("abc", spec()).startswith("--resume abc: abc is not the folder of a run of psjob; name one of the runs here (old ")
    (old / "config.json").unlink()
    assert "there is no run in " in refusal("abc", spec()) and "without --resume" in refusal("abc", spec())


def by_job(job: str) -> JobSpec:
    return PSTrainingJob.model_validate(changed(GOOD, {"spec.workers.replicas": 1, "spec.checkpoint": {"resumeFrom": {"job": job}}})).spec


def test_a_job_is_the_newest_of_its_runs(old: Path) -> None:
    for number, (run, name) in enumerate((("a-2", "a"), ("a-1", "a"), ("b-1", "b"))):
        folder = old.parent / run
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"job": name}))
        (folder / "run.json").write_text(json.dumps({"job": name, "created": 100.0 + number}))
        commit(folder, 5)
    assert resumed_folder(None, by_job("a")) == (old.parent / "a-1", STEP)
    assert resumed_folder(None, by_job("b")) == (old.parent / "b-1", STEP)
    assert resumed_folder(Path(".psjob/a-2"), by_job("a")) == (old.parent / "a-2", STEP), "the option goes before the manifest"


def test_a_job_without_a_run_here_is_named_with_those_that_have_one(old: Path) -> None:
    (old / "config.json").write_text(json.dumps({"job": "digits"}))
    line = refusal(None, by_job("a-1"))
    assert line.startswith("spec.checkpoint.resumeFrom.job: a-1: no run of that job is in ") and "(jobs with runs there: digits)" in line
    assert line.endswith("or start anew with --set spec.checkpoint.resumeFrom=null")
    assert "that run has no checkpoint" in refusal(None, by_job("digits")), "a run's name is no job's"
    assert "no run of that job" in refusal(None, by_job("old"))


def test_a_path_that_cannot_be_looked_at_is_a_sentence(old: Path) -> None:
    assert "cannot be read: File name too long" in refusal("x" * 300, spec())
