"""Sync training through faults of a real network between namespaces: it continues within 15 s, and no bit of the weights differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import network_faults as faults
from tests.support.netjob import Phase
from tests.support.netns import require
from tests.support.soaking import rotating, soak

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(900)]
PHASES = [
    faults.partition("worker-0", "shard-1", stops=(0, 1)),
    faults.cut("worker-1", "shard-0", stops=(0, 1)),
    faults.cut("shard-1", "worker-0", stops=(0, 1)),
    faults.cut("shard-1", "shard-0", shards=True),
    faults.cut("shard-0", "shard-1", shards=True),
    faults.half_open("shard-1", "worker-0"),
    faults.half_open("shard-0", "shard-1", shards=True),
    faults.killed(1),
    faults.narrow("worker-1", 1_000_000, steps=30),
    faults.lossy(5, steps=40),
    faults.late(0.2, steps=15),
]
TWO = [
    faults.partition("worker-0", "shard-1", stops=(0, 1)),
    faults.half_open("shard-1", "worker-0"),
]
FEW = [
    faults.partition("worker-0", "shard-1", stops=(0, 1)),
    faults.cut("shard-1", "shard-0", shards=True),
    faults.half_open("shard-1", "worker-0"),
    faults.lossy(5, steps=20),
    faults.late(0.2, steps=8),
]


@pytest.mark.parametrize("phases", [TWO, rotating(FEW), soak(PHASES)], ids=["two", "few", "all"])
def test_faults_of_the_network_change_no_bit(tmp_path: Path, phases: list[Phase]) -> None:
    require()
    ran = faults.run(tmp_path, "sync", phases)
    plain = faults.undisturbed(tmp_path / "plain", ran.summary["steps"])
    assert ran.summary["updates_lost"] == 0 and ran.sha == plain.sha
