"""A job that is suspended while workers are drained, by the clock of the simulator: nothing that was made is lost, in any mode."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.simulation.protocol import plan as plans
from tests.simulation.protocol.world import World

SEEDS = range(3)


@pytest.mark.parametrize("mode", plans.MODES)
def test_drained_workers_and_a_suspension_lose_no_step(mode: str) -> None:
    for seed in SEEDS:
        random = Random(f"stop {seed} {mode}")
        drawn = plans.draw(seed, mode)
        plan = replace(
            drawn, faults=(), every=None, interval=1e6, steps=(400,) * drawn.workers, policy="AllWorkers",
            shard_bytes=1_000_000, disk_rate=1e8, rate=1e8, record_bytes=300,
        )  # fmt: skip
        world = World(plan)
        world.begin()
        to(world, 10 + 5 * random.random())
        ranks = random.choice(([random.randrange(plan.workers)], range(plan.workers)))
        for rank in ranks:
            world.workers[rank].terminate()
        to(world, world.kernel.now + random.choice((0.0, 0.1, 0.5)))
        made = [world.workers[rank].machine.clock for rank in range(plan.workers)]
        world.planner.suspend()
        to(world, world.kernel.now + 30)
        assert not any(process.alive for process in (*world.shards.values(), *world.workers.values()))
        newest = max(world.saved.values(), key=lambda saved: saved.snapshot)
        # What no update holds yet is pushed again from the record: an update of these modes takes some pushes and leaves others.
        late = 1 if mode in ("softsync", "threshold") else 0
        assert min(made) > 5 and all(worker.clock >= clock - late for worker, clock in zip(newest.workers, made, strict=True)), (seed, made)


def to(world: World, at: float) -> None:
    """Run until that time of the simulator."""
    world.kernel.run(lambda: world.kernel.now > at, 1e9)
