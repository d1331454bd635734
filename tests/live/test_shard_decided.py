"""Modes in which the coordinator decides, on real shards: every block holds the same pushes, and just those that were decided on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psjob.checkpoint import manifest
from psjob.checkpoint.manifest import read_records
from psjob.checkpoint.states import read_admission, read_states
from psjob.modes import Batch
from psjob.resume.record import unpack
from tests.live.checkpointing import OFTEN, counting, steps
from tests.live.decided import BACKUP, NUMBERS, SOFTSYNC, THRESHOLD, given, held_back, replayed, sgd, weights
from tests.live.live_shards import Worker, all_well, serving, together
from tests.live.training import batch, build, loss_of
from tests.reference import reference
from tests.soaking import rotating

pytestmark = pytest.mark.usefixtures("last_words")
STEPS, CUT_STEPS = 16, 24
MODES = pytest.mark.parametrize("mode", [BACKUP, SOFTSYNC, THRESHOLD], ids=["backup", "softsync", "threshold"])


def real(count: int, batches: list[Batch] | None = None) -> Callable[[Worker], None]:
    """Steps on the losses; one worker takes longer."""

    def act(worker: Worker) -> None:
        for step in range(count):
            worker.edge(step)
            time.sleep(0.004 * (1 + 3 * (worker.rank == 2)))
            worker.optimizer.zero_grad()
            loss_of(worker.model, batch(step, worker.rank)).backward()
            held_back(worker, batches)
            worker.optimizer.step()

    return act


@pytest.mark.parametrize(
    "way",
    [
        rotating({}, id="shared"),
        pytest.param({"transport": "tcp", "streams": 2}, id="lanes"),
        pytest.param({"gradients": 64 << 10}, id="little-room"),
    ],
)
def test_backup_is_a_batch_run_over_the_pushes_it_kept(tmp_path: Path, batches: list[Batch], way: dict[str, Any]) -> None:
    with serving(tmp_path, workers=3, shards=2, **BACKUP, **way) as shards:
        all_well([sgd(shards, rank) for rank in range(3)], real(STEPS, batches))
        assert shards.wait_ended() == [0, 0]
        held, counters = weights(shards), [server.store.counters for server in shards.servers]
    kept = [[(push.worker, push.clock) for push in one.kept] for one in batches if one.kept]
    dropped = sum(len(one.dropped) for one in batches)
    assert dropped and {(count.applied, count.dropped) for count in counters} == {(3 * STEPS - dropped, dropped)}
    states = reference(build(), "sgd", [NUMBERS], lambda step: [batch(clock, worker) for worker, clock in kept[step]], loss_of, len(kept))
    assert {cell: states[cell].weights.equal(flat) for cell, flat in held.items()} == dict.fromkeys(states, True)


@pytest.mark.parametrize(
    ("mode", "transport"),
    [
        pytest.param(BACKUP, "tcp", id="backup-tcp"),
        pytest.param(SOFTSYNC, "auto", id="softsync-auto"),
        pytest.param(THRESHOLD, "auto", id="threshold-auto"),
        rotating(BACKUP, "auto", id="backup-auto"),
        rotating(SOFTSYNC, "tcp", id="softsync-tcp"),
        rotating(THRESHOLD, "tcp", id="threshold-tcp"),
    ],
)
def test_the_decisions_replay_to_the_same_bits(tmp_path: Path, batches: list[Batch], mode: dict[str, Any], transport: str) -> None:
    """In softsync a worker goes on before its push is decided on, and writes over the memory that it lends."""
    with serving(tmp_path, workers=3, shards=2, transport=transport, **mode) as shards:
        all_well([sgd(shards, rank) for rank in range(3)], given(STEPS, batches if mode is SOFTSYNC else None))
        held = weights(shards)
    done = sorted((push.worker, push.clock) for one in batches for push in (*one.kept, *one.dropped))
    assert done == [(worker, clock) for worker in range(3) for clock in range(STEPS)]
    if mode is SOFTSYNC:
        assert any(share < 1 / 3 for one in batches for share in one.weights or ()), "nobody lagged"
    again = replayed(batches)
    assert {cell: again[cell].equal(flat) for cell, flat in held.items()} == dict.fromkeys(again, True)


@pytest.mark.parametrize("breaks", [rotating(0.0), 0.1])
@MODES
def test_a_checkpoint_is_one_version_of_every_block(tmp_path: Path, mode: dict[str, Any], breaks: float) -> None:
    """Its clocks say which pushes are decided; each record is of just that clock."""
    with serving(tmp_path, workers=3, shards=2, checkpoint=OFTEN, **mode) as shards:
        all_well([counting(shards, rank) for rank in range(3)], steps(CUT_STEPS, 3, breaks, shards))
        assert shards.wait_ended() == [0, 0]
    folder = tmp_path / "run-1"
    made = [manifest.read(folder, path.name) for path in sorted(folder.glob("manifest-*.json"))]
    assert len(made) > 3 and made[0].step == 0 and made[-1].final
    for one in made:
        states = read_states(folder, one, [block.index for block in one.layout.blocks])
        values = {number for state, _ in states.values() for number in state.weights.tolist()}
        assert len(values) == 1, one.name
        assert mode is SOFTSYNC or values == {float(one.step)}
        assert {place.n for place in one.blocks} == {one.step}
        clocks = {rank: int(worker["clock"]) for rank, worker in one.workers.items()}
        for shard in range(one.shards):
            rows = read_admission(folder, one, shard)
            assert rows is not None
            assert {rank: row["complete"] for rank, row in rows.items()} == clocks and not any(row["open"] for row in rows.values())
        if not one.final:
            for rank, raw in read_records(folder, one).items():
                assert unpack(raw).step == clocks[str(rank)]
    assert {int(worker["clock"]) for worker in made[-1].workers.values()} == {CUT_STEPS}


@MODES
def test_a_worker_that_dies_comes_back_at_its_first_undecided_push(tmp_path: Path, batches: list[Batch], mode: dict[str, Any]) -> None:
    with serving(tmp_path, workers=3, shards=2, **mode) as shards:
        dying, follower = sgd(shards, 1), sgd(shards, 1, start=2)

        def act(worker: Worker) -> None:
            given(10 if worker is dying else STEPS, begin=worker.job.made)(worker)
            if worker is dying:
                worker.die()
                follower.attach()
                assert 8 <= follower.job.made <= follower.session.clock <= 10
                act(follower)
                assert follower.leave() == 0
                raise Killed

        raised = together([sgd(shards, 0), dying, sgd(shards, 2)], act)
        assert [type(error) for error in raised] == [type(None), Killed, type(None)], raised
        assert shards.wait_ended() == [0, 0]
        held = weights(shards)
    done = sorted((push.worker, push.clock) for one in batches for push in (*one.kept, *one.dropped))
    assert done == [(worker, clock) for worker in range(3) for clock in range(STEPS)]
    again = replayed(batches)
    assert {cell: again[cell].equal(flat) for cell, flat in held.items()} == dict.fromkeys(again, True)


class Killed(Exception):
    """The worker's process is no more."""
