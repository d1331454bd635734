"""Generated sessions of a worker with a valid key: the weights, the other worker's steps and shard 0's health stay what they are to be."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from random import Random
from typing import Any

import pytest

from psjob.contract import HEALTH_PATH
from tests.live.hostile import LIMIT, LR, World
from tests.soaking import soak

STEP_SECONDS = 5.0
"""For one step of the honest worker on a busy machine; alone it takes some milliseconds."""
WAYS: dict[str, dict[str, Any]] = {
    "sync": {"max_grad_norm": LIMIT, "non_finite": "skip", "shards": 1},
    "script": {"non_finite": "skip", "max_push_norm": LIMIT, "shards": 2},
    "async": {"mode": "async", "max_push_norm": LIMIT, "non_finite": "skip", "shards": 1},
}
"""By name, a config. In `script` no norm is the manifest's: a worker may ask for one by itself."""


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("way", "sessions"),
    [("sync", 80), ("script", 60), ("async", 60), soak("sync", 2000), soak("script", 1500), soak("async", 1500)],
)
def test_a_hostile_worker_has_its_own_part_and_no_more(tmp_path: Path, way: str, sessions: int) -> None:
    seed = 0 if sessions <= 80 else Random().randrange(1 << 32)
    random, world = Random(f"{way} {seed}"), World(tmp_path, WAYS[way])
    mode = WAYS[way].get("mode", "sync")
    # Blocks are measured together by the manifest's norm, and one by one by that of a push, of which a step has two.
    most = LR * (LIMIT if way == "sync" else LIMIT * 2**0.5)
    try:
        world.begin()
        for number in range(sessions):
            sent = world.hostile(random)
            try:
                took = world.honest_step(mode)
                assert took <= STEP_SECONDS
                if world.stores[0].admission.rows[1].left_at is not None or world.stores[0].recovery != world.recovery:
                    world.begin()
                world.check(most if mode == "sync" else 2 * most)
                if number % 20 == 0:
                    assert healthy(world)
            except BaseException as error:
                error.add_note(f"{way}, seed {seed}, session {number}: {sent!r:.4000}")
                raise
    finally:
        world.close()
    assert world.restarted <= 2 + sessions // 10, "what a worker can do to all is rare here"


def healthy(world: World) -> bool:
    """Shard 0 answers who asks whether it lives."""
    address = f"http://127.0.0.1:{world.health.server_port}{HEALTH_PATH}"
    with urllib.request.urlopen(address, timeout=STEP_SECONDS) as answer:
        return bool(answer.status == 200)
