"""Stages that correct gradients of old weights, on real shards: one process that keeps all weights gives the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psjob.api.staged import StageVersions
from psjob.modes.stages import Stages
from psjob.pipeline import predict, schedule
from psjob.pipeline.cuts import split
from psjob.pipeline.predict import corrector
from psjob.process.errors import Refused
from tests.covering import each_value
from tests.live import stage_workers
from tests.live.live_shards import eventually, serving
from tests.live.stage_workers import CUTS, SEED, WIDE, Cluster, StageWorker, batch
from tests.soaking import rotating
from tests.support import pipeline_reference as reference

STEPS = 10
LIMIT = 0.1
"""Below the norm of most steps."""
LATE: dict[str, dict[str, str]] = {
    "2bw": {"schedule": "2bw"},
    "pipedream": {"schedule": "pipedream"},
    "vertical": {"schedule": "pipedream", "stage_weights": "vertical"},
    "predict": {"schedule": "pipedream", "predict": "nesterov"},
}
CORRECT: dict[str, tuple[str, dict[str, float]]] = {
    "dc-asgd": ("dc-asgd", {}),
    "dc-asgd-c": ("dc-asgd", {"lam": 3000.0, "adaptive": 0}),
    "gap-aware": ("gap-aware", {"average": 0.9}),
    "gap-aware-max": ("gap-aware", {"max_lr": 0.2}),
}


def untied() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Dropout(0.3),
        nn.Tanh(), nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def no_tied_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_workers, "model", untied)


def way_of(name: str) -> schedule.TrainingWay:
    words = LATE[name]
    return schedule.way_of(words["schedule"], words.get("stage_weights", "stash"), words.get("predict", "none"))


def alone(
    name: str,
    how: str | None,
    stages: int,
    microbatches: int,
    replicas: tuple[int, ...] = (),
    rate: reference.Rate | None = None,
    clip: float | None = None,
) -> dict[str, torch.Tensor]:
    net, way = stage_workers.model(), way_of(name)

    def optimizer(parameters: list[nn.Parameter], _delay: int) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)

    return reference.train(
        net, nn.functional.mse_loss, [batch(number) for number in range(STEPS)], parts=split(net, CUTS[stages]), way=way,
        microbatches=microbatches, optimizer=optimizer, seed=SEED, replicas=replicas, rate=rate, clip=clip,
        correct=None if how is None else corrector(way, *CORRECT[how]),
    ).weights  # fmt: skip


def trained(folder: Path, name: str, how: str, replicas: tuple[int, ...], microbatches: int, count: int, **more: Any) -> Cluster:
    word, options = CORRECT[how]
    with serving(
        folder, workers=sum(replicas), shards=count, stages=Stages(replicas), **LATE[name], correct=word, correct_options=options, **more
    ) as shards:
        cluster = Cluster(shards, microbatches)
        cluster.run(STEPS)
        assert not cluster.rewound
    return cluster


def worst(cluster: Cluster, wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference of a weight."""
    return max(
        float((tensor - wanted[key]).abs().max())
        for worker in cluster.ended.values()
        for key, tensor in worker.own.items()
        if key in wanted
    )


def too_few(name: str, how: str, size: tuple[int, int], count: int) -> bool:
    """2bw needs a micro-batch a stage."""
    return name == "2bw" and size[1] < size[0]


LARGE = [(name, how, (4, 4), count) for name in ("2bw", "pipedream") for how in CORRECT for count in (1, 3)]


@pytest.mark.parametrize(
    ("name", "how", "size", "count"),
    [*each_value(["2bw", "pipedream"], CORRECT, [(2, 2), (4, 1)], [1, 3], skip=too_few),
     pytest.param(*LARGE[-1], id="large"), *(rotating(*row, id=f"large{number}") for number, row in enumerate(LARGE[:-1]))],
)  # fmt: skip
def test_a_corrected_gradient_is_that_of_one_process(tmp_path: Path, name: str, how: str, size: tuple[int, int], count: int) -> None:
    """`size` is of stages and micro-batches."""
    stages, microbatches = size
    cluster = trained(tmp_path, name, how, (1,) * stages, microbatches, count)
    assert worst(cluster, alone(name, how, stages, microbatches)) == 0
    assert worst(cluster, alone(name, None, stages, microbatches)) > 1e-5, "nothing was corrected"


@pytest.mark.parametrize(("name", "how"), each_value(["vertical", "predict"], ["dc-asgd", "gap-aware"]))
def test_the_open_version_is_what_the_forward_took(tmp_path: Path, name: str, how: str) -> None:
    """With predict: nesterov that is the prediction, so that what is corrected is its error."""
    cluster = trained(tmp_path, name, how, (1,) * 4, 1, 2)
    within = 1e-5 if name == "predict" else 0.0  # a prediction is made of two versions here, of the optimizer's state there
    assert worst(cluster, alone(name, how, 4, 1)) <= within
    assert worst(cluster, alone(name, None, 4, 1)) > 3e-5


def test_a_rate_by_delay_is_that_of_the_step(tmp_path: Path) -> None:
    cluster = trained(tmp_path, "pipedream", "gap-aware", (1,) * 4, 1, 2, anneal_steps=8)
    assert worst(cluster, alone("pipedream", "gap-aware", 4, 1, rate=lambda delay, step: predict.lr_by_delay(0.05, delay, step, 8))) == 0


