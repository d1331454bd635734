"""Async, shards killed: nothing counts twice, and what is missing is what the shard reports as lost (measure 3)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from psjob.checkpoint.manifest import read
from tests.e2e.workloads import ledger
from tests.e2e.workloads.running import Ran, check_torn, faults, manifest, train
from tests.support.soaking import rotating, soak

WORKERS, SHARDS, STEPS = 2, 2, 220
pytestmark = pytest.mark.timeout(1500)
CHECKPOINTS = {"everySteps": 25, "periodSeconds": 3600, "keep": 100}


def run(folder: Path, *what: str, gates: str, transport: str = "auto", codec: str = "none") -> Ran:
    training = {"mode": "async", "transport": transport, "compression": {"push": codec, "pull": codec}}
    words = ["ledger.py", str(STEPS), "0.02", gates]
    ran = train(folder, manifest(folder, words, workers=WORKERS, shards=SHARDS, training=training, checkpoint=CHECKPOINTS), *faults(*what))
    assert ran.summary["transport"] == ("tcp" if transport == "tcp" else "shared")
    return ran


@pytest.mark.parametrize(
    ("shard", "transport", "codec"),
    [
        (1, "auto", "none"),
        rotating(0, "auto", "none"),
        rotating(0, "tcp", "none"),
        rotating(1, "tcp", "bf16"),
        soak(1, "tcp", "none"),
    ],
)
def test_what_a_killed_shard_lost_is_what_is_missing(tmp_path: Path, shard: int, transport: str, codec: str) -> None:
    check(run(tmp_path, f"kill:shard-{shard}@step=88", gates="58:50", transport=transport, codec=codec), shard)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(24))
def test_twenty_four_kills_leave_the_ledger_right(tmp_path: Path, seed: int) -> None:
    """Each shard, each way of blocks that keeps the ledger's numbers whole, three steps drawn by chance."""
    step, shard = random.Random(seed).randint(70, 200), seed % 2
    transport, codec = (("auto", "none"), ("tcp", "none"), ("tcp", "bf16"), ("tcp", "fp16"))[seed // 2 % 4]
    gates = f"{step - 15}:{max(50, (step - 20) // 25 * 25)}"
    check(run(tmp_path, f"kill:shard-{shard}@step={step}", gates=gates, transport=transport, codec=codec), shard)


@pytest.mark.parametrize(
    ("shard", "transport"),
    [rotating(0, "tcp"), *(soak(shard, way) for shard, way in ((0, "auto"), (1, "auto"), (1, "tcp")))],
)
def test_a_shard_killed_while_it_writes_a_checkpoint_loses_what_it_says(tmp_path: Path, shard: int, transport: str) -> None:
    """It goes back to the checkpoint before; the workers, which had marked, are released."""
    ran = run(tmp_path, f"kill:shard-{shard}@cut=3", gates="", transport=transport)
    check_torn(ran, shard)
    check(ran, shard)


def check(ran: Ran, shard: int) -> None:
    (recovery,) = ran.summary["recoveries"]
    print(
        f"{recovery['fault']}: {recovery['secondsToFirstPush']:.2f} s to the first push, {recovery['secondsToPassStep']:.2f} s to the step"
    )
    assert recovery["manifests"] >= 2 and recovery["checkpointStep"] > 0, recovery
    assert max(recovery["acknowledged"].values()) > recovery["checkpointStep"], recovery
    assert sum(ran.summary["restarts"].values()) == 1, "only the killed shard was started again"
    table = ledger.counted(ran.weights(), WORKERS, SHARDS)
    done = dict.fromkeys(range(WORKERS), STEPS)
    for blocks in table.values():
        for block in blocks:
            assert all(count <= done[rank] for rank, count in enumerate(block)), f"a push counted twice: {table}"
    assert len(table[0]) > 1 and len(table[1]) > 1
    other = 1 - shard
    assert all(block == [STEPS] * WORKERS for block in table[other]), f"the shard that lived has lost something: {table[other]}"
    missing = {STEPS * WORKERS - sum(block) for block in table[shard]}
    assert len(missing) == 1, f"blocks of one shard lost differently: {table[shard]}"
    (lost,) = missing
    assert lost == lost_of(ran, shard) == ran.summary["updates_lost"] > 0
    assert lost_of(ran, other) == 0
    status = json.loads((ran.folder / "status.json").read_text())
    assert status["lastRecovery"]["updatesLost"] == status["restarts"]["updatesLost"] == lost, "the status tells another number"
    assert status["lastRecovery"]["durationSeconds"] > 0 and "interruption" not in status
    since = applied_since_the_cut(ran, recovery)
    print(f"lost {lost} of {since} updates that came after the checkpoint of step {recovery['checkpointStep']}")
    assert lost <= since


def lost_of(ran: Ran, shard: int) -> int:
    """The shard's own counter, from its last words."""
    attempt = ran.summary["attempts"][shard]
    return int(ran.last_words(f"job-shard-{shard}-a{attempt}")["status"]["counters"]["updatesLost"])


def applied_since_the_cut(ran: Ran, recovery: dict[str, Any]) -> int:
    """Most updates that the dead shard can have applied since the last known checkpoint: what the workers had back, and one each."""
    (path,) = ran.folder.glob(f"manifest-v*-s{recovery['checkpointStep']:012d}.json")
    cut = {int(rank): int(entry["clock"]) for rank, entry in read(ran.folder, path.name).workers.items()}
    total = 0
    for rank in range(WORKERS):
        words = [line.split() for line in ran.log(f"job-worker-{rank}-").splitlines() if line.startswith("step ")]
        back = [int(step) for _, step, _, at in words if float(at) <= recovery["at"]]
        total += max(back) + 1 - cut[rank]
    return total


@pytest.mark.rotating
def test_the_ledger_of_a_killed_shard_is_right_with_overlap(tmp_path: Path) -> None:
    """What was sent before a step that never came counts nowhere."""
    words = ["ledger.py", str(STEPS), "0.02", "58:50", "overlap"]
    job = manifest(tmp_path, words, workers=WORKERS, shards=SHARDS, training={"mode": "async"}, checkpoint=CHECKPOINTS)
    check(train(tmp_path, job, *faults("kill:shard-1@step=88")), 1)
