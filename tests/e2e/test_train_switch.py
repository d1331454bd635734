"""A running job is told another mode by its config: it goes over at a checkpoint, and no push is lost or counts twice."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.workloads import ledger
from tests.e2e.workloads.running import SECONDS, faults, finish, manifest, start

WORKERS, SHARDS, STEPS = 2, 2, 240
TOLD = "told"
"""The file for which the script waits, however late this test's process is."""
pytestmark = pytest.mark.timeout(1500)


@pytest.mark.rotating
def test_sync_async_sync_while_training_goes_on(tmp_path: Path) -> None:
    """A step of sync adds half a push of each worker, any other a whole one; the last shard 0 to die finds the mode in the checkpoint."""
    checkpoints = {"everySteps": 20, "interval": "1h", "keep": 100}
    words = ["ledger.py", str(STEPS), "0.02", f"140:{TOLD},205:200"]
    job = manifest(tmp_path, words, workers=WORKERS, shards=SHARDS, checkpoint=checkpoints)
    process = start(tmp_path, job, *faults("kill:ps-0@step=225"))
    tell(tmp_path, mode="async", staleness=None)
    changed(tmp_path, "async")
    tell(tmp_path, mode="sync", staleness=None).with_name(TOLD).touch()
    ran = finish(process, tmp_path)
    assert ran.code == 0 and ran.summary["attempts"] == [2, 1] and ran.summary["updates_lost"] == 0, ran.err
    steps = switches(ran.folder)
    assert [mode for _, mode in steps] == ["async", "bounded:3", "sync"], "from async by way of bounded"
    alone = steps[2][0] - steps[0][0]
    assert 0 < steps[0][0] < steps[2][0] < 225
    weights = ran.weights()
    found = {float(weights[tensor][element]) for rank in range(WORKERS) for _, tensor, element in ledger.places(rank)}
    assert found == {alone + (STEPS - alone) / WORKERS}


def tell(folder: Path, **training: Any) -> Path:
    """Change the config that the processes read, once the job trains; where it lies."""
    deadline = time.monotonic() + SECONDS / 2
    while not (paths := list(folder.glob(".psjob/*/manifest-*.json"))):
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.05)
    path = paths[0].parent / "config.json"
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({**json.loads(path.read_text()), **training}))
    fresh.replace(path)  # nobody reads half of it
    return path


def changed(folder: Path, mode: str) -> None:
    deadline = time.monotonic() + SECONDS / 2
    while mode not in [to for run in folder.glob(".psjob/*") for _, to in switches(run)]:
        assert time.monotonic() < deadline, f"it did not go over to {mode}"
        time.sleep(0.05)


def switches(run: Path) -> list[tuple[int, str]]:
    """(step, mode) of each change, as shard 0 has logged it."""
    told = "".join(path.read_text() for path in sorted((run / "logs").glob("job-ps-0-*.log")))
    return [(int(step), mode) for step, mode in re.findall(r"from step (\d+) on the mode is (\S+), it was", told)]
