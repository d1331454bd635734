"""NAdam in a job of stages, with one momentum and with one by stage, on real shards: torch in one process gives the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from psjob.modes.stages import Stages
from psjob.pipeline import predict, schedule
from psjob.pipeline.cuts import split
from tests.covering import each_value
from tests.live import stage_workers
from tests.live.live_shards import eventually, serving
from tests.live.stage_workers import CUTS, SEED, WIDE, Cluster, batch
from tests.support import pipeline_reference as reference

STEPS, BETA = 10, 0.9


def untied() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Dropout(0.3),
        nn.Tanh(), nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE),
    )  # fmt: skip


def nadam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam(net.parameters(), lr=0.01, betas=(BETA, 0.99), weight_decay=0.01, decoupled_weight_decay=True)


@pytest.fixture(autouse=True)
def trained_by_nadam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_workers, "model", untied)
    monkeypatch.setattr(stage_workers, "optimizer_of", nadam)


def alone(way: schedule.TrainingWay, stages: int, microbatches: int, highest: float | None) -> reference.Outcome:
    net = untied()

    def optimizer(parameters: list[nn.Parameter], delay: int) -> torch.optim.Optimizer:
        beta = BETA if highest is None else predict.momentum_by_stage(BETA, delay, stages, highest)
        return torch.optim.NAdam(parameters, lr=0.01, betas=(beta, 0.99), weight_decay=0.01, decoupled_weight_decay=True)

    return reference.train(
        net, nn.functional.mse_loss, [batch(number) for number in range(STEPS)], parts=split(net, CUTS[stages]), way=way,
        microbatches=microbatches, optimizer=optimizer, seed=SEED,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("way", "stages", "count"), each_value([("flush", None), ("2bw", None), ("pipedream", None), ("pipedream", 0.99)], [4, 2], [1, 3])
)
def test_nadam_of_stages_is_torchs(tmp_path: Path, way: tuple[str, float | None], stages: int, count: int) -> None:
    """Stage k of K, late by d updates, has beta1 + d (highest - beta1) / K (arXiv 2505.01099)."""
    words, highest = {"schedule": way[0]}, way[1]
    microbatches = 1 if words["schedule"] == "pipedream" else stages
    with serving(tmp_path, workers=stages, shards=count, stages=Stages((1,) * stages), **words, highest_momentum=highest) as shards:
        cluster = Cluster(shards, microbatches)
        cluster.run(STEPS)
        assert not cluster.rewound
    plain = alone(schedule.way_of(words["schedule"]), stages, microbatches, highest)
    for worker in cluster.ended.values():
        for key, tensor in worker.own.items():
            assert torch.equal(tensor, plain.weights[key]), (key, (tensor - plain.weights[key]).abs().max())
    if highest is not None:
        one_for_all = alone(schedule.PipeDream(), stages, microbatches, None)
        assert not torch.equal(one_for_all.weights["0.weight"], plain.weights["0.weight"])
        assert plain.delays[0].most_common(1)[0][0] == stages - 1


@pytest.mark.parametrize(
    ("made", "highest", "says"),
    [
        ("SGD", 0.99, "highestMomentum: the momentum of sgd does not go by stage; take torch.optim.NAdam; or leave highestMomentum out"),
        ("NAdam", 0.8, "highestMomentum: beta is 0.9, highest 0.8, stages 2; must be 0 <= beta <= highest < 1"),
    ],
)
def test_what_has_no_momentum_by_stage_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, made: str, highest: float, says: str
) -> None:
    monkeypatch.setattr(stage_workers, "optimizer_of", lambda net: getattr(torch.optim, made)(net.parameters()))
    words = {"schedule": "pipedream", "highest_momentum": highest}
    with serving(tmp_path, workers=2, shards=1, stages=Stages((1, 1)), **words) as shards:
        cluster = Cluster(shards, 1)
        with pytest.raises((AssertionError, SystemExit)):  # the other stage waits
            cluster.run(STEPS)
        assert eventually(lambda: len(cluster.problems) > 0)
        for worker in list(shards.guests):
            worker.die()
    assert says in capfd.readouterr().err
