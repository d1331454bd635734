"""Modes in which the coordinator decides which pushes make an update; the decisions of a run, replayed in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from psjob.layout.packing import Pack
from psjob.modes import Batch
from psjob.protocol.coordinator import updates
from psjob.protocol.coordinator.decisions import DecisionOrder
from psjob.protocol.coordinator.state import CoordinatedUpdates, CoordinatorState
from psjob.rules import named
from psjob.rules.base import BlockState, UpdateFacts
from psjob.simulate.training import _combined, _Sent
from tests.live.live_shards import Shards, Worker, eventually, until_checkpoints
from tests.live.training import build
from tests.support.reference import layout_of

BACKUP: dict[str, Any] = {"mode": "sync", "backup_workers": 1}
SOFTSYNC: dict[str, Any] = {"mode": "softsync", "splits": 1}
THRESHOLD: dict[str, Any] = {"mode": "threshold", "staleness": 1}
NUMBERS = {"lr": 0.05, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """All decisions in their order."""
    said: list[Batch] = []
    carry = updates._order

    def note(state: CoordinatorState, decided: CoordinatedUpdates, order: DecisionOrder | None) -> None:
        said.extend(order.batches if order is not None else ())
        carry(state, decided, order)

    monkeypatch.setattr(updates, "_order", note)
    return said


def weights(shards: Shards) -> dict[int, torch.Tensor]:
    """Of every block, as the shards have them at the end."""
    return {index: cell.state.weights for server in shards.servers for index, cell in server.store.cells.items() if cell.state is not None}


def sgd(shards: Shards, rank: int, **options: Any) -> Worker:
    model = build()
    return Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=0.05), **options)


def held_back(worker: Worker, batches: list[Batch] | None) -> None:
    """Before its first push worker 2 lets the others be decided on: its push is late on a machine of any speed."""
    if batches is not None and worker.rank == 2 and worker.session.clock == 0:
        assert eventually(lambda: sum(bool(one.kept) for one in batches) > 1)


def constant(worker: int, clock: int) -> list[torch.Tensor]:
    """A gradient that does not depend on the weights."""
    generator = torch.Generator().manual_seed(100 * clock + worker)
    return [torch.randn(p.shape, generator=generator) for p in build().parameters()]


def given(count: int, batches: list[Batch] | None = None, begin: int = 0, cut_by: Shards | None = None) -> Callable[[Worker], None]:
    """Steps on gradients that are given; with `cut_by` at least three checkpoints are taken meanwhile."""

    def act(worker: Worker) -> None:
        for step in range(begin, count):
            if cut_by is not None:
                until_checkpoints(worker, cut_by, 4 * step // count)
            worker.edge(step)
            time.sleep(0.004 * (1 + 3 * (worker.rank == 2)))
            held_back(worker, batches)
            for p, grad in zip(worker.model.parameters(), constant(worker.rank, worker.session.clock), strict=True):
                p.grad = grad
            worker.optimizer.step()

    return act


def replayed(batches: list[Batch]) -> dict[int, torch.Tensor]:
    """The decisions once more, by the simulator's arithmetic."""
    model, rule = build(), named("sgd")
    layout = layout_of(model)
    states: dict[int, BlockState] = {}
    for block in layout.blocks:
        flat = torch.empty(block.length)
        Pack(block, flat, layout.table).gather(list(model.parameters()))
        states[block.index] = rule.init(flat)
    for one in (one for one in batches if one.kept):
        for block in layout.blocks:
            sent = []
            for push in one.kept:
                flat = torch.empty(block.length)
                Pack(block, flat, layout.table).gather(constant(push.worker, push.clock))
                sent.append(_Sent(flat, flat.numpy(), 0.0))
            rule.apply(states[block.index], _combined(sent, one), NUMBERS, UpdateFacts(staleness=0))
    return {index: state.weights for index, state in states.items()}
