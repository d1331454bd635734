"""A push that comes again under its key: the same bytes are a duplicate, other ones are told of, and neither counts."""

from __future__ import annotations

import time

import pytest
import torch

from psjob.layout.blocks import Layout, TensorSpec
from psjob.modes import Async, ServedMode, Sync
from psjob.rules.base import BlockState
from psjob.shard.admission import Verdict
from psjob.shard.pending import Gradient, PushMetadata
from psjob.shard.push_metrics import PushSamples
from psjob.shard.store import Store
from psjob.wire.frame import Flag, Header, Kind
from tests.tensors.lone_shard import Answers


def served(mode: ServedMode) -> Store:
    store = Store(0, 1, 2, 1, mode, "run")
    layout = Layout.of((TensorSpec("w", (512,), "float32"),))
    store.restore(layout, "plain", {block.index: (BlockState(torch.zeros(block.length)), 0) for block in layout.blocks})
    for rank in range(2):
        store.infos.learn(rank, 1, PushMetadata(({"lr": 1.0, "weight_decay": 0.0},), frozenset()))
    store.open(1, 1)
    return store


def push(store: Store, clock: int, value: float, at: int = 0, flags: int = Flag.NONE) -> Verdict:
    """Worker 0 pushes block 0: zeros but for one element."""
    cell = store.cells[0]
    header = Header(Kind.PUSH, worker=0, start=1, clock=clock, info=1, block=0, version=(1, cell.n), flags=flags)
    grad = None if flags else store.target(header, cell)
    if isinstance(grad, Gradient):
        grad.flat.zero_()
        grad.flat[at] = value
    return store.push(header, cell, grad, Answers(), 0)


@pytest.mark.parametrize("mode", [Sync(), Async()], ids=["sync", "async"])
def test_other_bytes_under_a_taken_key_are_told(mode: ServedMode, caplog: pytest.LogCaptureFixture) -> None:
    store = served(mode)
    assert push(store, 0, 1.0) is Verdict.ADMIT
    assert push(store, 0, 1.0) is Verdict.DUPLICATE
    assert (store.counters.duplicates, store.counters.differing, caplog.messages) == (1, 0, [])
    for value, at in ((2.0, 0), (1.0, -1)):
        assert push(store, 0, value, at) is Verdict.DUPLICATE
    assert push(store, 0, 0.0, flags=Flag.SKIP) is Verdict.DUPLICATE
    assert (store.counters.duplicates, store.counters.differing) == (4, 3)
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("worker 0 pushed step 0 of block 0 again with other bytes than")
    cell = store.cells[0]
    held = cell.pending[0, 0].grad if mode.ahead == 0 else None
    first = held.flat[0] if isinstance(held, Gradient) else -cell.state.weights[0]  # type: ignore[union-attr]
    assert float(first) == 1.0, "what came first counts"


def test_many_pushes_with_other_bytes_write_few_lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is told at once, and the others with the first one that comes a minute later."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    store = served(Async())
    push(store, 0, 1.0)
    for value in range(2, 1002):
        assert push(store, 0, float(value)) is Verdict.DUPLICATE
    assert store.counters.differing == 1000 and len(caplog.messages) == 1
    now += 60.0
    for value in range(2, 12):
        push(store, 0, float(value))
    assert store.counters.differing == 1010 and len(caplog.messages) == 2
    assert "left out (1000 such pushes since the last line). A process" in caplog.messages[1]


def test_a_push_before_the_newest_is_not_compared() -> None:
    store = served(Async())
    for cell in store.cells.values():
        header = Header(Kind.PUSH, worker=0, start=1, clock=0, info=1, block=cell.index, version=(1, 0))
        if cell.index:
            store.push(header, cell, store.target(header, cell), Answers(), 0)
    push(store, 0, 1.0)
    assert push(store, 1, 2.0) is Verdict.ADMIT
    assert push(store, 0, 3.0) is Verdict.DUPLICATE and store.counters.differing == 0
    assert push(store, 1, 3.0) is Verdict.DUPLICATE and store.counters.differing == 1


def test_what_is_not_known_differs_from_nothing() -> None:
    samples = PushSamples(owned=3)
    assert not samples.knows(5, 2) and not samples.differs(5, 2, torch.ones(4))
    samples.keep(5, 2, torch.ones(4))
    assert not samples.knows(5, 1) and samples.differs(5, 2, torch.zeros(4)) and not samples.differs(5, 2, torch.ones(4))
    samples.forget(5)
    assert not samples.differs(5, 2, torch.zeros(4))
