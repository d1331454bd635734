"""Checkpoints taken while training runs are whole: each block holds just the updates that the manifest says were made.

Every push adds 1 to every weight, so a block's weights tell how many pushes they contain.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from psjob.checkpoint import manifest
from psjob.checkpoint.manifest import Manifest, read_records
from psjob.checkpoint.states import read_admission, read_states
from psjob.process.config import CheckpointConfig
from psjob.resume.record import unpack
from tests.live.checkpointing import OFTEN, counting, steps
from tests.live.live_shards import SECONDS, Worker, all_well, serving, until_checkpoints
from tests.soaking import rotating

STEPS = 32
EVERY_5 = CheckpointConfig(interval_seconds=3600.0, every_steps=5, keep=1000, disabled=False, resume_from=None)


pytestmark = pytest.mark.usefixtures("last_words")


def manifests(folder: Path) -> list[tuple[Manifest, dict[int, float]]]:
    """Every manifest there with the one number that each block's weights hold."""
    found = []
    for path in sorted(folder.glob("manifest-*.json")):
        made = manifest.read(folder, path.name)
        states = read_states(folder, made, [block.index for block in made.layout.blocks])
        values: dict[int, float] = {}
        for index, (state, _) in states.items():
            assert len(set(state.weights.tolist())) == 1, "a block was copied while an update was made"
            values[index] = float(state.weights[0])
        found.append((made, values))
    return found


@pytest.mark.parametrize("breaks", [rotating(0.0), 0.1])
def test_a_sync_checkpoint_is_one_step(tmp_path: Path, breaks: float) -> None:
    with serving(tmp_path, workers=3, shards=2, checkpoint=OFTEN) as shards:
        all_well([counting(shards, rank) for rank in range(3)], steps(STEPS, 1, breaks, shards))
        assert shards.wait_ended() == [0, 0]
        made = manifests(tmp_path / "run-1")
    assert len(made) > 3 and made[0][0].step == 0 and made[-1][0].final and made[-1][0].step == STEPS
    for one, values in made:
        assert set(values.values()) == {float(one.step)}
        assert {place.n for place in one.blocks} == {one.step}
        assert {int(worker["clock"]) for worker in one.workers.values()} == {one.step}
        records = read_records(tmp_path / "run-1", one)
        if 0 < one.step < STEPS:
            assert {rank: unpack(raw).step for rank, raw in records.items()} == dict.fromkeys(range(3), one.step)


@pytest.mark.parametrize("breaks", [rotating(0.0), 0.1])
def test_an_async_checkpoint_has_one_clock_a_worker_in_every_block(tmp_path: Path, breaks: float) -> None:
    """Marks hold the workers until all shards have copied: the sum of the clocks is what every block holds."""
    with serving(tmp_path, workers=3, shards=2, mode="async", checkpoint=OFTEN) as shards:
        all_well([counting(shards, rank) for rank in range(3)], steps(STEPS, 2, breaks, shards))
        assert shards.wait_ended() == [0, 0]
        made = manifests(tmp_path / "run-1")
    assert len(made) > 2 and made[-1][0].final
    for one, values in made:
        clocks = {rank: int(worker["clock"]) for rank, worker in one.workers.items()}
        assert set(values.values()) == {float(sum(clocks.values()))}, (one.name, clocks, values)
        assert one.step == min(clocks.values())
        for shard in range(one.shards):
            rows = read_admission(tmp_path / "run-1", one, shard)
            assert rows is not None
            assert {rank: row["complete"] for rank, row in rows.items()} == clocks and not any(row["open"] for row in rows.values())
        for rank, raw in read_records(tmp_path / "run-1", one).items():
            assert unpack(raw).step == clocks[str(rank)]
    assert set(made[-1][1].values()) == {3.0 * STEPS}


def test_checkpoints_by_steps_stand_at_multiples(tmp_path: Path) -> None:
    """Each is named two steps ahead, so workers wait there until it is ordered."""
    with serving(tmp_path, workers=2, shards=2, checkpoint=EVERY_5) as shards:

        def act(worker: Worker) -> None:
            for step in range(23):
                if step % 5 == 3 and step < 20:
                    until_checkpoints(worker, shards, 1 + step // 5)
                worker.edge(step)
                steps(1, step)(worker)

        all_well([counting(shards, rank) for rank in range(2)], act)
        made = [one.step for one, _ in manifests(tmp_path / "run-1")]
    assert made == [0, 5, 10, 15, 20, 23]


def test_a_request_makes_a_checkpoint(tmp_path: Path) -> None:
    """`ps.checkpoint()`, where the interval is far off."""
    with serving(tmp_path, workers=1, shards=2) as shards:
        worker = counting(shards, 0)

        def act(worker: Worker) -> None:
            steps(3, 5)(worker)
            worker.session.checkpoint()
            deadline = time.monotonic() + SECONDS / 2
            while len(list((tmp_path / "run-1").glob("manifest-*.json"))) < 2 and time.monotonic() < deadline:
                steps(1, 6)(worker)

        all_well([worker], act)
        made = [one.step for one, _ in manifests(tmp_path / "run-1")]
    assert made[0] == 0 and len(made) == 3 and made[1] >= 3
