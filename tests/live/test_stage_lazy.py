"""Lazy models in stages on real shards: workers have memory for only their stage, and first values are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psjob.api.staged import StagedPipeline
from psjob.api.training_job import TrainingJob
from psjob.layout.blocks import Block
from psjob.layout.packing import Pack
from psjob.pipeline.exported import ExportedPart
from psjob.pipeline.lazy import on_meta
from tests.live import stage_workers as workers
from tests.live.stage_workers import COMPUTES, Cluster, batch, has, kill_once, trained
from tests.support.covering import each_value
from tests.support.soaking import rotating


def model() -> nn.Module:
    """As the other tests' model, without memory."""
    with on_meta():
        return made()


made = workers.model


@pytest.fixture(autouse=True)
def lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers build the model without memory. One draws at a time: threads share torch's generators."""
    monkeypatch.setattr(workers, "model", model)
    whole = TrainingJob.__init__

    def attaching(job: TrainingJob, *given: Any) -> None:
        with COMPUTES:
            whole(job, *given)
        first = job.session.first

        def drawing(block: Block, pack: Pack) -> torch.Tensor:
            with COMPUTES:
                return first(block, pack)

        job.session.first = drawing

    monkeypatch.setattr(TrainingJob, "__init__", attaching)


def only_its_stage(cluster: Cluster) -> None:
    for worker in cluster.ended.values():
        part = worker.pipe.run.part
        held = {name for name, t in [*worker.model.named_parameters(), *worker.model.named_buffers()] if not t.is_meta}
        assert held == {*part.parameters, *part.buffers}
        assert all(p.grad is None for name, p in worker.model.named_parameters() if name not in part.parameters)


@pytest.mark.parametrize(("stages", "count", "transport"), each_value([1, 2, 4], [1, 3], ["auto", "tcp"]))
def test_stages_train_what_one_lazy_process_trains(tmp_path: Path, stages: int, count: int, transport: str) -> None:
    cluster = trained(tmp_path, (1,) * stages, count=count, transport=transport)
    workers.compare(cluster, 4)
    only_its_stage(cluster)


@pytest.mark.parametrize(
    ("moment", "rank"),
    each_value(["take ACTIVATION", "take GRADIENT", "push", "pushed"], [0, 1, 2], skip=lambda moment, rank: not has(rank, 3, moment)),
)
def test_a_lazy_stage_that_dies_changes_no_bit(tmp_path: Path, rank: int, moment: str) -> None:
    """At each moment of its second step; its successor makes no values, but pulls them."""
    cluster = trained(tmp_path, (1, 1, 1), before=kill_once(rank, moment))
    assert cluster.died == 1
    workers.compare(cluster, 4)
    only_its_stage(cluster)


def test_replicas_of_a_lazy_stage_hold_the_same(tmp_path: Path) -> None:
    """Of two workers of a stage one gives no values either; what they train is what they train of a model with those values."""

    def run(folder: Path) -> dict[int, dict[str, torch.Tensor]]:
        cluster = trained(folder, (2, 1))
        only_its_stage(cluster)
        return {rank: worker.own for rank, worker in cluster.ended.items()}

    one, other = run(tmp_path / "one"), run(tmp_path / "other")
    for rank, own in one.items():
        assert all(torch.equal(tensor, other[rank][name]) for name, tensor in own.items()), rank
    assert all(torch.equal(one[0][name], one[1][name]) for name in ("2.weight", "2.bias"))


class Skips(nn.Module):
    """No nn.Sequential, so that it is exported to be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = made()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x
        for layer in self.layers:  # type: ignore[attr-defined]
            x = layer(x)
        return x + first


@pytest.mark.parametrize("microbatches", [rotating(4, id="even"), pytest.param(3, id="uneven")])
def test_a_lazy_model_that_is_exported_is_trained_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, microbatches: int) -> None:
    """Micro-batches of other shapes than the example's too, of which each stage makes graphs of its own."""

    def skips() -> nn.Module:
        with on_meta():
            return Skips()

    staged_pipeline: Any = StagedPipeline

    def staged(*given: Any) -> Any:
        with COMPUTES:  # torch.export is one thread's
            return staged_pipeline(*given[:-1], batch(0)[0][:5])

    monkeypatch.setattr(workers, "model", skips)
    monkeypatch.setattr(workers, "StagedPipeline", staged)
    expect = ExportedPart.expect

    def alone_expecting(part: ExportedPart, given: Any) -> None:
        with COMPUTES:
            expect(part, given)

    monkeypatch.setattr(ExportedPart, "expect", alone_expecting)
    monkeypatch.setattr(workers, "CUTS", {3: ["layers.2", "layers.5"]})
    cluster = trained(tmp_path, (1, 1, 1), microbatches)
    workers.compare(cluster, microbatches)
    only_its_stage(cluster)


def test_all_lazy_stages_go_back_to_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no record yet: each has its own buffers' first values, and no rank gives the others theirs."""
    monkeypatch.setattr(f"{__name__}.made", workers.untied)
    workers.lose_two_neighbours(tmp_path)


def test_the_last_checkpoint_has_the_buffers_of_all_lazy_stages(tmp_path: Path) -> None:
    workers.check_last_checkpoint(tmp_path)
