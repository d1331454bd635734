"""Overlap with backward and the next forward: the same bits as without, nothing counted that no step stands for.

- Overlap with streams that break, restores and workers that die: what was sent in backward counts once or not at all.
- Workers that pull and push while they compute, and what plain torch computes from the same batches.
"""

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
from psjob.process.config import CompressionConfig
from psjob.protocol.coordinator import recovery
from psjob.wire.frame import Flag, Kind
from tests.live import embeddings as rows
from tests.live.live_shards import SECONDS, Rewound, Worker, all_well, eventually, serving, severed, together, within
from tests.live.training import OPTIMIZERS, batch, build, loss_of, plain, train_step
from tests.support.reference import reference
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
        train_step(worker, 0)
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


def _by_numpy(model: nn.Module) -> None:
    model[2].weight.grad.numpy()[0, 0] = 1.0


def _in_part(model: nn.Module) -> None:
    model[0].bias.grad.data.clamp_(-1e-3, 1e-3)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "clipping": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "by hand": lambda model: model[2].weight.grad.add_(1.0),
    "replaced": lambda model: setattr(model[2].weight, "grad", model[2].weight.grad * 2),
    "removed": lambda model: setattr(model[0].weight, "grad", None),
    "by .data": lambda model: [p.grad.data.neg_() for p in model.parameters()],
    "a part by .data": _in_part,
    "by numpy": _by_numpy,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_gradient_that_is_changed_after_it_was_sent_is_sent_again(tmp_path: Path, name: str) -> None:
    """In one step of two and in steps in a row; the weights are those of a job without overlap."""

    def act(worker: Worker) -> None:
        for step in range(6):
            worker.optimizer.zero_grad()
            loss_of(worker.model, batch(step, worker.rank)).backward()
            if step % 2 or worker.rank:
                CHANGES[name](worker.model)
            worker.optimizer.step()

    assert len(set(with_and_without(tmp_path, act))) == 1


def test_gradients_that_change_in_each_step_leave_at_the_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After four steps in a row nothing is sent twice any more, and a log line says so."""
    early: list[int] = []

    def act(worker: Worker) -> None:
        seen = sent(worker)
        for step in range(8):
            seen.clear()
            worker.optimizer.zero_grad()
            loss_of(worker.model, batch(step, 0)).backward()
            assert step not in (1, 2) or eventually(lambda: (Kind.EARLY, Flag.NONE) in seen)
            CHANGES["clipping"](worker.model)
            worker.optimizer.step()
            worker.job.wait()
            early.append(seen.count((Kind.EARLY, Flag.NONE)))
            assert (Kind.PUSH, Flag.HELD) not in seen

    with serving(tmp_path, workers=1, shards=1) as shards:
        all_well(made(shards, 1), act)
    assert early[1] and early[2] and early[5:] == [0, 0, 0]
    assert [record.levelname for record in caplog.records if "in 4 steps in a row" in record.message] == ["WARNING"]


@pytest.mark.parametrize("step", [4, 6])
def test_a_change_through_data_on_a_device(tmp_path: Path, last_words: Path, step: int) -> None:
    """Where a device would have to be waited for, steps 0, 1, 2, 4 and so on are compared. A change between them is not seen."""

    def act(worker: Worker) -> None:
        worker.session.overlap._compares = False
        for each in range(8):
            worker.optimizer.zero_grad()
            loss_of(worker.model, batch(each, 0)).backward()
            if each == step:
                CHANGES["by .data"](worker.model)
            worker.optimizer.step()

    with serving(tmp_path, workers=1, shards=1) as shards:
        (error,) = together(made(shards, 1), act)
    if step == 6:
        assert error is None
        return
    assert isinstance(error, SystemExit) and error.code == 77
    assert "step 4: the gradient of 0.weight was changed through .data or NumPy" in last_words.read_text()


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("push", ["none", "fp16"])
def test_a_grad_scaler(tmp_path: Path, push: str, mode: str) -> None:
    """Its factor grows in step 3 and shrinks where a worker finds inf. What left before `step` has the same bits."""
    held: dict[int, list[int]] = {}

    def act(worker: Worker) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=3, growth_factor=1.7)
        seen = sent(worker)
        for step in range(9):
            seen.clear()
            worker.optimizer.zero_grad()
            scaler.scale(loss_of(worker.model, batch(step, worker.rank))).backward()
            if worker.session.overlap is not None:
                eventually(lambda: seen.count((Kind.EARLY, Flag.NONE)) >= len(worker.session.layout.blocks), 5)
            if step == 5:
                worker.model[0].weight.grad[0, 0] = float("inf")
            if step == 7:
                scaler.unscale_(worker.optimizer)
            scaler.step(worker.optimizer)
            scaler.update()
            worker.job.wait()
            held.setdefault(worker.rank, []).append(seen.count((Kind.PUSH, Flag.HELD)))

    workers = 2 if mode == "sync" else 1
    found = with_and_without(tmp_path, act, workers, mode=mode, compression=CompressionConfig(push, "none", 0.1))
    assert len(set(found)) == 1
    last = held[0][9:]
    assert last[0] == last[5] == last[7] == 0, "the first step, one with inf, one that was unscaled"
    assert last[2] > 0, "the factor is that of the step before"
    assert last[3] == 0 and last[4] > 0, "it has grown"


def test_early_data_is_unscaled_whatever_the_push_before_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That one lay in lent memory, and was unscaled there. The stream of its shard has broken since, and the next one lends nothing."""

    def act(worker: Worker) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        seen = sent(worker)
        for step in range(3):
            seen.clear()
            worker.optimizer.zero_grad()
            with monkeypatch.context() as patched:
                if step == 2:
                    patched.setattr(worker.session.exchange.sharing, "scaled", lambda block: True)
                scaler.scale(loss_of(worker.model, batch(step, worker.rank))).backward()
                if worker.session.overlap is not None:
                    assert eventually(lambda: seen.count((Kind.EARLY, Flag.NONE)) >= len(worker.session.layout.blocks))
            scaler.step(worker.optimizer)
            scaler.update()
            worker.job.wait()

    assert len(set(with_and_without(tmp_path, act, 1, transport="tcp"))) == 1


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
        train_step(worker, 0)
        train_step(worker, 1)
        if worker.rank == 1:
            assert eventually(lambda: bool(group[0].session.overlap.awaited) and group[0].session.clock == 3)
            assert seen.wait(SECONDS)
            train_step(worker, 2)
            return
        worker.job.wait()
        before = worker.model[0].weight.clone()
        train_step(worker, 2)
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
            train_step(worker, step)
            worker.model.eval()
            with torch.no_grad():
                outputs.append(worker.model(batch(77, 0)[0]))

    for overlap in (False, True):
        folder = tmp_path / str(overlap)
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
        train_step(worker, 0)
        if worker.rank == 1:
            assert read.wait(SECONDS)
            train_step(worker, 1)
            return
        train_step(worker, 1)
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
        train_step(worker, 0)
        worker.job.wait()
        other = copy.deepcopy(worker.model)
        train_step(worker, 1)
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
        with serving(folder, workers=2, shards=shards) as live:
            models = [rows.offloaded() for _ in range(2)]
            group = [Worker(live, r, m, torch.optim.SGD(m.parameters(), lr=0.1), overlap=overlap) for r, m in enumerate(models)]
            all_well(group, act)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[True], found[False], strict=True))
    assert early[0] == 0 and early[1] > 0


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
        train_step(worker, 0)
        train_step(worker, 1)
        worker.job.wait()
        overlap = worker.session.overlap
        assert overlap is not None
        overlap.outgoing = lambda lane, header, pack: None  # type: ignore[method-assign]
        overlap.use = type(overlap.use)(overlap.use.rank, overlap.use.waits, frozenset())
        train_step(worker, 2)
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
        train_step(worker, 0)
        worker.job.wait()
        worker.optimizer.zero_grad()
        loss_of(worker.model, batch(1, worker.rank)).backward()
        if worker.rank == 0:
            coordinator = shards.servers[0].coordinator
            assert coordinator is not None
            within(coordinator, lambda: recovery.rewind_all(coordinator.machine.state, "a test"))
        worker.optimizer.step()
        worker.job.wait()
        train_step(worker, 2)
        worker.job.wait()

    with serving(tmp_path, workers=2, shards=2) as shards:
        raised = together(made(shards, 2), act)
        assert all(isinstance(error, Rewound) for error in raised), raised


