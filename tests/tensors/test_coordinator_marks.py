"""Async checkpoints hold every worker's pushes for a moment: only when all can take part, and never for long.

- A run begins with one whole checkpoint of step 0, whatever goes wrong on the way there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from psjob.layout.blocks import TensorSpec
from psjob.protocol import messages
from psjob.protocol.coordinator import events as e
from psjob.shard.deduplication import Verdict
from psjob.wire.frame import Header, Kind
from tests.tensors.desk import NEVER, Desk, in_the_way, mark
from tests.unit.coordinator_world import World


def due(desk: Desk, later: float = 2.0) -> None:
    """The interval is over, and once more."""
    desk.tick(later=1.0 + NEVER.interval_seconds)
    desk.settle()
    desk.tick(later=later - 1.0)
    desk.settle()


def test_nobody_holds_for_a_checkpoint_while_a_worker_is_away(tmp_path: Path) -> None:
    """It would be void for want of the missing one's mark, after ten seconds of everybody's time."""
    desk = Desk(tmp_path, mode="async")
    here = desk.hello(0)
    desk.give(here)
    desk.settle()
    desk.push(here, 0)
    due(desk)
    assert desk.c.progress.checkpoint_problem is None, "it may only have to dial again"
    due(desk, later=20.0)
    assert Kind.MARK not in here.heard and "[1]" in str(desk.c.progress.checkpoint_problem)
    came = desk.hello(1)
    desk.settle()
    due(desk)
    assert here.heard.count(Kind.MARK) == came.heard.count(Kind.MARK) == 1
    mark(desk, here, 1)
    mark(desk, came, 0)
    desk.settle()
    assert desk.c.snapshots.current is None and desk.c.progress.checkpoint_problem is None
    assert {rank: entry["clock"] for rank, entry in desk.manifests()[-1].workers.items()} == {"0": 1, "1": 0}
    came.gone()
    due(desk)
    assert here.heard.count(Kind.MARK) == 1


def test_who_has_left_is_not_missed(tmp_path: Path) -> None:
    desk = Desk(tmp_path, mode="async")
    clerks = desk.begun()
    desk.push(clerks[0], 0)
    desk.leave(clerks[1], 0)
    clerks[1].gone()
    desk.hear()
    due(desk)
    assert clerks[0].heard.count(Kind.MARK) == 1
    mark(desk, clerks[0], 1)
    desk.settle()
    assert desk.manifests()[-1].workers["1"]["leftAt"] == 0


def test_a_push_that_a_checkpoint_holds_in_part_counts_once_on_other_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker dies in the middle of a push, and its successor marks a snapshot before it makes that step. The run has one shard."""
    monkeypatch.setattr("tests.tensors.desk.TABLE", (TensorSpec("w", (1 << 16,), "float32", 0),))
    desk = Desk(tmp_path, mode="async")
    clerks = desk.begun()
    for clerk in clerks:
        desk.push(clerk, 0)
    store = desk.servers[0].store
    first = min(store.cells.values(), key=lambda cell: cell.position)
    assert len(store.cells) > 1 and store.admission.admit(0, (1, 0), 1, first.position) is Verdict.ADMIT
    clerks[0].gone()
    desk.hear()
    again = desk.hello(0, start=2)
    desk.settle()
    desk.begin_snapshot()
    desk.settle()
    for clerk in (again, clerks[1]):
        mark(desk, clerk, 1)
    desk.settle()
    (made,) = desk.manifests()[-1:]
    assert made.step > 0
    back = Desk(tmp_path, shards=1, number=2, mode="async")
    (server,) = back.servers
    row = server.store.admission.rows[0]
    assert back.c.open and row.complete == 1 and server.store.admission.rows[1].open == set()
    assert {index for index, cell in server.store.cells.items() if cell.position in row.open} == {first.index}
    before = {index: cell.n for index, cell in server.store.cells.items()}
    clerk = back.hello(0, start=2, rewinds=1)
    back.settle()
    back.push(clerk, 1)
    assert {index for index, cell in server.store.cells.items() if cell.n == before[index]} == {first.index}, "there it would count twice"
    assert row.complete == 2


