"""Shards beside workers, as real processes: what crosses the network of each machine, and what the loss of a machine costs.

On one host each index stands for a machine: only worker i and shard i share memory, and all other streams are its network.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.workloads.running import Ran, faults, manifest, train
from tests.support.soaking import rotating, soak

pytestmark = pytest.mark.timeout(600)
TENSORS, FIRST, LAST = 12, 5, 15
MODEL = TENSORS << 20
"""Bytes."""
SLACK = 0.02
STEPS = 40
"""Of a run that is hit."""


def run(folder: Path, machines: int, *args: str, pace: float = 0.0, steps: int = LAST, placement: str = "Colocated") -> Ran:
    words = ["colocated.py", *map(str, (TENSORS, steps, FIRST, LAST, pace))]
    kept = {"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteMany"]}}, "periodSeconds": 3600, "everySteps": 10}
    job = manifest(folder, words, workers=machines, shards=machines, of_shards={"placement": placement}, checkpoint=kept)
    return train(folder, job, *args)


class Noted:
    """What the workers of a run have noted, in bytes a step."""

    def __init__(self, folder: Path, machines: int) -> None:
        self.machines = machines
        self._notes = [json.loads((folder / f"carried-{rank}.json").read_text()) for rank in range(machines)]

    def moved(self, rank: int, shard: int, way: int) -> float:
        """Bytes that worker `rank` has received from a shard (way 0), or sent to it (way 1), by their streams."""
        first, last = (self._notes[rank][str(step)][shard][way] for step in (FIRST, LAST))
        return float((last - first) / (LAST - FIRST))

    def network(self, machine: int) -> tuple[float, float]:
        """(received, sent): by the worker's streams to other shards, and the shard's to other workers."""
        others = [other for other in range(self.machines) if other != machine]

        def both(worker_way: int, shard_way: int) -> float:
            return sum(self.moved(machine, other, worker_way) + self.moved(other, machine, shard_way) for other in others)

        return both(0, 1), both(1, 0)

    def shared(self, rank: int) -> list[bool]:
        """Whether the worker's blocks go by shared memory, by shard."""
        return [bool(shared) for _, _, shared in self._notes[rank][str(LAST)]]


@pytest.mark.parametrize("machines", [rotating(2), soak(3), rotating(4)])
def test_each_machine_carries_what_the_formula_says(tmp_path: Path, machines: int) -> None:
    ran = run(tmp_path, machines)
    noted = Noted(tmp_path, machines)
    wanted = 2 * MODEL * (machines - 1) / machines
    for machine in range(machines):
        received, sent = noted.network(machine)
        print(f"machine {machine} of {machines}: received {received / wanted:.4f} and sent {sent / wanted:.4f} of 2M(m-1)/m")
        assert (1 - SLACK) * wanted < received <= (1 + SLACK) * wanted
        assert (1 - SLACK) * wanted < sent <= (1 + SLACK) * wanted
        assert noted.shared(machine) == [shard == machine for shard in range(machines)]
        own = noted.moved(machine, machine, 0) + noted.moved(machine, machine, 1)
        assert own < 0.001 * MODEL, "headers and the worker's record: the own part is in shared memory"
    assert ran.summary["transport"] == "mixed"


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run that nothing disturbs, whose blocks all go by shared memory."""
    ran = run(tmp_path_factory.mktemp("calm"), 2, steps=STEPS, placement="Packed")
    assert ran.summary["transport"] == "shared"
    return ran


@pytest.mark.rotating
@pytest.mark.parametrize("machine", [0, 1])
def test_a_machine_that_dies_costs_one_restart_each_and_no_bit(tmp_path: Path, calm: Ran, machine: int) -> None:
    """SIGKILL to its worker and its shard in one moment; shard 0 has the coordinator."""
    what = (f"kill:shard-{machine}@step=25", f"kill:worker-{machine}@step=25")
    hit = run(tmp_path, 2, *faults(*what), pace=0.03, steps=STEPS)
    assert hit.sha == calm.sha, "neither the road of a block nor the kill changes a bit"
    first, second = hit.summary["recoveries"]
    assert abs(first["at"] - second["at"]) < 1.0 and {first["fault"], second["fault"]} == set(what)
    status = json.loads((hit.folder / "status.json").read_text())
    both = {("shard", machine): 1, ("worker", machine): 1}
    assert {(it["role"], it["index"]): it["count"] for it in status["restarts"]["byProcess"]} == both
    assert hit.summary["attempts"] == [1 + (shard == machine) for shard in range(2)]
    assert status["restarts"]["total"] == status["restarts"]["counted"] == 2
