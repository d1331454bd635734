"""A model that is cut in stages: each worker pushes and pulls the blocks of its stage, and no shard waits for others there."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from psjob.api.attached import AttachedJob
from psjob.api.pairs import Pair
from psjob.api.stagecuts import StageCuts
from psjob.contract import EXIT_REFUSED
from psjob.modes.stages import Stages
from psjob.process.config import CheckpointConfig
from psjob.wire.frame import Flag, Kind
from tests.covering import each_pair
from tests.live.live_shards import SECONDS, Shards, Worker, all_well, eventually, serving

STEPS = 6
STAGES: Mapping[str, tuple[int, ...]] = {
    "0.weight": (0,), "0.bias": (0,), "1.weight": (0,), "1.bias": (0,), "2.weight": (1,), "2.bias": (1,), "3.weight": (1,), "3.bias": (1,),
}  # fmt: skip
OFTEN = CheckpointConfig(interval_seconds=3600.0, every_steps=2, keep=3, disabled=False, resume_from=None)


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(*(torch.nn.Linear(17, 17) for _ in range(4)))


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int, own: set[str] | None = None) -> None:
    """One step on data that depends on its number; of parameters that are not `own` nothing is known."""
    optimizer.zero_grad()
    x = torch.randn(5, 17, generator=torch.Generator().manual_seed(number))
    net(x).square().mean().backward()
    for name, p in net.named_parameters():
        if own is not None and name not in own:
            p.grad = None
    optimizer.step()


class Staged(Worker):
    """A worker of one stage."""

    def __init__(self, shards: Shards, rank: int, start: int = 1, **options: Any) -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        super().__init__(shards, rank, net, optimizer, start, overlap=False)
        self.job = AttachedJob(shards.place(rank, start), (Pair("", net, optimizer, cuts=StageCuts(STAGES)),), options, False)
        self.session = self.job.session
        self.stage = shards.config.stages.of(rank)
        self.own = {name for name, stages in STAGES.items() if self.stage in stages}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters() if name in self.own}


def attached(*workers: Staged) -> None:
    """All of them have the job's weights."""
    threads = [threading.Thread(target=worker.attach, daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize(("count", "transport", "replicas"), each_pair([1, 3], ["auto", "tcp"], [(1, 1), (1, 2)]))
def test_stages_train_their_own_blocks(tmp_path: Path, count: int, transport: str, replicas: tuple[int, ...]) -> None:
    """Gradients of a stage depend on the other's weights here: both hold the whole model, but each knows only its own after a step.

    So the numbers are compared after one step, and the clocks after all.
    """
    stages = Stages(replicas)
    with serving(tmp_path, workers=stages.workers, shards=count, transport=transport, stages=stages, checkpoint=OFTEN) as shards:
        workers = [Staged(shards, rank) for rank in range(stages.workers)]
        assert {len(worker.session.blocks) for worker in workers} != {len(workers[0].session.layout.blocks)}
        first: dict[int, dict[str, torch.Tensor]] = {}

        def act(worker: Worker) -> None:
            assert isinstance(worker, Staged)
            for number in range(STEPS):
                worker.edge(number)
                step(worker.model, worker.optimizer, number, worker.own)
                if number == 0:
                    first[worker.rank] = worker.weights()

        all_well(workers, act)
        assert {server.store.span() for server in shards.servers if server.store.cells} == {(STEPS, STEPS)}
        net = model()
        step(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), 0)
        expected = dict(net.named_parameters())
        for weights in first.values():
            assert weights and all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())


@pytest.mark.parametrize("count", [1, 3])
def test_a_worker_comes_back_at_its_stages_clock(tmp_path: Path, count: int) -> None:
    """The other stage has gone on meanwhile: its blocks are two steps further, and say nothing of where this one stands."""
    with serving(tmp_path, shards=count, stages=Stages((1, 1))) as shards:
        first, second = Staged(shards, 0), Staged(shards, 1)
        attached(first, second)
        for number in range(3):
            first.edge(number)
            step(first.model, first.optimizer, number, first.own)
        first.edge(3)  # its record of clock 3
        for number in range(5):
            second.edge(number)
            step(second.model, second.optimizer, number, second.own)
        before = first.weights()
        first.die()
        again = Staged(shards, 0, start=2)
        again.attach()
        assert again.session.clock == 3 and all(torch.equal(tensor, before[name]) for name, tensor in again.weights().items())
        again.edge(3)
        step(again.model, again.optimizer, 3, again.own)
        assert again.session.clock == 4 and second.session.clock == 5


def test_a_push_of_another_stages_block_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, shards=1, stages=Stages((1, 1))) as shards:
        first, second = Staged(shards, 0), Staged(shards, 1)
        attached(first, second)
        foreign = next(block for block in first.session.layout.blocks if block not in first.session.blocks)
        before = shards.servers[0].bad_connections
        first.session.links[0].send(first.session.header(Kind.PUSH, block=foreign.index, flags=Flag.ABSENT))
        assert eventually(lambda: shards.servers[0].bad_connections > before)
        assert shards.servers[0].store.cells[foreign.index].n == 0


def test_stages_that_the_job_does_not_have_are_refused(tmp_path: Path, last_words: Path) -> None:
    """Rank 0's table is laid out by every shard: one with such a row would end them."""
    with serving(tmp_path, workers=1, shards=1) as shards:
        with pytest.raises(SystemExit) as ended:
            Staged(shards, 0).attach()
        assert ended.value.code == EXIT_REFUSED and not shards.codes
    assert "of stage 0 of the model; the job has 0 stages" in last_words.read_text()
