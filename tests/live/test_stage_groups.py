"""A model that is cut in stages: each worker pushes and pulls the blocks of its stage, and no shard waits for others there.

- Gradients of a stage: given away as they are made, and begun where the shards read them.
- A stage that waits says for whom, and each stage what it holds, on the status port of real shards.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psjob.api.attachable import Pair
from psjob.api.stage_cuts import StageCuts
from psjob.api.training_job import TrainingJob
from psjob.contract import EXIT_REFUSED
from psjob.layout.blocks import Layout, TensorSpec
from psjob.layout.memory import LentSpan
from psjob.modes.stages import Stages
from psjob.pipeline.cuts import split_model
from psjob.pipeline.random_draws import Draw
from psjob.pipeline.stage import StageRun, arguments
from psjob.process.config import CheckpointConfig
from psjob.shard.status_server import status
from psjob.wire.frame import Flag, Kind
from psjob.wire.shared_memory import PAGE
from psjob.worker.sharing import Arena, Sharing
from tests.live.live_shards import SECONDS, Shards, Worker, all_well, eventually, serving
from tests.live.stage_workers import Cluster, StageWorker, compare
from tests.live.training import build
from tests.support.covering import each_pair

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
        self.job = TrainingJob(shards.place(rank, start), (Pair("", net, optimizer, cuts=StageCuts(STAGES)),), options, False)
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
    """The other stage has continued meanwhile: its blocks are two steps further, and say nothing of where this one stands."""
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


DRAW = Draw(0, 0, 0)


def stage(model: nn.Module, x: torch.Tensor, shared: frozenset[str] = frozenset()) -> StageRun:
    """With one micro-batch open."""
    run = StageRun(split_model(model)[0], dict(model.named_buffers()), shared=shared)
    run.load(0, dict(model.named_parameters()))
    run.forward(0, arguments(x), DRAW, lambda output: output.square().sum())
    return run


def test_a_backward_gives_gradients_away_as_they_are_made() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    back, expected = stage(model, x.clone().requires_grad_()).backward(0)
    got: dict[str, torch.Tensor] = {}
    shared = frozenset({"0.bias"})
    given, kept = stage(model, x.clone().requires_grad_(), shared).backward(0, sink=lambda name, grad: got.update({name: grad.clone()}))
    assert got.keys() == {"0.weight", "2.weight", "2.bias"} and kept.keys() == shared
    assert next(iter(got)).startswith("2."), "in the order of the backward, not all at its end"
    assert all(torch.equal(grad, expected[name]) for name, grad in {**got, **kept}.items())
    assert given[0] is not None and back[0] is not None and torch.equal(given[0], back[0])
    assert not any(p._backward_hooks for p in model.parameters())


def test_a_sparse_gradient_is_given_back() -> None:
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2))
    got: list[str] = []
    _, kept = stage(model, torch.tensor([[1], [2]])).backward(0, sink=lambda name, _grad: got.append(name))
    assert sorted(got) == ["1.bias", "1.weight"] and kept["0.weight"].layout is torch.sparse_coo


def test_an_error_of_the_sink_leaves_no_hook() -> None:
    model = nn.Sequential(nn.Linear(3, 2))

    def fails(_name: str, _grad: torch.Tensor) -> None:
        raise MemoryError("no more")

    with pytest.raises(MemoryError):
        stage(model, torch.ones(2, 3)).backward(0, sink=fails)
    assert not any(p._backward_hooks for p in model.parameters())


TABLE = (TensorSpec("weight", (4, 16), "float32", 0), TensorSpec("bias", (16,), "float32", 0), TensorSpec("odd", (3,), "float32", 0))


def test_a_gradient_is_begun_where_the_shards_read_it() -> None:
    arena = Arena(LentSpan.of(Layout.of(TABLE), PAGE))
    laid = arena.lay(0, torch.full((4, 16), 2.0))
    assert laid is not None and laid.data_ptr() == arena._homes[0].data_ptr()
    laid.add_(torch.ones(4, 16))
    other = torch.ones(16)
    kept = arena.begin([laid, other, None], False)
    assert kept == {0}, "it is not copied"
    assert arena.stage(0, [laid, other, None], 1.0, kept)
    assert arena.packs[0].flat.tolist() == [3.0] * 64 + [1.0] * 16 + [0.0] * 3


def test_a_gradient_that_a_script_holds_stays_as_it_was() -> None:
    arena = Arena(LentSpan.of(Layout.of(TABLE), PAGE))
    held = arena.lay(0, torch.full((4, 16), 2.0))
    assert held is not None
    arena.begin([held, None, None], False)
    now = arena.lay(0, torch.full((4, 16), 7.0))
    assert now is not None and now.data_ptr() == arena._homes[0].data_ptr() != held.data_ptr()
    assert held.unique().tolist() == [2.0] and now.unique().tolist() == [7.0]


def test_memory_that_nobody_holds_is_used_again_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(LentSpan.of(Layout.of(TABLE), PAGE))
    arena.lay(0, torch.ones(4, 16))
    monkeypatch.setattr(torch.Tensor, "clone", None)
    assert arena.lay(0, torch.zeros(4, 16)) is not None


def test_what_has_no_place_is_not_begun_there() -> None:
    arena = Arena(LentSpan.of(Layout.of(TABLE), PAGE))
    assert arena.lay(0, torch.ones(4, 16, dtype=torch.float64)) is None
    arena.withdraw()
    assert arena.lay(0, torch.ones(4, 16)) is None
    assert Sharing(Layout.of(TABLE), steady=True).lay(0, torch.ones(4, 16)) is None


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_gradients_are_let_go_when_their_step_is_answered(tmp_path: Path, transport: str) -> None:
    """A copy of such a push that waits in a queue still is not sent."""
    with serving(tmp_path, workers=1, shards=2, transport=transport) as shards:
        model = build()
        worker = Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=0.1))

        def act(worker: Worker) -> None:
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            held = [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
            worker.optimizer.step()
            session, before = worker.session, [p.detach().clone() for p in model.parameters()]
            worker.optimizer.zero_grad()
            assert held and (transport == "auto" or not any(ref() is not None for ref in held))
            for block in session.blocks:
                session.links[session.owner[block.index]].send_block(session.header(Kind.PUSH, block=block.index, clock=0))
            worker.optimizer.step()
            assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))

        all_well([worker], act)


def test_who_waits_for_a_stage_that_stands_still_says_so_until_it_goes_on(tmp_path: Path) -> None:
    go, stands = threading.Event(), threading.Event()

    def before(worker: StageWorker, what: str, step: int, micro: int) -> None:
        if (worker.rank, what, step, micro) == (0, "give ACTIVATION", 2, 1):
            stands.set()
            assert go.wait(SECONDS)
        if (worker.rank, what, step) == (2, "push", 4) and go.is_set():
            assert eventually(lambda: told()["waiting"] is None)

    with serving(tmp_path, workers=3, shards=2, stages=Stages((1, 1, 1))) as shards:

        def told() -> dict[str, Any]:
            found = status(shards.servers[0])["coordinator"]
            assert isinstance(found, dict)
            return found

        cluster = Cluster(shards, 4, before)
        training = threading.Thread(target=cluster.run)
        training.start()
        try:
            assert stands.wait(SECONDS)
            assert eventually(lambda: all(stage["waiting"] and (stage["idle"] or 0) > 0.5 for stage in told()["stages"][1:]))
            found = told()
            wanted = "worker 1 (stage 1) waits for activations of micro-batch 1 of step 2 from worker 0 (stage 0), for "
            assert found["waiting"].startswith(wanted), found["waiting"]
            first, second, third = found["stages"]
            assert first["waiting"] is None, "its script stands still, it does not wait"
            assert second["waiting"].startswith("activations of micro-batch 1 of step 2 from worker 0 (stage 0), for ")
            assert third["waiting"].startswith("activations of micro-batch 1 of step 2 from worker 1 (stage 1), for ")
            assert 0.5 < second["idle"] <= 1 and 0.5 < third["idle"] <= 1
            for stage in found["stages"]:
                assert (stage["desired"], stage["ready"], stage["delay"]) == (1, 1, 0.0)
            assert second["peakBytes"] >= 0.9 * second["rssBytes"] > 0
        finally:
            go.set()
            training.join(SECONDS)
        assert not cluster.problems
        assert told()["waiting"] is None and [stage["waiting"] for stage in told()["stages"]] == [None] * 3
        assert [stage["step"] for stage in told()["stages"]] == [5, 5, 5] and [stage["ready"] for stage in told()["stages"]] == [1, 1, 1]
        compare(cluster, 4)
