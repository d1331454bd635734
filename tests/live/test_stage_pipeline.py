"""A pipeline of stages on real shards: workers give each other activations and gradients over real streams, and die.

- Cuts that psjob chooses, on real shards: chosen once, kept by shard 0, the same for every worker and each of its starts.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psjob.api import auto_cuts
from psjob.checkpoint.disk import CheckpointProblem
from psjob.contract import EXIT_REFUSED
from psjob.modes.stages import ASKS, ChosenCuts, Stages
from psjob.pipeline.lazy import on_meta
from psjob.process.errors import Refused
from psjob.shard.rendezvous import FILE, PartitionStore
from psjob.wire.frame import Header, Kind, WireError
from psjob.worker import rendezvous
from tests.live import stage_workers
from tests.live.live_shards import SECONDS, Died, eventually, serving
from tests.live.stage_workers import (
    COMPUTES,
    MOMENTS,
    STEPS,
    Cluster,
    Kills,
    StageWorker,
    alone,
    batch,
    check_last_checkpoint,
    compare,
    has,
    kill_once,
    lose_two_neighbours,
    trained,
    untied,
)
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


THREE = Stages((1, 1, 1))


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[ChosenCuts]:
    """All that were chosen. Jobs of three stages leave it to psjob."""
    made: list[ChosenCuts] = []
    choose = auto_cuts.choose_cuts

    def choosing(*given: Any) -> ChosenCuts:
        with COMPUTES:
            made.append(choose(*given))
        return made[-1]

    monkeypatch.setattr(auto_cuts, "choose_cuts", choosing)
    monkeypatch.setitem(stage_workers.CUTS, 3, "auto")
    return made


def same_weights(one: Cluster, other: Cluster) -> None:
    for rank, worker in one.ended.items():
        assert worker.own.keys() == other.ended[rank].own.keys()
        assert all(torch.equal(tensor, other.ended[rank].own[name]) for name, tensor in worker.own.items())


@pytest.mark.parametrize("rank", [None, rotating(0), 1, rotating(2)])
def test_a_job_cuts_where_psjob_chose_and_a_kill_changes_no_bit(
    tmp_path: Path, choices: list[ChosenCuts], rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = trained(tmp_path / "auto", THREE.replicas, before=None if rank is None else kill_once(rank, "push"))
    assert len(choices) == 1 and cluster.died == (rank is not None)
    stage_workers.compare(cluster, 4)
    monkeypatch.setitem(stage_workers.CUTS, 3, [*choices[0].cuts])
    same_weights(cluster, trained(tmp_path / "written out", THREE.replicas))


def test_worker_0_may_die_once_it_has_told_its_choice(tmp_path: Path, choices: list[ChosenCuts], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it joins. Its next start would choose others, were it asked."""
    asked, died = rendezvous._asked_cuts, threading.Event()

    def dying(place: Any, offer: ChosenCuts | None) -> ChosenCuts | None:
        found = asked(place, offer)
        if offer is not None and not died.is_set():
            died.set()
            raise Died
        return found

    monkeypatch.setattr(rendezvous, "_asked_cuts", dying)
    with serving(tmp_path, workers=3, shards=2, stages=THREE) as shards:
        place = shards.place(0)
        with pytest.raises(Died):
            rendezvous.agreed(place, lambda: ChosenCuts(("2", "5"), 1.0))
        cluster = Cluster(shards, 4)
        cluster.run()
        assert not choices
        assert set(cluster.ended[2].pipe.run.part.parameters) == {"5.weight", "5.bias", "0.weight", "7.bias"}
    stage_workers.compare(cluster, 4)


def test_a_new_shard_0_tells_the_same(tmp_path: Path) -> None:
    first, other = ChosenCuts(("2", "5"), 1.5), ChosenCuts(("2", "7"), 1.0)
    with serving(tmp_path, workers=3, shards=1, stages=THREE) as shards:
        assert rendezvous.agreed(shards.place(0), lambda: first) == first
        assert rendezvous._asked_cuts(shards.place(0, 2), other) == first
        place = replace(shards.servers[0].place, number=2)
        assert PartitionStore(place, shards.folder).kept() == first
        assert PartitionStore(replace(place, run="another"), shards.folder).kept() is None


