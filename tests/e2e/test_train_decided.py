"""Modes in which the coordinator decides, as jobs: processes are killed in the middle, and every push counts at most once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from psjob.checkpoint.manifest import newest
from tests.e2e.workloads.running import Ran, faults, manifest, train
from tests.support.soaking import soak

pytestmark = pytest.mark.timeout(1000)
CHECKPOINTS = {"everySteps": 20, "periodSeconds": 3600, "keep": 100}
STEPS = 100
"""Of 3 workers in 5 epochs."""


def run(folder: Path, training: dict[str, Any], *what: str, gates: str = "", policy: str = "AllWorkers") -> Ran:
    folder.mkdir()
    late = "late" if policy == "FirstWorker" else ""
    job = manifest(
        folder, ["decided.py", "5", gates, late], workers=3, shards=2, checkpoint=CHECKPOINTS, training=training,
        runPolicy={"successPolicy": policy},
    )  # fmt: skip
    return train(folder, job, *faults(*what))


@pytest.mark.rotating
def test_kills_change_no_bit_of_a_run_with_a_backup_worker(tmp_path: Path) -> None:
    """The last worker's pushes never count, so the weights are those of the other two, who end the job."""
    plain = run(tmp_path / "plain", {"sync": {"backupWorkers": 1}}, policy="FirstWorker")
    assert plain.summary["steps"] == STEPS and plain.summary["restarts"] == {}
    what = ("kill:shard-1@step=45", "kill:worker-2@step=60", "kill:shard-0@step=75")
    hit = run(tmp_path / "hit", {"sync": {"backupWorkers": 1}}, *what, gates="35:20,65:60", policy="FirstWorker")
    assert [r["fault"] for r in hit.summary["recoveries"]] == list(what)
    assert hit.summary["attempts"] == [2, 2] and hit.summary["updates_lost"] == 0
    assert hit.summary["steps"] == STEPS and hit.sha == plain.sha
    mine, theirs = hit.weights(), plain.weights()
    assert {name: tensor.equal(theirs[name]) for name, tensor in mine.items()} == dict.fromkeys(theirs, True)


@pytest.mark.parametrize(
    "training",
    [
        soak({"mode": "softsync", "softsync": {"splits": 3}}, id="softsync"),
        soak({"mode": "threshold", "threshold": {"staleness": 4}}, id="threshold"),
    ],
)
def test_a_killed_shard_and_a_killed_worker_stop_no_job(tmp_path: Path, training: dict[str, Any]) -> None:
    """Every worker comes to its end, whoever was lost."""
    what = ("kill:shard-1@step=90", "kill:worker-1@step=150")
    hit = run(tmp_path / "hit", training, *what, gates="30:20")
    assert [r["fault"] for r in hit.summary["recoveries"]] == list(what)
    assert hit.summary["attempts"] == [1, 2] and hit.summary["result"] == "Complete"
    made, _ = newest(hit.folder, str(hit.summary["run"]))
    assert made is not None and made.final and {int(worker["clock"]) for worker in made.workers.values()} == {STEPS}
    assert made.step > STEPS, "updates of some workers, not of all together"
