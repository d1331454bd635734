"""What stages train, compared with the same training in one process, to the bit."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from psjob.api.pipelining import Pipeline
from psjob.contract import FINAL_WEIGHTS
from psjob.modes.stages import Stages
from psjob.pipeline import schedule
from psjob.pipeline.cuts import split_model
from tests.live import stage_workers
from tests.live.live_shards import Died, serving
from tests.live.stage_workers import CUTS, SEED, STEPS, Cluster, StageWorker, batch
from tests.support import pipeline_reference as reference

WAYS: dict[str, dict[str, str]] = {
    "flush": {"schedule": "flush"},
    "2bw": {"schedule": "2bw"},
    "pipedream": {"schedule": "pipedream"},
    "vertical": {"schedule": "pipedream", "stage_weights": "vertical"},
    "latest": {"schedule": "pipedream", "stage_weights": "latest"},
    "recompute": {"schedule": "pipedream", "stage_weights": "recompute"},
    "predict": {"schedule": "pipedream", "predict": "nesterov"},
    "ftpipe": {"schedule": "pipedream", "stage_weights": "recompute", "predict": "nesterov"},
}
"""By name, what a job's config says of them."""


def way_of(name: str) -> schedule.TrainingWay:
    words = WAYS[name]
    return schedule.way_of(words["schedule"], words.get("stage_weights", "stash"), words.get("predict", "none"))


def old_weights(name: str, stages: int, microbatches: int, *, steps: int, **more: Any) -> reference.Outcome:
    """The same training in one process that keeps all weights. `more` is of `reference.train`."""
    net = stage_workers.model()
    optimizer = more.pop("optimizer", lambda parameters, _delay: stage_workers.optimizer_of(nn.ParameterList(parameters)))
    return reference.train(
        net, nn.functional.mse_loss, [batch(number) for number in range(steps)], parts=split_model(net, CUTS[stages]), way=way_of(name),
        microbatches=microbatches, optimizer=optimizer, seed=SEED, **more,
    )  # fmt: skip


def too_few(name: str, size: tuple[int, int]) -> bool:
    """Are fewer micro-batches than 2bw needs, one for each stage? `size` is of stages and micro-batches."""
    return name == "2bw" and size[1] < size[0]


def alone(microbatches: int, steps: int = STEPS, limit: float | None = None) -> tuple[nn.Module, list[float]]:
    """The same training in one process, whose gradients torch clips."""
    net, losses = stage_workers.model(), []
    pipe = Pipeline(net, nn.functional.mse_loss, [], microbatches, SEED)
    optimizer = stage_workers.optimizer_of(net)
    for number in range(steps):
        optimizer.zero_grad()
        losses.append(float(pipe.step(*batch(number))))
        if limit is not None:
            assert nn.utils.clip_grad_norm_(net.parameters(), limit) > 1.1 * limit
        optimizer.step()
    return net, losses


def compare(cluster: Cluster, microbatches: int, steps: int = STEPS) -> None:
    """Each stage has the numbers of one process, to the bit."""
    net, losses = alone(microbatches, steps)
    expected = net.state_dict()
    for rank, worker in cluster.ended.items():
        for name, tensor in worker.own.items():
            assert torch.equal(tensor, expected[name]), (rank, name, (tensor - expected[name]).abs().max())
        for number, loss in worker.losses.items():
            assert loss == losses[number], (rank, number)


def lose_two_neighbours(folder: Path) -> None:
    """All go back, and no bit is another."""
    died: list[int] = []

    def before(worker: StageWorker, what: str, step: int, micro: int) -> None:
        if (worker.rank, what, step, micro) == (0, "take GRADIENT", 2, 3) and 0 not in died:
            while 1 not in died:
                threading.Event().wait(0.01)
            died.append(0)
            raise Died
        if (worker.rank, what, step) == (1, "take ACTIVATION", 3) and 1 not in died:
            died.append(1)
            raise Died

    cluster = stage_workers.trained(folder, (1, 1), before=before)
    assert cluster.died == 2 and cluster.rewound >= 2
    compare(cluster, 4)


def check_last_checkpoint(folder: Path) -> None:
    """It has the buffers of all stages."""
    with serving(folder, workers=4, shards=2, stages=Stages((1, 1, 1, 1))) as shards:
        Cluster(shards, 4).run()
        assert shards.wait_ended() == [0, 0]
        weights = safetensors.torch.load_file(shards.folder / FINAL_WEIGHTS)
    expected = alone(4)[0].state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
