"""Async with overlap, a shard killed: what was sent before a step that never came counts nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import test_train_ledger as ledgers
from tests.e2e.workloads.running import faults, manifest, train

pytestmark = pytest.mark.timeout(1500)


@pytest.mark.rotating
def test_the_ledger_of_a_killed_shard_is_right_with_overlap(tmp_path: Path) -> None:
    words = ["ledger.py", str(ledgers.STEPS), "0.02", "58:50", "overlap"]
    job = manifest(
        tmp_path, words, workers=ledgers.WORKERS, shards=ledgers.SHARDS, training={"mode": "async"}, checkpoint=ledgers.CHECKPOINTS
    )
    ledgers.check(train(tmp_path, job, *faults("kill:ps-1@step=88")), 1)