def test_early_data_of_a_worker_that_dies_is_forgotten(tmp_path: Path) -> None:
    """Its buffers go back; the successor's push is what counts."""
    with serving(tmp_path, workers=1, shards=1) as shards:
        first = made(shards, 1)[0]
        first.attach()
        train_step(first, 0)
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
        train_step(worker, 0)
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
        train_step(worker, 0)
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


def with_and_without(folder: Path, act: Callable[[Worker], None], workers: int = 2, **serves: Any) -> list[str]:
    """Without overlap, then with it: SHA-256 of the weights that each worker has at the end."""
    found = []
    for overlap in (False, True):
        with serving(folder / str(overlap), workers=workers, shards=2, **serves) as shards:
            models = [build() for _ in range(workers)]
            group = [Worker(shards, rank, m, OPTIMIZERS["nesterov"](m), overlap=overlap) for rank, m in enumerate(models)]
            all_well(group, act)
            found += [tensors_sha256(worker.model.parameters()) for worker in group]
    return found


NUMBERS = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}


def made(shards: Any, count: int, name: str = "nesterov", make: Callable[[], nn.Module] = build) -> list[Worker]:
    models = [make() for _ in range(count)]
    return [Worker(shards, rank, model, OPTIMIZERS[name](model), overlap=True) for rank, model in enumerate(models)]


def oracle(steps: int, workers: int) -> str:
    model = build()
    reference(model, "sgd", [NUMBERS], lambda step: [batch(step, rank) for rank in range(workers)], loss_of, steps)
    return tensors_sha256(model.parameters())


def steps(count: int, before: Callable[[Worker, int], None] = lambda worker, step: None) -> Callable[[Worker], None]:
    def act(worker: Worker) -> None:
        for step in range(count):
            before(worker, step)
            train_step(worker, step)

    return act


def sent(worker: Worker) -> list[tuple[Kind, Flag]]:
    """Every block's frame as it goes out from now on."""
    seen: list[tuple[Kind, Flag]] = []
    policy = worker.session.ends.policy
    plain_outgoing = policy.outgoing

    def outgoing(lane: Any, header: Any, pack: Any) -> Any:
        frame = plain_outgoing(lane, header, pack)
        if frame is not None:
            seen.append((frame[0].kind, frame[0].flags))
        return frame

    policy.outgoing = outgoing  # type: ignore[method-assign]
    return seen
