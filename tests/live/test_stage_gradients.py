"""Gradients of a stage: given away as they are made, and begun where the shards read them."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from psjob.layout.blocks import Layout, TensorSpec
from psjob.layout.memory import LentSpan
from psjob.pipeline.cuts import split
from psjob.pipeline.draws import Draw
from psjob.pipeline.microbatch import arguments
from psjob.pipeline.stage import StageRun
from psjob.wire.frame import Kind
from psjob.wire.shared_memory import PAGE
from psjob.worker.sharing import Arena, Sharing
from tests.live.live_shards import Worker, all_well, serving
from tests.live.training import build

DRAW = Draw(0, 0, 0)


def stage(model: nn.Module, x: torch.Tensor, shared: frozenset[str] = frozenset()) -> StageRun:
    """With one micro-batch open."""
    run = StageRun(split(model)[0], dict(model.named_buffers()), shared=shared)
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
