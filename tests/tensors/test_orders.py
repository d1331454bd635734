"""A shard that loses its stream to a coordinator that decides: what went with it is said again, and nobody goes back."""

from __future__ import annotations

import os
import random
import tempfile
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob.process.config import LocalConfig
from psjob.protocol.coordinator.decisions import DecisionOrder, Orders
from psjob.protocol.messages import Decision
from psjob.wire.frame import Kind
from tests.tensors.desk import Clerk, Desk

NOTHING = DecisionOrder(0, (), {})


def given_out(count: int, carried: Mapping[int, int]) -> Orders:
    """So many orders to shards 0 and 1, of which each is known to have carried out some."""
    orders = Orders((0, 1))
    for number in range(1, count + 1):
        assert orders.add(NOTHING).number == number
    for shard, number in carried.items():
        orders.carried(shard, number)
    return orders


@pytest.mark.parametrize(
    ("known", "carried", "again"),
    [
        ({}, 0, [1, 2, 3, 4, 5]),
        ({}, 5, []),
        ({0: 5, 1: 2}, 2, [3, 4, 5]),
        ({0: 5, 1: 2}, 4, [5]),
        ({0: 3, 1: 5}, 5, []),
        ({1: 2}, 1, None),
        ({0: 5, 1: 2}, 0, None),
        ({}, 6, None),
        ({}, -1, None),
        ({}, None, None),
        ({1: 6}, 0, [1, 2, 3, 4, 5]),
        ({1: -3}, 0, [1, 2, 3, 4, 5]),
    ],
)
def test_what_is_said_again_follows_from_what_both_sides_know(known: dict[int, int], carried: int | None, again: list[int] | None) -> None:
    """`known`: what the shards' news has told; None: it cannot continue from there."""
    missed = given_out(5, known).missed(1, carried)
    assert (None if missed is None else [order.number for order in missed]) == again


def test_a_shard_that_holds_nothing_misses_nothing() -> None:
    assert given_out(5, {}).missed(2, 0) == [] and given_out(5, {}).missed(2, None) == []


@given(st.lists(st.tuples(st.sampled_from(["add", 0, 1, 2]), st.integers(-1, 12))))
def test_only_what_everyone_has_carried_out_is_forgotten(said: list[tuple[Any, int]]) -> None:
    """Whatever is acknowledged in whatever order: a shard that was told so far continues from any number that it may have come to."""
    orders, done = Orders((0, 1, 2)), {0: 0, 1: 0, 2: 0}
    for what, number in said:
        if what == "add":
            orders.add(NOTHING)
        else:
            orders.carried(what, number)
            done[what] = max(done[what], number if number <= orders.last else 0)
        for shard, least in done.items():
            missed = orders.missed(shard, least)
            assert missed is not None and [order.number for order in missed] == list(range(least + 1, orders.last + 1))
        assert len(orders._kept) == orders.last - min(done.values())


# -- a coordinator and a shard with a line between that is snapshot at any message ---------------------


