"""Faults of the network drawn by seed, in every mode in which workers exchange at each step."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from tests.e2e import network_faults as faults
from tests.e2e.workloads import ledger
from tests.support.netjob import Phase, members
from tests.support.netns import require

pytestmark = [pytest.mark.nodes, pytest.mark.soak, pytest.mark.timeout(1800)]
DRAWN = 6
SECONDS = (3.0, 11.0, 27.0, 75.0)
"""A moment; longer than a process waits for its peer; than the kernel waits for most; than the kernel waits for any."""


def draw(chance: random.Random) -> Phase:
    """A fault between two processes that talk with each other. Shards are not killed: what is lost then is not counted here."""
    names = members(faults.SHARDS, faults.WORKERS)
    pairs = [pair for pair in itertools.permutations(names, 2) if any(name.startswith("shard-") for name in pair)]
    one, other = chance.choice(pairs)
    shards = one.startswith("shard-") and other.startswith("shard-")
    kind = chance.choice([faults.partition, faults.cut, faults.half_open])
    if kind is faults.half_open:
        return kind(one, other, shards=shards)
    return kind(one, other, shards=shards, seconds=chance.choice(SECONDS))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["sync", "bounded", "softsync", "async", "threshold"])
def test_a_job_goes_on_after_faults_drawn_by_seed(tmp_path: Path, mode: str, seed: int) -> None:
    require()
    chance = random.Random(f"{mode} {seed}")
    ran = faults.run(tmp_path, mode, [draw(chance) for _ in range(DRAWN)])
    assert ran.summary["updates_lost"] == 0
    if mode == "sync":
        assert ran.sha == faults.undisturbed(tmp_path / "plain", ran.summary["steps"]).sha
    if mode == "async":
        steps = [ran.summary["steps"]] * faults.WORKERS
        table = ledger.counted(ran.weights(), faults.WORKERS, faults.SHARDS)
        assert all(block == steps for blocks in table.values() for block in blocks), f"of {steps} pushes each: {table}"
