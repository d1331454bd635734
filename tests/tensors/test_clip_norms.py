"""The norm of a mean gradient that lies on several shards: its sum, its factor, what is told twice, and what a block does meanwhile."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob.modes import Sync
from psjob.protocol import messages
from psjob.protocol.coordinator import updates
from psjob.protocol.coordinator.events import JobFacts, Order
from psjob.protocol.coordinator.state import CoordinatorState, ShardPeer
from psjob.protocol.coordinator.updates import clip_factor
from psjob.protocol.messages import ShardPosition
from psjob.shard.coordinated_updates import ClipNorms
from psjob.shard.push_metrics import PART, squares_of
from psjob.shard.store import Store as RealStore


@given(st.integers(0, 3 * PART + 5), st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]), st.integers(0, 9))
@settings(max_examples=30)
def test_the_sum_of_squares_is_exact_to_a_part_in_a_million(size: int, dtype: torch.dtype, seed: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    exact = math.fsum(float(v) ** 2 for v in values.double())
    assert squares_of(values) == pytest.approx(exact, rel=1e-6)


def test_the_sum_of_squares_of_what_is_not_finite_is_not() -> None:
    values = torch.ones(PART + 3)
    values[7] = math.inf
    assert squares_of(values) == math.inf
    values[PART + 1] = math.nan
    assert math.isnan(squares_of(values))


@pytest.mark.parametrize("limit", [0.1, 1.0, 7.5])
def test_the_factor_is_torchs(limit: float) -> None:
    for scale in (1e-3, 0.3, 1.0, 40.0):
        layer = torch.nn.Linear(3, 2)
        for p in layer.parameters():
            p.grad = torch.full_like(p, scale)
        before = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(layer.parameters(), limit))
        factor = clip_factor(norm, limit)
        for p, old in zip(layer.parameters(), before, strict=True):
            torch.testing.assert_close(p.grad, old * factor, rtol=1e-6, atol=0)
    assert math.isnan(clip_factor(math.nan, 1.0)) and clip_factor(math.inf, 1.0) == 0.0


class World(CoordinatorState):
    """Of three shards; shard 1 has no block."""

    def __init__(self) -> None:
        super().__init__(JobFacts("run", "/run", Sync(), 2, 3, 1, 1))
        self.phase, self.restore_id, self.assignment = "open", 3, (0, 2, 0, 2)
        self.peers = {index: ShardPeer(index, 1, True, 3, "sync", None) for index in range(3)}

    @property
    def orders(self) -> list[tuple[int, Mapping[str, Any]]]:
        """By shard."""
        return [(action.link, action.body) for action in self.out if isinstance(action, Order)]

    def tell(self, shard: int, version: int, squares: float, restore_id: int = 3) -> list[tuple[int, Mapping[str, Any]]]:
        self.out = []
        updates.norm_measured(self, messages.NormMeasured(shard, restore_id, version, squares, 1.0))
        return self.orders

    def tick(self, now: float) -> None:
        self.now = now
        updates.tick(self)


def test_all_shards_with_blocks_are_ordered_the_same_factor() -> None:
    world = World()
    assert world.tell(2, 7, 16.0) == [] and world.tell(2, 7, 16.0) == []
    orders = world.tell(0, 7, 9.0)
    assert [shard for shard, _ in orders] == [2, 0] and world.progress.metrics["grad_norm"] == 5.0
    assert orders[0][1] == orders[1][1] == {"do": "clip", "restore_id": 3, "version": 7, "factor": pytest.approx(1 / (5 + 1e-6))}


def test_a_shard_that_tells_again_is_ordered_again_and_what_is_of_before_a_restore_is_void() -> None:
    world = World()
    world.tell(2, 7, 16.0)
    world.tell(0, 7, 9.0)
    assert [shard for shard, _ in world.tell(2, 7, 16.0)] == [2], "the order was lost with its stream"
    assert world.tell(2, 8, 1.0, restore_id=2) == []
    assert world.tell(2, 8, 1.0) == []
    world.restore_id = 4
    assert world.tell(0, 8, 1.0, restore_id=4) == [], "shard 2 told of before the restore"
    assert len(world.tell(2, 8, 1.0, restore_id=4)) == 2


def test_a_norm_that_is_no_number_makes_a_factor_that_is_none() -> None:
    world = World()
    world.tell(2, 0, math.nan)
    assert world.tell(0, 0, 1.0)[0][1]["factor"] is None


def test_a_shard_that_has_gone_on_without_a_norm_is_asked_and_has_no_part_in_it() -> None:
    """A worker may name a limit to one shard, and none to another."""
    world = World()
    world.tell(0, 7, 9.0)
    world.tick(0.5)
    assert world.orders == []
    world.tick(1.5)
    ((shard, body),) = world.orders
    assert (shard, body["do"], body["ranks"]) == (2, "where", [])
    updates.is_beyond(world, messages.WorkerPositions(2, body["ask"], ShardPosition(7, 8, 2, 7), {}))
    assert len(world.orders) == 1, "a block of it still waits for pushes"
    updates.is_beyond(world, messages.WorkerPositions(2, body["ask"] - 1, ShardPosition(8, 8, 2, 8), {}))
    assert len(world.orders) == 1, "the answer to another question"
    updates.is_beyond(world, messages.WorkerPositions(2, body["ask"], ShardPosition(8, 8, 2, 8), {}))
    assert world.progress.metrics["grad_norm"] == 3.0
    assert [each["factor"] for shard, each in world.orders[1:]] == [pytest.approx(1 / (3 + 1e-6))] * 2
    world.tick(99.0)
    assert len(world.orders) == 3, "nothing waits any more"


@dataclass
class Counters:
    first_applied: float | None = None


@dataclass
class Block:
    index: int
    n: int = 0
    factors: list[tuple[int, float]] = field(default_factory=list)
    lock: Any = field(default_factory=__import__("threading").Lock)

    def clip(self, version: int, factor: float) -> None:
        self.factors.append((version, factor))
        self.n += 1


@dataclass
class Store:
    cells: dict[int, Block]
    restore_id: int = 1
    counters: Counters = field(default_factory=Counters)
    problems: list[str] = field(default_factory=list)
    norms: ClipNorms = field(default_factory=lambda: ClipNorms(0))

    def moved(self, before: int, after: int) -> None: ...

    def note_clip(self, version: int, factor: float) -> None: ...

    def tell_step(self) -> None: ...

    def _first_applied(self) -> None: ...

    def on_failure(self, text: str) -> None:
        self.problems.append(text)


def test_a_shard_tells_once_when_all_blocks_are_measured_and_carries_an_order_out_once() -> None:
    store: Any = Store({4: Block(4), 1: Block(1)})
    norms, told = store.norms, []
    norms.measured = told.append
    norms.note(store.cells, 1, 1, 5, 2.0, 1.5)
    assert told == []
    norms.note(store.cells, 1, 4, 5, 3.0, 1.5)
    assert told == [messages.NormMeasured(0, 1, 5, 5.0, 1.5)]
    norms.tell_again()
    assert told == [told[0]] * 2
    RealStore.clip(store, messages.Clip(1, 4, 0.5))
    RealStore.clip(store, messages.Clip(0, 5, 0.5))
    assert store.cells[1].factors == [], "of another update, or of before a restore"
    for _ in range(2):
        RealStore.clip(store, messages.Clip(1, 5, 0.5))
    assert store.cells[1].factors == store.cells[4].factors == [(5, 0.5)] and not store.problems
    norms.tell_again()
    assert len(told) == 2


@pytest.mark.parametrize("order", [(1, 4), (4, 1)])
def test_a_block_that_has_gone_on_without_a_norm_holds_up_no_other(order: tuple[int, int]) -> None:
    """A worker may name a limit for one block, and be absent from another."""
    store: Any = Store({4: Block(4), 1: Block(1), 7: Block(7)})
    for block in store.cells.values():
        block.n = 5
    norms, told = store.norms, []
    norms.measured = told.append
    store.cells[order[0]].n = 6
    norms.note(store.cells, 1, 7, 5, 2.0, 1.5)
    assert told == [] and norms.waits == 5
    store.cells[order[1]].n = 6
    norms.passed(store.cells, 1, order[1], 6)
    assert told == [messages.NormMeasured(0, 1, 5, 2.0, 1.5)] and norms.waits is None
    RealStore.clip(store, messages.Clip(1, 5, 0.5))
    assert store.cells[7].factors == [(5, 0.5)] and store.cells[1].factors == store.cells[4].factors == [] and not store.problems


def test_of_several_limits_the_lowest_holds() -> None:
    store: Any = Store({4: Block(4), 1: Block(1)})
    norms, told = store.norms, []
    norms.measured = told.append
    norms.note(store.cells, 1, 4, 0, 3.0, 1.5)
    norms.note(store.cells, 1, 1, 0, 2.0, 9.0)
    assert told[0].limit == 1.5 and told[0].squares == 5.0
