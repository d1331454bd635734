"""The norm of the mean gradient over two shards: by manifest or by script, the same bits whoever is killed (real processes)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.workloads.clipping import LIMIT
from tests.e2e.workloads.running import faults, manifest, train

pytestmark = pytest.mark.timeout(600)


def job(folder: Path, *words: str, **training: Any) -> Path:
    folder.mkdir(exist_ok=True)
    return manifest(
        folder, ["clipping.py", *words], workers=3, shards=2, training={"mode": "sync", **training},
        checkpoint={"interval": "1h", "everySteps": 10}, ps={"shardTimeoutSeconds": 3},
    )  # fmt: skip


@pytest.mark.soak
def test_a_kill_changes_no_bit_of_a_clipped_run(tmp_path: Path) -> None:
    calm = train(tmp_path / "calm", job(tmp_path / "calm", "0", maxGradNorm=LIMIT))
    assert calm.summary["metrics"]["grad_norm"] > LIMIT, "something was clipped"
    asked = train(tmp_path / "asked", job(tmp_path / "asked", "0", "script"))
    assert asked.sha == calm.sha, "by the script or by the manifest"
    assert train(tmp_path / "none", job(tmp_path / "none", "0")).sha != calm.sha
    for number, hit in enumerate(("kill:ps-0@step=25", "kill:ps-1@step=25", "kill:worker-1@step=25", "stop:ps-1@step=33")):
        folder = tmp_path / str(number)
        assert train(folder, job(folder, "0.05", maxGradNorm=LIMIT), *faults(hit)).sha == calm.sha, hit


@pytest.mark.rotating
@pytest.mark.parametrize("words", [{"mode": "async"}, {"mode": "sync", "backupWorkers": 1}])
def test_a_mode_without_a_mean_of_all_workers_is_refused(tmp_path: Path, words: dict[str, Any]) -> None:
    ran = train(tmp_path, job(tmp_path, "0", maxGradNorm=LIMIT, **words), expect=2)
    assert "spec.training.maxGradNorm: Invalid value: 0.5: must not be given but in spec.training.mode: sync" in ran.err
