"""Workers of stages, in threads, that may die at each moment: what tests of pipelines on real shards have in common.

- What stages train, compared with the same training in one process, to the bit.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from psjob.api import auto_cuts
from psjob.api.attachable import Pair
from psjob.api.pipelining import Pipeline
from psjob.api.staged import StagedPipeline
from psjob.api.training_job import TrainingJob
from psjob.contract import FINAL_WEIGHTS
from psjob.modes.stages import Stages
from psjob.pipeline import schedule
from psjob.pipeline.cuts import split_model
from psjob.pipeline.stage import ChangedInPlace
from psjob.protocol.pipeline import Key
from tests.live.live_shards import SECONDS, Died, Rewound, Shards, Worker, eventually, serving
from tests.support import pipeline_reference as reference

STEPS = 5
WIDE = 16
"""So that all blocks are of whole vectors: the fused kernel rounds the elements behind the last one in another way."""
CUTS: dict[int, list[str | int]] = {1: [], 2: [4], 3: [2, 5], 4: [2, 4, 7]}
SEED = 11
COMPUTES = threading.RLock()
"""Threads of this process share torch's generators, from which first values and Dropout draw; processes do not."""


def untied(fourth: Callable[[], nn.Module] = lambda: nn.BatchNorm1d(WIDE)) -> nn.Sequential:
    """With dropout, and with the statistics of its fourth layer."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Dropout(0.3),
        fourth(), nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE),
    )  # fmt: skip


def without_statistics() -> nn.Sequential:
    return untied(nn.Tanh)


def tied(net: nn.Sequential) -> nn.Module:
    """The first and the last stage have one weight."""
    first, last = net[0], net[7]
    assert isinstance(last, nn.Linear) and isinstance(first, nn.Linear)
    last.weight = first.weight
    return net


def model() -> nn.Module:
    return tied(untied())


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, fused=True)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(number)
    return torch.randn(20, WIDE, generator=draw), torch.randn(20, WIDE, generator=draw)


LOSS: Callable[[Any, Any], torch.Tensor] = nn.functional.mse_loss


class StageWorker(Worker):
    """A worker of a stage, in a thread of its own."""

    def __init__(self, shards: Shards, rank: int, start: int, microbatches: int, rewinds: int = 0) -> None:
        with COMPUTES:
            net = model()
        optimizer = optimizer_of(net)
        super().__init__(shards, rank, net, optimizer, start, overlap=False)
        place = shards.place(rank, start, rewinds)
        stages = shards.config.stages
        cuts = CUTS[len(stages.replicas)]
        auto = auto_cuts.is_auto(cuts)
        with contextlib.nullcontext() if auto else COMPUTES:  # torch has one switch for how modules are converted
            self.pipe = StagedPipeline(place, net, LOSS, cuts, microbatches, SEED, batch(0)[0][:5] if auto else None)
        self.job = TrainingJob(place, (Pair("", net, optimizer, cuts=self.pipe.cuts),), {}, False)
        self.session = self.job.session
        self.pipe.attached = lambda: self.job  # type: ignore[method-assign]
        self.losses: dict[int, float] = {}
        self.before: Callable[[StageWorker, str, int, int], None] = lambda worker, what, step, micro: None
        """Called before what this worker does with its neighbours and its shards; where it raises Died the worker is gone."""
        links = self.session.stage_links
        assert links is not None
        give, take, push = links.give, links.take, self.session.push
        forward, backward = self.pipe.run.forward, self.pipe.run.backward

        def forwarding(*given: Any) -> Any:
            with COMPUTES:
                return forward(*given)

        def going_back(*given: Any) -> Any:
            with COMPUTES:
                return backward(*given)

        def giving(key: Key, value: Any) -> None:
            self.before(self, f"give {key.kind.name}", key.step, key.micro)
            give(key, value)

        def taking(key: Key) -> Any:
            self.before(self, f"take {key.kind.name}", key.step, key.micro)
            return take(key)

        def pushing(*given: Any) -> Any:
            self.before(self, "push", self.session.clock, 0)
            done = push(*given)
            self.before(self, "pushed", self.session.clock - 1, 0)
            return done

        mended: Any = links
        mended.give, mended.take = giving, taking
        session: Any = self.session
        session.push = pushing
        run: Any = self.pipe.run
        run.forward, run.backward = forwarding, going_back

    def edge(self, batch: int | None = None) -> None:
        """As a pass over `ps.shard` has it."""
        places = self.job.places
        if places.begun == 0:
            places.begin()
        if places.ask(0, {"round": batch}):
            self.job.put_back()
        self.job.step_boundary()

    @property
    def own(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of its stage."""
        state = self.model.state_dict()
        return {name: state[name] for name in (*self.pipe.run.part.parameters, *self.pipe.run.part.buffers)}


