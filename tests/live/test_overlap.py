"""Overlap with backward and the next forward: the same bits as without, nothing counted that no step stands for."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psjob.checkpoint.final import tensors_sha256
from psjob.wire.frame import Flag, Kind
from tests.live import embeddings as rows
from tests.live.live_shards import SECONDS, Worker, all_well, eventually, serving, together
from tests.live.overlapping import made, one, oracle, sent, steps
from tests.live.training import OPTIMIZERS, batch, build, loss_of, plain
from tests.support.soaking import rotating

pytestmark = pytest.mark.usefixtures("last_words")


@pytest.mark.parametrize(("workers", "shards"), [rotating(1, 1), (3, 2), rotating(4, 3)])
def test_the_same_bits_as_the_oracle(tmp_path: Path, workers: int, shards: int) -> None:
    """Whoever is slow, in whichever step."""
    chance = random.Random(workers)
    with serving(tmp_path, workers=workers, shards=shards) as live:
        group = made(live, workers)
        all_well(group, steps(8, lambda worker, step: time.sleep(chance.random() * 0.004)))
        assert [server.store.counters.applied for server in live.servers] == [8 * workers] * shards
        assert {tensors_sha256(worker.model.parameters()) for worker in group} == {oracle(8, workers)}


@pytest.mark.parametrize("name", ["adam", "rmsprop", "groups"])
def test_any_optimizer_and_its_state(tmp_path: Path, name: str) -> None:
    """Also one without a rule, which steps on the workers."""
    held: dict[int, dict[str, Any]] = {}

    def act(worker: Worker) -> None:
        steps(6)(worker)
        held[worker.rank] = worker.optimizer.state_dict()

    with serving(tmp_path, workers=2, shards=2) as shards:
        group = made(shards, 2, name)
        all_well(group, act)
    model, optimizer = plain(OPTIMIZERS[name], 6, 2)
    for mine, theirs in zip(group[0].model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    assert set(held[0]["state"]) == set(optimizer.state_dict()["state"])


def test_gradients_leave_during_backward_and_step_only_names_them(tmp_path: Path) -> None:
    """From the second step on every block is early data and then a push without payload."""

    def act(worker: Worker) -> None:
        one(worker, 0)
        worker.job.wait()
        seen = sent(worker)
        worker.optimizer.zero_grad()
        loss_of(worker.model, batch(1, 0)).backward()
        blocks = len(worker.session.layout.blocks)
        assert eventually(lambda: seen.count((Kind.EARLY, Flag.NONE)) == blocks)
        assert all(server.store.counters.pushes == len(server.store.cells) for server in shards.servers)
        worker.optimizer.step()
        worker.job.wait()
        assert seen.count((Kind.PUSH, Flag.HELD)) == blocks and len(seen) == 2 * blocks

    with serving(tmp_path, workers=1, shards=2) as shards:
        all_well(made(shards, 1), act)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_batch_that_is_dropped_counts_nowhere(tmp_path: Path, mode: str) -> None:
    """Its gradients were sent; what counts is the batch that `step` stands for. So also after an exception in backward."""

    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            raise ArithmeticError("on purpose")

    def spoil(worker: Worker, step: int) -> None:
        loss_of(worker.model, batch(100 + step, worker.rank)).backward()
        if step % 2:
            for part in worker.model.children():
                part.requires_grad_(True)
            x, y = batch(50 + step, worker.rank)
            inside = Stops.apply(worker.model[:2](x))
            with pytest.raises(ArithmeticError):
                nn.functional.cross_entropy(worker.model[2:](inside), y).backward()
        worker.optimizer.zero_grad(set_to_none=bool(step % 3))

    with serving(tmp_path, workers=2 if mode == "sync" else 1, shards=2, mode=mode) as shards:
        group = made(shards, 2 if mode == "sync" else 1)
        all_well(group, steps(7, spoil))
        assert [server.store.counters.duplicates for server in shards.servers] == [0, 0]
        assert tensors_sha256(group[0].model.parameters()) == oracle(7, len(group))


def test_accumulation_is_sent_in_its_last_pass(tmp_path: Path) -> None:
    """Three backward passes a step: the first step learns it, the next send nothing twice."""

    def act(worker: Worker) -> None:
        blocks = len(worker.session.layout.blocks)
        seen = sent(worker)
        for step in range(4):
            worker.job.wait()
            seen.clear()
            worker.optimizer.zero_grad()
            for part in range(3):
                loss_of(worker.model, batch(3 * step + part, 0)).backward()
                assert step == 0 or part == 2 or not seen
            assert eventually(lambda: seen.count((Kind.EARLY, Flag.NONE)) >= blocks)
            worker.optimizer.step()
            worker.job.wait()
            assert step == 0 or seen == [(Kind.EARLY, Flag.NONE)] * blocks + [(Kind.PUSH, Flag.HELD)] * blocks

    with serving(tmp_path, workers=1, shards=1) as shards:
        group = made(shards, 1, "sgd")
        all_well(group, act)
    model = build()
    optimizer = OPTIMIZERS["sgd"](model)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(3):
            loss_of(model, batch(3 * step + part, 0)).backward()
        optimizer.step()
    for mine, theirs in zip(group[0].model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "clipping": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "by hand": lambda model: model[2].weight.grad.add_(1.0),
    "replaced": lambda model: setattr(model[2].weight, "grad", model[2].weight.grad * 2),
}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_gradient_that_was_changed_after_it_was_sent_ends_the_job(tmp_path: Path, last_words: Path, name: str) -> None:
    def act(worker: Worker) -> None:
        one(worker, 0)
        worker.optimizer.zero_grad()
        loss_of(worker.model, batch(1, 0)).backward()
        CHANGES[name](worker.model)
        worker.optimizer.step()

    with serving(tmp_path, workers=1, shards=2) as shards:
        (error,) = together(made(shards, 1), act)
        assert isinstance(error, SystemExit) and error.code == 77
        assert [server.store.counters.applied for server in shards.servers] == [1, 1]
    words = last_words.read_text()
    assert ("0.weight" if name == "clipping" else "2.weight") in words and "was changed after overlap had sent it" in words


def test_a_grad_scaler_is_refused(tmp_path: Path, last_words: Path) -> None:
    def act(worker: Worker) -> None:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(worker.model, batch(0, 0))).backward()
        scaler.step(worker.optimizer)

    with serving(tmp_path, workers=1, shards=1) as shards:
        (error,) = together(made(shards, 1), act)
        assert isinstance(error, SystemExit) and error.code == 77
    assert "GradScaler" in last_words.read_text()


def test_parameters_without_gradients_absent_ranks_and_late_ones(tmp_path: Path) -> None:
    """A gradient that is None on a worker, on all, that comes and goes from step to step; a rank without a batch."""

    def act(worker: Worker) -> None:
        for step in range(6):
            worker.optimizer.zero_grad()
            if worker.rank == 1 and step == 4:
                worker.job.absent_step()
                continue
            frozen = step % 3 == 1
            worker.model[2].requires_grad_(not frozen)
            loss_of(worker.model, batch(step, worker.rank)).backward()
            if step == 2 and worker.rank == 0:
                worker.model[4].bias.grad = None
            worker.optimizer.step()

    hashes = []
    for overlap in (False, True):
        folder = tmp_path / str(overlap)
        folder.mkdir()
        with serving(folder, workers=2, shards=2) as shards:
            models = [build() for _ in range(2)]
            group = [Worker(shards, rank, m, OPTIMIZERS["adamw"](m), overlap=overlap) for rank, m in enumerate(models)]
            all_well(group, act)
            hashes += [tensors_sha256(worker.model.parameters()) for worker in group]
    assert len(set(hashes)) == 1


def test_step_comes_back_before_its_weights_and_each_module_waits_for_its_own(tmp_path: Path) -> None:
    """Worker 1 is late: worker 0's step is through, its first module waits, and state_dict does."""
    seen = threading.Event()

    def act(worker: Worker) -> None:
        one(worker, 0)
        one(worker, 1)
        if worker.rank == 1:
            assert eventually(lambda: bool(group[0].session.overlap.awaited) and group[0].session.clock == 3)
            assert seen.wait(SECONDS)
            one(worker, 2)
            return
        worker.job.wait()
        before = worker.model[0].weight.clone()
        one(worker, 2)
        assert worker.session.overlap.awaited, "step waited"
        assert torch.equal(worker.model[0].weight, before)
        seen.set()
        state = worker.model.state_dict() if worker.session.layout else {}
        assert not worker.session.overlap.awaited
        assert not torch.equal(state["0.weight"], before)

    with serving(tmp_path, workers=2, shards=2) as shards:
        group = made(shards, 2)
        all_well(group, act)
        assert tensors_sha256(group[0].model.parameters()) == oracle(3, 2)


