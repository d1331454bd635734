"""Async checkpoints hold every worker's pushes for a moment: only when all can take part, and never for long."""

from __future__ import annotations

from pathlib import Path

import pytest

from psjob.layout.blocks import TensorSpec
from psjob.shard.admission import Verdict
from psjob.wire.frame import Kind
from tests.tensors.desk import NEVER, Desk, mark


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
    assert desk.c.cuts.current is None and desk.c.progress.checkpoint_problem is None
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
    """A worker dies in the middle of a push, and its successor marks a cut before it makes that step. The run goes on with one shard."""
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
    desk.begin_cut()
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
