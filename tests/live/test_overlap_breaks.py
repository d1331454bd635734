"""Overlap with streams that break, restores and workers that die: what was sent in backward counts once or not at all."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psjob.checkpoint.final import tensors_sha256
from psjob.process.config import CompressionConfig
from psjob.protocol.coordinator import recovery
from tests.live.live_shards import Rewound, Worker, all_well, eventually, serving, severed, together, within
from tests.live.overlapping import made, one, oracle, sent, steps
from tests.live.training import OPTIMIZERS, batch, build, loss_of
from tests.support.soaking import rotating

pytestmark = pytest.mark.usefixtures("last_words")


def test_streams_that_break_in_backward_lose_and_double_nothing(tmp_path: Path) -> None:
    """Early data dies with its stream; the push is then whole."""
    chance = random.Random(3)

    def cut(worker: Worker, step: int) -> None:
        if chance.random() < 0.5:
            worker.session.links[chance.randrange(2)].close()

    class Cuts(torch.autograd.Function):
        worker: Any = None

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return grads[0]

    def act(worker: Worker) -> None:
        for step in range(25):
            worker.optimizer.zero_grad()
            x, y = batch(step, worker.rank)
            out = worker.model[:3](x)
            out.register_hook(lambda grad, step=step: cut(worker, step))  # type: ignore[misc]
            nn.functional.cross_entropy(worker.model[3:](out), y).backward()
            worker.optimizer.step()

    with serving(tmp_path, workers=2, shards=2) as shards:
        group = made(shards, 2)
        all_well(group, act)
        assert [server.store.counters.applied for server in shards.servers] == [50, 50]
        assert tensors_sha256(group[0].model.parameters()) == oracle(25, 2)


def test_a_stream_that_breaks_after_step_came_back(tmp_path: Path) -> None:
    """The push is said again from memory of its own, whatever the script has done with its gradients meanwhile."""

    def act(worker: Worker) -> None:
        one(worker, 0)
        one(worker, 1)
        worker.job.wait()
        overlap = worker.session.overlap
        assert overlap is not None
        overlap.outgoing = lambda lane, header, pack: None  # type: ignore[method-assign]
        overlap.use = type(overlap.use)(overlap.use.rank, overlap.use.waits, frozenset())
        one(worker, 2)
        for p in worker.model.parameters():
            p.grad.fill_(1e6)
        del overlap.outgoing
        worker.session.links[0].close()
        worker.job.wait()

    with serving(tmp_path, workers=1, shards=1) as shards:
        group = made(shards, 1)
        all_well(group, act)
        assert tensors_sha256(group[0].model.parameters()) == oracle(3, 1)


def test_a_restore_in_the_middle_of_backward_rewinds(tmp_path: Path) -> None:
    def act(worker: Worker) -> None:
        one(worker, 0)
        worker.job.wait()
        worker.optimizer.zero_grad()
        loss_of(worker.model, batch(1, worker.rank)).backward()
        if worker.rank == 0:
            coordinator = shards.servers[0].coordinator
            assert coordinator is not None
            within(coordinator, lambda: recovery.rewind_all(coordinator.machine.state, "a test"))
        worker.optimizer.step()
        worker.job.wait()
        one(worker, 2)
        worker.job.wait()

    with serving(tmp_path, workers=2, shards=2) as shards:
        raised = together(made(shards, 2), act)
        assert all(isinstance(error, Rewound) for error in raised), raised


def test_early_data_of_a_worker_that_dies_is_forgotten(tmp_path: Path) -> None:
    """Its buffers go back; the successor's push is what counts."""
    with serving(tmp_path, workers=1, shards=1) as shards:
        first = made(shards, 1)[0]
        first.attach()
        one(first, 0)
        first.job.wait()
        loss_of(first.model, batch(99, 0)).backward()
        session = shards.servers[0].sessions[0]
        assert eventually(lambda: session.lanes[0].held.nbytes() == first.session.layout.nbytes)
        first.die()
        assert eventually(lambda: session.done.is_set() and session.lanes[0].held.nbytes() == 0)
        model = build()
        again = Worker(shards, 0, model, OPTIMIZERS["nesterov"](model), start=2, overlap=True)
        all_well([again], steps(3))
        assert tensors_sha256(model.parameters()) == oracle(3, 1)


def test_early_data_that_is_not_held_is_refused_and_pushed_whole(tmp_path: Path) -> None:
    """A shard that has lost it says so by ending the stream."""

    def act(worker: Worker) -> None:
        one(worker, 0)
        worker.job.wait()
        worker.optimizer.zero_grad()
        seen = sent(worker)
        loss_of(worker.model, batch(1, 0)).backward()
        assert eventually(lambda: len(seen) == len(worker.session.layout.blocks))
        lane = shards.servers[0].sessions[0].lanes[0]
        assert eventually(lambda: lane.held.nbytes() == worker.session.layout.nbytes)
        lane.held.clear()
        worker.optimizer.step()
        worker.job.wait()

    with serving(tmp_path, workers=1, shards=1) as shards:
        group = made(shards, 1)
        all_well(group, act)
        assert shards.servers[0].store.counters.applied == 2
        assert tensors_sha256(group[0].model.parameters()) == oracle(2, 1)


def test_severed_from_a_shard_in_backward(tmp_path: Path) -> None:
    """Nothing can leave during backward: all is pushed after the stream is there again."""

    def act(worker: Worker) -> None:
        one(worker, 0)
        worker.job.wait()
        worker.optimizer.zero_grad()
        with severed(worker.session.links[0]):
            loss_of(worker.model, batch(1, 0)).backward()
        worker.optimizer.step()

    with serving(tmp_path, workers=1, shards=1) as shards:
        group = made(shards, 1)
        all_well(group, act)
        assert tensors_sha256(group[0].model.parameters()) == oracle(2, 1)


@pytest.mark.parametrize(("push", "pull"), [rotating("bf16", "fp16"), rotating("int8", "none"), ("topk", "bf16")])
def test_codecs_and_streams_that_break(tmp_path: Path, push: str, pull: str) -> None:
    """The bits are those without overlap; a codec that feeds its error back does so once a step, whatever was sent before it."""
    found = set()
    for overlap in (False, True):
        folder = tmp_path / str(overlap)
        folder.mkdir()
        chance = random.Random(push)
        with serving(folder, workers=2, shards=2, compression=CompressionConfig(push, pull, 0.1)) as shards:
            models = [build() for _ in range(2)]
            group = [Worker(shards, rank, m, OPTIMIZERS["nesterov"](m), overlap=overlap) for rank, m in enumerate(models)]

            def spoil(worker: Worker, step: int, overlap: bool = overlap, chance: random.Random = chance) -> None:
                if overlap:
                    loss_of(worker.model, batch(100 + step, worker.rank)).backward()
                if overlap and chance.random() < 0.4:
                    worker.session.links[chance.randrange(2)].close()

            all_well(group, steps(10, spoil))
            found.add(tensors_sha256(group[1].model.parameters()))
    assert len(found) == 1