class Line:
    """Between shard 1 of a desk and the coordinator: what is on its way arrives later, or never."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.down: deque[Mapping[str, Any]] = deque()
        self.up: deque[dict[str, Any]] = deque()
        self.late: deque[dict[str, Any]] = deque()
        """Of streams that are gone: read, and heard after the next hello."""
        desk.servers[1].control.answer = self.up.append
        self.snapshot(0, 0)

    def snapshot(self, down: int, up: int) -> None:
        """The stream breaks: the shard has read `down` more orders, the coordinator `up` more answers; then the shard says hello."""
        for _ in range(min(down, len(self.down))):
            self.order()
        self.late.extend([self.up.popleft() for _ in range(min(up, len(self.up)))])
        self.up.clear()
        self.down = deque()
        self.desk.relink(1, order=self.down.append)

    def order(self) -> None:
        self.desk.servers[1].control.order(self.down.popleft())

    def hear(self) -> None:
        self.desk.coordination.answer(1, (self.late or self.up).popleft())
        self.desk.hear()

    def flow(self) -> None:
        """Until nothing is on its way."""
        while self.down or self.up or self.late or self.desk.coordination.pending.qsize():
            self.desk.settle()
            if self.down:
                self.order()
            if self.late or self.up:
                self.hear()


def made(desk: Desk) -> list[list[tuple[Any, Any]]]:
    """From now on: by shard, what its first block is told to keep and to drop."""
    seen: list[list[tuple[Any, Any]]] = []
    for server in desk.servers:
        cell = next(iter(server.store.cells.values()))
        mine: list[tuple[Any, Any]] = []
        seen.append(mine)

        def decide(decision: Decision, to: list[tuple[Any, Any]], decide: Any) -> None:
            to.append((decision.kept, decision.dropped))
            decide(decision)

        cell.decide = partial(decide, to=mine, decide=cell.decide)  # type: ignore[method-assign]
    return seen


QUORUM = LocalConfig(inner_steps=2, quorum=2)
MODES: list[dict[str, Any]] = [{"backup_workers": 1}, {"mode": "softsync"}, {"mode": "threshold"}, {"mode": "local", "local": QUORUM}]


@pytest.mark.parametrize("mode", MODES, ids=["backup", "softsync", "threshold", "quorum"])
@settings(max_examples=15)
@given(seed=st.integers(0, 10_000))
def test_wherever_the_line_is_snapshot_both_shards_carry_out_the_same(mode: dict[str, Any], seed: int) -> None:
    """Workers push when both shards have let them go; nobody rewinds, and each push is decided on once."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(os, "fsync"):  # many runs, and not one is read again
        desk = Desk(Path(folder), workers=3, **mode)
        clerks = desk.begun()
        line, seen, clocks, restore_id = Line(desk), made(desk), [0, 0, 0], desk.c.restore_id
        pushed = [[0, 0, 0], [0, 0, 0]]

        def push(clerk: Clerk, first: int) -> None:
            """Its next part of a push: to `first`, then to the other shard."""
            rank = clerk.rank
            if pushed[0][rank] == pushed[1][rank]:
                gone = [server.store.decided.answerable_clocks.get(rank, 0) for server in desk.servers if server.store.decided is not None]
                if min(gone) < clocks[rank]:
                    return
                clocks[rank] += 1
            shard = first if pushed[first][rank] < clocks[rank] else 1 - first
            desk.push(clerk, clocks[rank] - 1, shards=[shard], version=min(desk.versions()))
            pushed[shard][rank] += 1

        chance = random.Random(seed)
        for act in chance.choices(["push", "order", "hear", "snapshot"], [6, 3, 3, 1], k=150):
            if act == "push":
                push(chance.choice(clerks), chance.randrange(2))
            elif act == "order" and line.down:
                line.order()
            elif act == "hear":
                desk.hear()
                if line.late or line.up:
                    line.hear()
            elif act == "snapshot":
                line.snapshot(chance.randrange(4), chance.randrange(4))
        line.flow()
        for clerk in clerks:
            if pushed[0][clerk.rank] != pushed[1][clerk.rank]:
                push(clerk, 0)
        line.flow()
        line.snapshot(0, 0)
        line.flow()
        for clerk in clerks:
            desk.leave(clerk, clocks[clerk.rank])
        line.flow()
        assert seen[0] == seen[1] and desk.c.restore_id == restore_id
        done = sorted(key for kept, dropped in seen[0] for key in (*kept, *dropped))
        assert done == [(rank, clock) for rank in range(3) for clock in range(clocks[rank])]
        assert all(Kind.REWIND not in clerk.heard for clerk in clerks)


def test_a_worker_is_placed_though_the_question_was_lost(tmp_path: Path) -> None:
    desk = Desk(tmp_path, workers=3, backup_workers=1)
    desk.begun()
    line = Line(desk)
    line.flow()
    back = desk.hello(0, start=2)
    assert [body["do"] for body in line.down] == ["where"]
    line.snapshot(0, 0)
    assert Kind.WELCOME not in back.heard
    line.flow()
    assert Kind.WELCOME in back.heard and back.placed["clock"] == 0
