"""Cuts that psjob chooses, on real shards: chosen once, kept by shard 0, the same for every worker and each of its starts."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psjob.api import autocuts
from psjob.checkpoint.disk import CheckpointProblem
from psjob.modes.stages import ASKS, ChosenCuts, Stages
from psjob.pipeline.lazy import on_meta
from psjob.process.errors import Refused
from psjob.shard.rendezvous import FILE, PartitionStore
from psjob.wire.frame import Header, Kind, WireError
from psjob.worker import rendezvous
from tests.live import stage_oracle as eager
from tests.live import stage_workers as workers
from tests.live.live_shards import Died, serving
from tests.live.stage_workers import COMPUTES, Cluster, kill_once, trained
from tests.support.soaking import rotating

THREE = Stages((1, 1, 1))


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[ChosenCuts]:
    """All that were chosen. Jobs of three stages leave it to psjob."""
    made: list[ChosenCuts] = []
    choose = autocuts.choose_cuts

    def choosing(*given: Any) -> ChosenCuts:
        with COMPUTES:
            made.append(choose(*given))
        return made[-1]

    monkeypatch.setattr(autocuts, "choose_cuts", choosing)
    monkeypatch.setitem(workers.CUTS, 3, "auto")
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
    eager.compare(cluster, 4)
    monkeypatch.setitem(workers.CUTS, 3, [*choices[0].cuts])
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
    eager.compare(cluster, 4)


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
        net = workers.model()
    with serving(tmp_path, workers=3, shards=1, stages=THREE) as shards:
        found = autocuts.decided_cuts(shards.place(0), net, 4, ((workers.batch(0)[0][:5],), {}))
        assert found == choices[0].cuts and len(found) == 2
        assert autocuts.decided_cuts(shards.place(2), net, 4, ((workers.batch(0)[0][:5],), {})) == found


def test_without_an_example_it_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, workers=3, shards=1, stages=THREE) as shards, pytest.raises(Refused, match="give example=x"):
        autocuts.decided_cuts(shards.place(0), nn.Sequential(nn.Linear(1, 1)), 4, None)
