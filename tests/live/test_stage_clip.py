"""The gradient of a step is clipped by its norm over all stages, as one process clips it; kills change no bit of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from psjob.api import stagecuts
from psjob.api.pipelining import Pipeline
from psjob.api.rulechoice import chosen
from psjob.modes.stages import Stages
from psjob.pipeline import schedule
from psjob.pipeline.cuts import split
from psjob.process.errors import Refused
from psjob.worker.exchange import Clip
from tests.covering import each_value
from tests.live import stage_workers
from tests.live.live_shards import Worker, serving
from tests.live.stage_workers import CUTS, SEED, STEPS, Cluster, StageWorker, batch, kill_once, model, optimizer_of, untied
from tests.soaking import rotating
from tests.support import pipeline_reference as reference

LIMIT = 0.2
"""Below the norm of each step."""
Weights = dict[str, torch.Tensor]


def alone(microbatches: int, limit: float | None) -> Weights:
    """The same training in one process, clipped by torch."""
    net = model()
    optimizer = optimizer_of(net)
    pipe = Pipeline(net, nn.functional.mse_loss, [], microbatches, SEED)
    for number in range(STEPS):
        optimizer.zero_grad()
        pipe.step(*batch(number))
        if limit is not None:
            assert nn.utils.clip_grad_norm_(net.parameters(), limit) > 1.1 * limit
        optimizer.step()
    return net.state_dict()


def trained(
    folder: Path, replicas: tuple[int, ...], count: int, act: Callable[[StageWorker, str, int, int], None] | None = None
) -> Cluster:
    folder.mkdir(exist_ok=True)
    with serving(folder, workers=sum(replicas), shards=count, stages=Stages(replicas), max_grad_norm=LIMIT) as shards:
        cluster = Cluster(shards, 4, act)
        cluster.run()
    assert act or not cluster.rewound
    return cluster


@pytest.mark.parametrize(("replicas", "count"), each_value([(1,), (1, 1), (1, 1, 1, 1), (2, 1)], [1, 3]))
def test_flush_is_clipped_as_one_process_clips(tmp_path: Path, replicas: tuple[int, ...], count: int) -> None:
    cluster, wanted, free = trained(tmp_path, replicas, count), alone(4, LIMIT), alone(4, None)
    for worker in cluster.ended.values():
        for name in worker.pipe.run.part.parameters:
            if not (sum(replicas) > len(replicas) and name.startswith("4.")):  # each replica has batch norm's statistics of its own
                torch.testing.assert_close(worker.own[name], wanted[name], atol=1e-6 if max(replicas) == 1 else 5e-3, rtol=0.0)
    assert (free["0.weight"] - wanted["0.weight"]).abs().max() > 0.02


@pytest.mark.parametrize(("moment", "rank"), each_value(["push", "pushed"], [0, 1, 2]))
def test_a_stage_that_dies_around_its_push_changes_no_bit(tmp_path: Path, rank: int, moment: str) -> None:
    """The others' blocks are measured and wait for its own."""
    calm, hit = trained(tmp_path / "calm", (1, 1, 1), 2), trained(tmp_path / "hit", (1, 1, 1), 2, kill_once(rank, moment))
    assert hit.died == 1
    for number, worker in hit.ended.items():
        for name, tensor in worker.own.items():
            assert torch.equal(tensor, calm.ended[number].own[name]), (number, name)


@pytest.mark.parametrize("stages", [rotating(2), 4])
def test_2bw_is_clipped_as_old_weights_in_one_process_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int) -> None:
    monkeypatch.setattr(stage_workers, "model", untied)
    steps = 12
    with serving(tmp_path, workers=stages, shards=2, stages=Stages((1,) * stages), max_grad_norm=LIMIT, schedule="2bw") as shards:
        cluster = Cluster(shards, 4)
        cluster.run(steps)
        assert not cluster.rewound
    net = untied()

    def optimizer(parameters: list[nn.Parameter], _delay: int) -> torch.optim.Optimizer:
        return optimizer_of(nn.ParameterList(parameters))

    plain = reference.train(
        net, nn.functional.mse_loss, [batch(number) for number in range(steps)], parts=split(net, CUTS[stages]), way=schedule.way_of("2bw"),
        microbatches=4, optimizer=optimizer, seed=SEED, clip=LIMIT,
    )  # fmt: skip
    for rank, worker in cluster.ended.items():
        assert dict(worker.pipe.delays) == plain.delays[rank], "a step waits for no norm that is not there yet"
        for name in worker.pipe.run.part.parameters:
            torch.testing.assert_close(worker.own[name], plain.weights[name], atol=1e-6, rtol=0.0)


def test_a_last_stage_that_would_wait_for_the_first_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = untied()
    monkeypatch.setattr(stagecuts, "_known", [(net, stagecuts.cuts_of(split(net, CUTS[2]), 0))])
    with serving(tmp_path, workers=2, shards=1, stages=Stages((1, 1)), max_grad_norm=LIMIT, schedule="pipedream") as shards:
        with pytest.raises(Refused, match=r"maxGradNorm under training.pipeline.schedule pipedream: .*take schedule: flush or 2bw"):
            stagecuts.known(net, shards.config)
        assert stagecuts.known(net, replace(shards.config, schedule="2bw")).piped


@pytest.mark.parametrize("more", [{}, {"schedule": "2bw"}])
def test_an_optimizer_without_a_rule_on_the_shards_is_refused(tmp_path: Path, more: dict[str, str]) -> None:
    """A shard would answer a stage's push with the gradient."""
    said = "RMSprop has no rule on the shards, and a job of stages needs one; use SGD, Adam, AdamW, NAdam"
    with serving(tmp_path, workers=2, shards=1, stages=Stages((1, 1)), **more) as shards, pytest.raises(Refused, match=said):
        chosen(torch.optim.RMSprop(untied().parameters()), shards.config)


def test_a_shard_has_room_for_the_pushes_of_each_stage_once(tmp_path: Path) -> None:
    """Four workers of four stages push as much together as one worker of the whole model, and a weight that two of them have twice."""
    said: list[str] = []
    with serving(tmp_path, workers=4, shards=1, stages=Stages((1,) * 4), max_grad_norm=LIMIT) as shards:
        store = shards.servers[0].store
        store.on_problem, store.budget = said.append, 2 * sum(p.numel() * 4 for p in model().parameters())
        cluster = Cluster(shards, 4)
        cluster.run(2)
    assert not said


def test_a_step_that_is_passed_over_leaves_no_clipping_behind(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1) as shards:
        net = untied()
        worker = Worker(shards, 0, net, optimizer_of(net), 1, overlap=False)
        worker.job.places.skipping = True
        worker.job.clipping.ask(worker.job.pairs[:1], Clip(norm=1.0))
        worker.job.step(worker.job.pairs[0], None)
        assert worker.job.clipping.take(worker.job.pairs[0]) == Clip()