class Attends(nn.Module):
    """Attention reads its output projection's weights itself; evaluation takes another way through the encoder than training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Linear(12, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.encoder(self.embed(x).unsqueeze(1)).squeeze(1)) * self.scale
        return y


def test_modules_that_read_the_weights_of_others(tmp_path: Path) -> None:
    """In training and in evaluation right after a step: the values are those of a job without overlap."""
    seen: dict[tuple[bool, int], list[torch.Tensor]] = {}

    def act(worker: Worker) -> None:
        outputs = seen.setdefault((worker.session.overlap is not None, worker.rank), [])
        for step in range(4):
            worker.model.train()
            one(worker, step)
            worker.model.eval()
            with torch.no_grad():
                outputs.append(worker.model(batch(77, 0)[0]))

    for overlap in (False, True):
        folder = tmp_path / str(overlap)
        folder.mkdir()
        with serving(folder, workers=2, shards=2) as shards:
            models = [Attends() for _ in range(2)]
            all_well([Worker(shards, rank, m, OPTIMIZERS["sgd"](m), overlap=overlap) for rank, m in enumerate(models)], act)
    for rank in range(2):
        for mine, theirs in zip(seen[(True, rank)], seen[(False, rank)], strict=True):
            assert torch.equal(mine, theirs)


def test_weights_read_too_early_are_refused_by_torch(tmp_path: Path) -> None:
    """A graph that has read a block before it landed is not the graph of these weights."""
    read = threading.Event()

    def act(worker: Worker) -> None:
        one(worker, 0)
        if worker.rank == 1:
            assert read.wait(SECONDS)
            one(worker, 1)
            return
        one(worker, 1)
        hidden = nn.functional.linear(batch(2, 0)[0].requires_grad_(), worker.model[0].weight)
        read.set()
        worker.job.wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            hidden.sum().backward()

    with serving(tmp_path, workers=2, shards=1) as shards:
        group = made(shards, 2, "sgd")
        all_well(group, act)


def test_copies_of_the_model_wait_for_nothing(tmp_path: Path) -> None:
    def act(worker: Worker) -> None:
        one(worker, 0)
        worker.job.wait()
        other = copy.deepcopy(worker.model)
        one(worker, 1)
        loss_of(other, batch(2, 0)).backward()
        assert all(p.grad is not None for p in other.parameters())

    with serving(tmp_path, workers=1, shards=1) as shards:
        group = made(shards, 1)
        all_well(group, act)
        assert tensors_sha256(group[0].model.parameters()) == oracle(2, 1)


@pytest.mark.parametrize("shards", [1, 2])
def test_tables_of_rows_beside_dense_layers(tmp_path: Path, shards: int) -> None:
    """A lookup in the next forward waits for the rows' updates; the dense blocks still leave in backward."""
    found: dict[bool, list[torch.Tensor]] = {}
    early: list[int] = []

    def act(worker: Worker) -> None:
        seen = sent(worker)
        for step in range(5):
            worker.optimizer.zero_grad()
            rows.loss_of(worker.model, step, worker.rank).backward()
            time.sleep(0.01)
            worker.optimizer.step()
        if worker.rank == 0:
            early.append(seen.count((Kind.EARLY, Flag.NONE)))
            found[worker.session.overlap is not None] = [*rows.rows_of(worker.model), worker.model.head.weight.detach().clone()]

    for overlap in (False, True):
        folder = tmp_path / str(overlap)
        folder.mkdir()
        with serving(folder, workers=2, shards=shards) as live:
            models = [rows.offloaded() for _ in range(2)]
            group = [Worker(live, r, m, torch.optim.SGD(m.parameters(), lr=0.1), overlap=overlap) for r, m in enumerate(models)]
            all_well(group, act)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[True], found[False], strict=True))
    assert early[0] == 0 and early[1] > 0
