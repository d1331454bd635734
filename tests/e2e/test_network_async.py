"""Async training through faults of a real network between namespaces: it continues within 15 s, no push is lost and none counts twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import network_faults as faults
from tests.e2e.workloads import ledger
from tests.support.netns import require

pytestmark = [pytest.mark.nodes, pytest.mark.soak, pytest.mark.timeout(900)]
PHASES = [
    faults.partition("worker-0", "shard-1", stops=(0,)),
    faults.cut("worker-1", "shard-0", stops=(1,)),
    faults.cut("shard-1", "worker-0", stops=(0,)),
    faults.partition("shard-0", "shard-1", shards=True),
    faults.half_open("shard-1", "worker-0"),
    faults.half_open("shard-0", "worker-1"),
    faults.lossy(5, steps=40),
    faults.late(0.2, steps=8),
    faults.narrow("worker-0", 1_000_000, steps=15),
    faults.partition("worker-0", "shard-1", seconds=27.0, stops=(0,)),
]


def test_faults_of_the_network_lose_no_push_and_double_none(tmp_path: Path) -> None:
    require()
    ran = faults.run(tmp_path, "async", PHASES)
    table = ledger.counted(ran.weights(), faults.WORKERS, faults.SHARDS)
    steps = [ran.summary["steps"]] * faults.WORKERS
    assert ran.summary["updates_lost"] == 0
    assert all(block == steps for blocks in table.values() for block in blocks), f"of {steps} pushes each: {table}"