class Cluster:
    """Starts each worker again that dies, or is to begin again."""

    def __init__(self, shards: Shards, microbatches: int, before: Callable[[StageWorker, str, int, int], None] | None = None) -> None:
        self.shards, self.microbatches, self.before = shards, microbatches, before
        self.ended: dict[int, StageWorker] = {}
        self.problems: list[BaseException] = []
        self.rewound = self.died = 0
        self.over = False
        """Nobody who dies is started again."""

    def run(self, steps: int = STEPS, seconds: float = 1.5 * SECONDS) -> None:
        """Train to the end, or raise the first problem of a worker, for whom the others may wait in vain."""
        threads = [threading.Thread(target=self._life, args=(rank, steps), daemon=True) for rank in range(self.shards.config.workers)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + seconds
        try:
            while not self.problems and (living := [thread for thread in threads if thread.is_alive()]):
                living[0].join(0.02)
                assert time.monotonic() < deadline, "a worker hangs"
        finally:
            self.over = True
        if self.problems:
            raise self.problems[0]

    def _life(self, rank: int, steps: int) -> None:
        torch.set_num_threads(1)
        start, rewinds = 1, 0
        try:
            while not self.over:
                worker = StageWorker(self.shards, rank, start, self.microbatches, rewinds)
                if self.before is not None:
                    worker.before = self.before
                try:
                    worker.attach()
                    for number in range(worker.session.clock - worker.job.replay, steps):
                        worker.edge(number)
                        worker.optimizer.zero_grad()
                        again, loss = worker.job.replay > 0, float(worker.pipe.step(*batch(number)))
                        if not again:
                            worker.losses[number] = loss
                        worker.optimizer.step()
                    self.ended[rank] = worker
                    assert worker.leave() == 0
                    return
                except Died:
                    self.died += 1
                    worker.die()
                    start, rewinds = start + 1, 0
                except Rewound:
                    self.rewound += 1
                    worker.die()
                    rewinds += 1
        except BaseException as problem:
            self.problems.append(problem)


def trained(
    folder: Path,
    replicas: tuple[int, ...],
    microbatches: int = 4,
    count: int = 2,
    before: Callable[[StageWorker, str, int, int], None] | None = None,
    steps: int = STEPS,
    **more: Any,
) -> Cluster:
    """A cluster on `count` shards that has trained; nobody went back if `before` kills nobody. `more` is of `Config`."""
    folder.mkdir(exist_ok=True)
    with serving(folder, workers=sum(replicas), shards=count, stages=Stages(replicas), **more) as shards:
        cluster = Cluster(shards, microbatches, before)
        cluster.run(steps)
    assert before or not cluster.rewound
    return cluster


def problems_of(folder: Path, microbatches: int, **more: Any) -> list[BaseException]:
    """What a worker of two stages ends with, whose neighbour waits for it."""
    with serving(folder, workers=2, shards=1, stages=Stages((1, 1)), **more) as shards:
        cluster = Cluster(shards, microbatches)
        with pytest.raises((AssertionError, SystemExit, ChangedInPlace)):
            cluster.run(12)
        assert eventually(lambda: bool(cluster.problems))
        for worker in list(shards.guests):
            worker.die()
    return cluster.problems


MOMENTS = ("take ACTIVATION", "give ACTIVATION", "take GRADIENT", "give GRADIENT", "push", "pushed")


def has(rank: int, stages: int, moment: str) -> bool:
    """Does a worker of this stage come to that?"""
    first, last = rank == 0, rank == stages - 1
    return not (first and moment in ("take ACTIVATION", "give GRADIENT")) and not (last and moment in ("give ACTIVATION", "take GRADIENT"))


def kill_once(rank: int, moment: str) -> Callable[[StageWorker, str, int, int], None]:
    """For `Cluster`: that worker dies at this moment of its second step."""
    died: list[int] = []

    def before(worker: StageWorker, what: str, step: int, micro: int) -> None:
        if (worker.rank, what, step) == (rank, moment, 2) and micro == (1 if " " in moment else 0) and not died:
            died.append(step)
            raise Died

    return before


class Kills:
    """One or two, of a worker, at a moment, step and micro-batch that are drawn."""

    def __init__(self, chance: random.Random, stages: int, microbatches: int, steps: int) -> None:
        hits = []
        for _ in range(chance.choice([1, 1, 2])):
            rank = chance.randrange(stages)
            moment = chance.choice([moment for moment in MOMENTS if has(rank, stages, moment)])
            hits.append((rank, moment, chance.randrange(1, steps), chance.randrange(microbatches) if " " in moment else 0))
        self.hits = list(dict.fromkeys(hits))
        self.left = list(self.hits)

    def before(self, worker: StageWorker, what: str, step: int, micro: int) -> None:
        """See `Cluster`."""
        if (hit := (worker.rank, what, step, micro)) in self.left:
            self.left.remove(hit)
            raise Died

    def check(self, cluster: Cluster, seed: int) -> None:
        """All of them came."""
        assert not self.left and cluster.died == len(self.hits), (seed, self.hits, self.left)


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
    net = model()
    optimizer = more.pop("optimizer", lambda parameters, _delay: optimizer_of(nn.ParameterList(parameters)))
    return reference.train(
        net, nn.functional.mse_loss, [batch(number) for number in range(steps)], parts=split_model(net, CUTS[stages]), way=way_of(name),
        microbatches=microbatches, optimizer=optimizer, seed=SEED, **more,
    )  # fmt: skip


def too_few(name: str, size: tuple[int, int]) -> bool:
    """Are fewer micro-batches than 2bw needs, one for each stage? `size` is of stages and micro-batches."""
    return name == "2bw" and size[1] < size[0]


def alone(microbatches: int, steps: int = STEPS, limit: float | None = None) -> tuple[nn.Module, list[float]]:
    """The same training in one process, whose gradients torch clips."""
    net, losses = model(), []
    pipe = Pipeline(net, nn.functional.mse_loss, [], microbatches, SEED)
    optimizer = optimizer_of(net)
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

    cluster = trained(folder, (1, 1), before=before)
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