@pytest.mark.parametrize(
    ("way", "how"), each_value([("2bw", 2, 1), ("pipedream", 2, 1, 1), ("pipedream", 2, 2, 2)], ["dc-asgd", "gap-aware"])
)
def test_each_replica_corrects_the_mean_of_its_own_micro_batches(tmp_path: Path, way: tuple[Any, ...], how: str) -> None:
    """`way` is a schedule, and how many workers each stage has."""
    name, *several = way
    replicas, microbatches = tuple(several), 2 if name == "pipedream" else 4
    cluster = trained(tmp_path, name, how, replicas, microbatches, 2)
    assert worst(cluster, alone(name, how, len(replicas), microbatches, replicas)) < 1e-5
    assert worst(cluster, alone(name, None, len(replicas), microbatches, replicas)) > 3e-5


@pytest.mark.parametrize(("stages", "how"), each_value([2, 4], ["dc-asgd-c", "gap-aware"]))
def test_what_is_clipped_is_the_corrected_gradient(tmp_path: Path, how: str, stages: int) -> None:
    cluster = trained(tmp_path, "2bw", how, (1,) * stages, 4, 2, max_grad_norm=LIMIT)
    assert worst(cluster, alone("2bw", how, stages, 4, clip=LIMIT)) < 1e-6
    assert worst(cluster, alone("2bw", how, stages, 4)) > 1e-4 and worst(cluster, alone("2bw", None, stages, 4, clip=LIMIT)) > 1e-5


@pytest.mark.parametrize("how", ["dc-asgd", "gap-aware"])
def test_a_weight_of_two_stages_is_corrected_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Only the earlier stage pushes it, twice as large, since the shards take the mean of both."""

    def tied() -> nn.Module:
        net = untied()
        assert isinstance(net, nn.Sequential)
        first, last = net[0], net[7]
        assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
        last.weight = first.weight
        return net

    monkeypatch.setattr(stage_workers, "model", tied)
    cluster = trained(tmp_path, "2bw", how, (1, 1), 2, 2)
    assert worst(cluster, alone("2bw", how, 2, 2)) == 0


@pytest.mark.parametrize("how", ["dc-asgd", rotating("gap-aware")])
def test_weights_of_now_in_place_of_the_open_ones_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The mutant corrects nothing."""
    outgoing = StageVersions.outgoing

    def newest(versions: StageVersions, grads: Any, _opened: Any, hyperparameters: Any) -> Any:
        return outgoing(versions, grads, versions.newest()[1], hyperparameters)

    monkeypatch.setattr(StageVersions, "outgoing", newest)
    cluster = trained(tmp_path, "pipedream", how, (1,) * 4, 1, 1)
    assert worst(cluster, alone("pipedream", how, 4, 1)) > 3e-5
    assert worst(cluster, alone("pipedream", None, 4, 1)) < 1e-6


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"schedule": "flush", "correct": "dc-asgd"}, "correct dc-asgd: with schedule: flush no gradient is of old weights; leave"),
        (
            {"schedule": "pipedream", "stage_weights": "recompute", "correct": "gap-aware"},
            "correct gap-aware: with weights: recompute a gradient is of the newest weights; leave correct out",
        ),
        ({"schedule": "pipedream", "stage_weights": "latest", "correct": "dc-asgd"}, "with weights: latest a stage keeps no older weights"),
        ({"schedule": "2bw", "correct_options": {"lam": 1.0}}, "correctOptions has lam, and training.pipeline.correct names no correction"),
        (
            {"schedule": "2bw", "correct": "gap-aware", "correct_options": {"lam": 1.0}},
            "training.pipeline.correctOptions has lam, which correct gap-aware does not take; it takes average and max_lr",
        ),
        ({"schedule": "2bw", "correct": "gap-aware", "correct_options": {"average": 1.0}}, "average is 0 or more and below 1, got 1"),
        ({"schedule": "2bw", "correct": "dc-asgd", "correct_options": {"adaptive": 2.0}}, "adaptive of correct dc-asgd is 0 or 1, got 2"),
    ],
)
def test_what_has_nothing_to_correct_is_refused(tmp_path: Path, words: dict[str, Any], says: str) -> None:
    with serving(tmp_path, workers=2, shards=1, stages=Stages((1, 1)), **words) as shards, pytest.raises(Refused) as refused:
        StageWorker(shards, 0, 1, 2)
    assert says in str(refused.value)


def test_a_loss_that_rises_is_refused_with_dc_asgd(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_workers, "optimizer_of", lambda net: torch.optim.SGD(net.parameters(), lr=0.1, maximize=True))
    with serving(tmp_path, workers=2, shards=1, stages=Stages((1, 1)), schedule="2bw", correct="dc-asgd") as shards:
        cluster = Cluster(shards, 2)
        with pytest.raises((AssertionError, SystemExit)):  # the other stage waits
            cluster.run(STEPS)
        assert eventually(lambda: len(cluster.problems) > 0)
        for worker in list(shards.guests):
            worker.die()
    assert "training.pipeline.correct dc-asgd: it takes g² for the curvature of a loss that is to fall" in capfd.readouterr().err
