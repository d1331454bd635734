"""A pipeline of stages on real shards: workers give each other activations and gradients over real streams, and die."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from psjob.contract import EXIT_REFUSED
from psjob.modes.stages import Stages
from tests.live import stage_workers
from tests.live.live_shards import SECONDS, Died, eventually, serving
from tests.live.stage_oracle import alone, check_last_checkpoint, compare, lose_two_neighbours
from tests.live.stage_workers import MOMENTS, STEPS, Cluster, Kills, StageWorker, batch, has, kill_once, trained, untied
from tests.support.covering import each_pair, each_value
from tests.support.soaking import rotating, soak


@pytest.mark.parametrize(("stages", "microbatches", "count"), each_pair([1, 2, 4], [1, 4], [1, 3]))
def test_flush_is_the_training_of_one_process(tmp_path: Path, stages: int, microbatches: int, count: int) -> None:
    compare(trained(tmp_path, (1,) * stages, microbatches, count), microbatches)


@pytest.mark.soak
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("microbatches", [0, 1, 2], ids=["M=1", "M=K", "M=2K"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_hundred_steps_are_those_of_one_process(tmp_path: Path, stages: int, microbatches: int, count: int) -> None:
    with serving(tmp_path, workers=stages, shards=count, stages=Stages((1,) * stages)) as shards:
        cluster = Cluster(shards, microbatches * stages or 1)
        cluster.run(100, 5 * SECONDS)
        compare(cluster, microbatches * stages or 1, 100)


@pytest.mark.parametrize(("moment", "rank"), each_value(MOMENTS, [0, 1, 2], skip=lambda moment, rank: not has(rank, 3, moment)))
def test_a_stage_that_dies_changes_no_bit(tmp_path: Path, rank: int, moment: str) -> None:
    """Its neighbours give its successor again what they gave it."""
    cluster = trained(tmp_path, (1, 1, 1), before=kill_once(rank, moment))
    assert cluster.died == 1
    assert moment == "pushed" or not cluster.rewound, "the others had all that it gave before"
    compare(cluster, 4)


@pytest.mark.parametrize("seed", [0, 1, *map(rotating, range(2, 6)), *map(soak, range(6, 200))])
def test_kills_drawn_by_chance_change_no_bit(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    stages, microbatches = chance.choice([2, 3, 4]), chance.choice([1, 2, 4, 5])
    kills = Kills(chance, stages, microbatches, STEPS)
    cluster = trained(tmp_path, (1,) * stages, microbatches, chance.choice([1, 2, 3]), kills.before)
    kills.check(cluster, seed)
    compare(cluster, microbatches)


@pytest.mark.parametrize("replicas", [(2, 1), rotating((1, 2)), rotating((2, 1, 1)), (3, 2)])
def test_workers_of_a_stage_share_its_micro_batches(tmp_path: Path, replicas: tuple[int, ...]) -> None:
    """Sums are of each worker's micro-batches first, so the last bits may be others. Also after one of them died."""
    died: list[str] = []

    def before(worker: StageWorker, what: str, step: int, micro: int) -> None:
        if step == 2 and worker.rank == 1 and what == "push" and not died:
            died.append(what)
            raise Died

    ended = [trained(tmp_path / str(number), replicas, 5, before=act).ended for number, act in enumerate((None, before))]
    found = [{rank: worker.own for rank, worker in workers.items()} for workers in ended]
    expected = alone(5)[0].state_dict()
    for rank, own in found[0].items():
        for name, tensor in own.items():
            if not name.startswith("4."):  # batch norm counts the micro-batches of its own worker
                torch.testing.assert_close(tensor, expected[name], atol=0.05, rtol=0.05)
            assert torch.equal(tensor, found[1][rank][name]), (rank, name)


def test_two_neighbours_lost_together_let_all_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage's weights have moved on when it dies; the first had not heard its gradients.

    No weight is tied: the last stage's step would not end before the first one's.
    """
    monkeypatch.setattr(stage_workers, "model", untied)
    lose_two_neighbours(tmp_path)


def test_the_last_checkpoint_has_the_buffers_of_all_stages(tmp_path: Path) -> None:
    check_last_checkpoint(tmp_path)


def ended_by(tmp_path: Path, *acts: Callable[[StageWorker], None]) -> list[object]:
    """How workers of two stages end, each of which does one of these; those that wait are given up once one has ended so."""
    with serving(tmp_path, workers=2, shards=1, stages=Stages((1, 1))) as shards:
        workers = [StageWorker(shards, rank, 1, 2) for rank in range(2)]
        ended: list[object] = []

        def train(worker: StageWorker, act: Callable[[StageWorker], None]) -> None:
            try:
                worker.attach()
                act(worker)
            except SystemExit as end:
                ended.append(end.code)
            except Died:
                pass

        for worker, act in zip(workers, acts, strict=True):
            threading.Thread(target=train, args=(worker, act), daemon=True).start()
        assert eventually(lambda: bool(ended), SECONDS)
        for worker in workers:
            worker.die()
        return ended


def trains(worker: StageWorker, steps: int) -> None:
    for number in range(steps):
        worker.edge(number)
        worker.optimizer.zero_grad()
        worker.pipe.step(*batch(number))
        worker.optimizer.step()


def test_workers_that_are_given_other_batches_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As by a script that slices its data by rank: targets would be those of other inputs."""

    def act(worker: StageWorker) -> None:
        worker.edge(0)
        worker.pipe.step(*batch(worker.rank))

    assert ended_by(tmp_path, act, act) == [EXIT_REFUSED]
    assert "worker 0 (stage 0) was given another batch in step 0 than worker 1 (stage 1)" in capfd.readouterr().err


def test_a_script_that_ends_before_the_others_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def short(worker: StageWorker) -> None:
        trains(worker, 2)
        worker.leave()

    assert ended_by(tmp_path, short, lambda worker: trains(worker, 3)) == [EXIT_REFUSED]
    assert "from worker 0 (stage 0) will not come: its script has ended after 2 steps" in capfd.readouterr().err


def test_a_step_without_the_pipeline_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A forward of the whole model takes first values for what other stages have."""

    def plain(worker: StageWorker) -> None:
        trains(worker, 1)
        worker.edge(1)
        worker.optimizer.zero_grad()
        x, y = batch(1)
        nn.functional.mse_loss(worker.model(x), y).backward()
        worker.optimizer.step()

    assert ended_by(tmp_path, plain, lambda worker: trains(worker, 1)) == [EXIT_REFUSED]
    assert "a step of a job of stages without pipe.step" in capfd.readouterr().err