def test_a_failed_checkpoint_of_step_0_is_tried_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    first, second = desk.hello(0), desk.hello(1)
    in_the_way(desk, 1)
    desk.give(first)
    desk.settle()
    assert desk.c.snapshots.current is None and "c065537-shard000" in str(desk.c.progress.checkpoint_problem)
    desk.tick()
    assert desk.c.snapshots.current is None, "not at once"
    desk.tick(later=6.0)
    desk.settle()
    assert [made.step for made in desk.manifests()] == [0]
    assert first.heard[-2:] == second.heard[-2:] == [Kind.WELCOME, Kind.RECORD]


def test_a_first_record_that_is_none_is_told_and_ends_no_shard(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    first = desk.hello(0)
    desk.hello(1)
    for server in desk.servers:
        for block, cell in server.store.cells.items():
            if server.store.initialise(block, torch.zeros(cell.block.length)):
                server.initialised()
    desk.say(first, Header(Kind.RECORD, clock=-1), {}, b"rubbish, longer than a record's first bytes")
    desk.settle()
    assert not desk.manifests() and "a resume record is not in shape" in str(desk.c.progress.checkpoint_problem)
    again = desk.hello(0, start=2)
    desk.give(again)
    desk.tick(later=6.0)
    desk.settle()
    assert [made.step for made in desk.manifests()] == [0]


def test_a_rank_0_that_begins_anew_voids_the_checkpoint_of_what_it_gave_before(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.give(desk.hello(0), value=1.0)
    desk.hear()
    assert desk.c.snapshots.current is not None
    again = desk.hello(0, start=2)
    desk.settle()
    assert desk.c.initialising and not desk.manifests()
    desk.give(again, value=2.0)
    desk.settle()
    (made,) = desk.manifests()
    assert desk.weights(made) == {2.0} and made.workers["0"]["start"] == 2
    assert again.heard[-2:] == [Kind.WELCOME, Kind.RECORD]


def test_a_shard_that_has_first_values_of_an_earlier_try_is_still_waited_for(tmp_path: Path) -> None:
    """Rank 0 came anew while shard 1 said that it had all of them: that is no word on what it was told since."""
    desk = Desk(tmp_path)
    desk.give(desk.hello(0), value=1.0)
    again = desk.hello(0, start=2)
    desk.give(again, value=2.0, shards=[0])
    desk.hear()
    assert desk.c.snapshots.current is None
    desk.give(again, value=2.0, shards=[1])
    desk.settle()
    desk.tick(later=1.0)  # the shards may still have been at the file of the snapshot that is void
    desk.settle()
    (made,) = desk.manifests()
    assert desk.weights(made) == {2.0} and again.heard[-2:] == [Kind.WELCOME, Kind.RECORD]


class Asking(World):
    """Shards are asked for first values, and answer when a test says so."""

    def __init__(self, term: int) -> None:
        super().__init__(term=term)
        self.setup = -1
        self.post(e.Started())
        self.shard(1, term=term)
        self.stream = self.hello(0)

    def order(self, shard: int, body: Mapping[str, Any]) -> None:
        if body["do"] == "setup":
            self.setup = body["setup"]
        else:
            super().order(shard, body)


def test_values_for_an_earlier_coordinator_are_no_answer_to_this_one() -> None:
    """Shard 1 has all that rank 0 gave to the coordinator before, and is yet to hear that this one asks for it anew."""
    before, world = Asking(1), Asking(2)
    world.post(e.RecordCame(world.stream, -1, b"initial"), messages.Initialised(0, world.setup), messages.Initialised(1, before.setup))
    assert world.c.initialising and not world.sent["snapshot"]
    world.post(messages.Initialised(1, world.setup))
    assert world.c.open


def test_a_failed_restore_that_is_over_sends_nobody_back(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    clerks = desk.begun()
    for clerk in clerks:
        desk.push(clerk, 0)
    desk.coordination.answer(1, {"did": "unrestored", "restore_id": desk.c.restore_id - 1, "why": "of an earlier try"})
    desk.settle()
    assert desk.c.open and desk.versions() == {1} and clerks[0].heard[-1] is Kind.RECORD
