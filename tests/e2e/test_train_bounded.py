"""Bounded staleness as a user runs it: shards and workers are killed, the job is stopped, and it goes on in another mode."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.e2e.workloads import ledger
from tests.e2e.workloads.gates import steps_of
from tests.e2e.workloads.running import SECONDS, faults, finish, manifest, start, train

WORKERS, SHARDS, STEPS = 2, 2, 140
CHECKPOINTS = {"everySteps": 20, "interval": "1h", "keep": 100}
TRAINING = {"mode": "bounded", "staleness": 2}
pytestmark = pytest.mark.timeout(1500)


@pytest.mark.rotating
def test_a_killed_shard_loses_what_it_says_and_a_killed_worker_nothing(tmp_path: Path) -> None:
    words = ["ledger.py", str(STEPS), "0.02", "50:40"]
    job = manifest(tmp_path, words, workers=WORKERS, shards=SHARDS, training=TRAINING, checkpoint=CHECKPOINTS)
    ran = train(tmp_path, job, *faults("kill:ps-1@step=70", "kill:worker-0@step=105"))
    assert sum(ran.summary["restarts"].values()) == 2 and ran.summary["attempts"] == [1, 2], "only who was killed was started again"
    table = ledger.counted(ran.weights(), WORKERS, SHARDS)
    assert all(block == [STEPS] * WORKERS for block in table[0]), table
    assert all(count <= STEPS for block in table[1] for count in block), f"a push counted twice: {table}"
    (missing,) = {STEPS * WORKERS - sum(block) for block in table[1]}
    assert missing == ran.summary["updates_lost"] > 0


@pytest.mark.soak
def test_a_stopped_run_goes_on_in_sync(tmp_path: Path) -> None:
    """Its last checkpoint is one step of all workers, so what was pushed before counts once each, and what came after as means."""
    job = manifest(tmp_path, ["ledger.py", str(STEPS), "0.05"], workers=WORKERS, shards=SHARDS, training=TRAINING, checkpoint=CHECKPOINTS)
    process, limit = start(tmp_path, job), time.monotonic() + SECONDS / 2
    while not any(max(steps_of(run), default=0) >= 20 for run in tmp_path.glob(".psjob/*")) and time.monotonic() < limit:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    stopped = finish(process, tmp_path)
    at = stopped.summary["checkpoint"]["step"]
    assert stopped.summary["result"] == "Suspended" and 20 <= at < STEPS, stopped.err
    ran = train(tmp_path, job, "--resume", str(stopped.folder), "--set", "spec.training.mode=sync")
    weights = ran.weights()
    found = {float(weights[tensor][element]) for rank in range(WORKERS) for _, tensor, element in ledger.places(rank)}
    assert found == {at + (STEPS - at) / WORKERS}