def test_who_waits_says_for_whom(tmp_path: Path) -> None:
    with serving(tmp_path, workers=3, shards=1, stages=THREE) as shards:
        place = shards.place(1)
        place = replace(place, config=replace(place.config, connect_seconds=0.3))
        with pytest.raises(rendezvous.NoCuts, match=r"worker 0, which chooses the cuts"):
            rendezvous.agreed(place, lambda: pytest.fail("worker 1 does not choose"))
    with pytest.raises(rendezvous.NoCuts, match=r"shard 0, which keeps the cuts"):
        rendezvous.agreed(place, lambda: pytest.fail("nobody was asked"))


@pytest.mark.parametrize(
    ("rank", "offer", "says"),
    [
        (1, ChosenCuts(("2", "5"), 1.0), "which worker 0 does"),
        (0, ChosenCuts(("2",), 1.0), "1 cuts were chosen, and a job of 3 stages has 2"),
        (0, ChosenCuts(("2", "2"), 1.0), "different names"),
        (0, ChosenCuts(("2", "a\nb"), 1.0), "names of modules"),
    ],
)
def test_shard_0_keeps_nothing_else(tmp_path: Path, rank: int, offer: ChosenCuts, says: str) -> None:
    with serving(tmp_path, workers=3, shards=1, stages=THREE) as shards:
        with pytest.raises(rendezvous.WireError, match=says):
            rendezvous._asked_cuts(shards.place(rank), offer)
        assert not (shards.folder / FILE).exists()


@pytest.mark.parametrize("text", ["[", "[" * 100_000, "[]", '{"run": 5}'], ids=["short", "deep", "a list", "no cuts"])
def test_a_file_that_is_damaged_is_told(tmp_path: Path, text: str) -> None:
    with serving(tmp_path, workers=3, shards=1, stages=THREE) as shards:
        (shards.folder / FILE).write_text(text)
        if text == '{"run": 5}':  # of another run
            assert rendezvous._asked_cuts(shards.place(0), None) is None
            return
        with pytest.raises(rendezvous.WireError, match="does not hold the cuts"):
            rendezvous._asked_cuts(shards.place(0), None)


def test_a_file_that_cannot_be_looked_for_is_not_taken_for_missing(tmp_path: Path) -> None:
    """Other cuts would take the place of those that it holds."""
    with serving(tmp_path, workers=3, shards=1, stages=THREE) as shards:
        (tmp_path / "file").write_text("")
        kept = PartitionStore(shards.servers[0].place, tmp_path / "file")
        with pytest.raises(CheckpointProblem, match=r"look for stage-cuts\.json"):
            kept.kept()


def test_a_shard_chooses_no_cuts(tmp_path: Path) -> None:
    """One that has its own key alone; its hello names worker 0."""
    hello = {"role": "shard", "index": 1, "attempt": 1, "asks": ASKS, "cuts": ["2", "5"], "seconds": 1.0}
    with serving(tmp_path, workers=3, shards=2, stages=THREE) as shards:
        kept = shards.servers[0].cuts
        assert kept is not None
        unread: Any = None
        with pytest.raises(WireError, match="a shard asks for cuts, which workers do"):
            kept.meet(unread, Header(Kind.HELLO, worker=0), hello)


def test_a_lazy_model_is_chosen_for_by_flops(tmp_path: Path, choices: list[ChosenCuts]) -> None:
    with on_meta():
        net = stage_workers.model()
    with serving(tmp_path, workers=3, shards=1, stages=THREE) as shards:
        found = auto_cuts.decided_cuts(shards.place(0), net, 4, ((stage_workers.batch(0)[0][:5],), {}))
        assert found == choices[0].cuts and len(found) == 2
        assert auto_cuts.decided_cuts(shards.place(2), net, 4, ((stage_workers.batch(0)[0][:5],), {})) == found


def test_without_an_example_it_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, workers=3, shards=1, stages=THREE) as shards, pytest.raises(Refused, match="give example=x"):
        auto_cuts.decided_cuts(shards.place(0), nn.Sequential(nn.Linear(1, 1)), 4, None)
