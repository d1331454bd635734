"""What stages train, compared with the same training in one process, to the bit."""

from __future__ import annotations

import threading
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from psjob.api.pipelining import Pipeline
from psjob.contract import FINAL_WEIGHTS
from psjob.modes.stages import Stages
from tests.live.live_shards import Died, serving
from tests.live.stage_workers import SEED, STEPS, Cluster, StageWorker, batch, model, optimizer_of


def alone(microbatches: int, steps: int = STEPS) -> tuple[nn.Module, list[float]]:
    """The same training in one process."""
    net = model()
    optimizer, losses = optimizer_of(net), []
    pipe = Pipeline(net, nn.functional.mse_loss, [], microbatches, SEED)
    for number in range(steps):
        optimizer.zero_grad()
        losses.append(float(pipe.step(*batch(number))))
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
    """As the test above, of the model as it is."""
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

    with serving(folder, workers=2, shards=2, stages=Stages((1, 1))) as shards:
        cluster = Cluster(shards, 4, before)
        cluster.run()
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
