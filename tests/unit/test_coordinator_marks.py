"""Async checkpoints hold every worker's pushes for a moment: only when all can take part, and never for long."""

from __future__ import annotations

from pathlib import Path

from psjob.wire.frame import Header, Kind
from tests.unit.desk import NEVER, Clerk, Desk


def mark(desk: Desk, clerk: Clerk, clock: int) -> None:
    """A worker stands before `clock` and holds its pushes for the cut."""
    cut = desk.c.cutting.cuts.current
    assert cut is not None
    desk.edge(clerk, clock)
    desk.say(clerk, Header(Kind.MARK, clock=clock, request=cut.number), {}, b"")
    for server in desk.servers:
        server.control.mark(clerk.rank, cut.number)


def cut(desk: Desk, clerks: list[Clerk], clocks: list[int]) -> None:
    """Take a checkpoint once each worker has made so many steps; marks hold it in async, else all go on to its step."""
    for number in range(max(clocks)):
        for clerk, clock in zip(clerks, clocks, strict=True):
            if number < clock:
                desk.push(clerk, number)
    desk.begin_cut()
    desk.settle()
    current = desk.c.cutting.cuts.current
    assert current is not None
    for clerk, clock in zip(clerks, clocks, strict=True):
        if current.step is None:
            mark(desk, clerk, clock)
    for number in range(current.step or 0):
        for clerk, clock in zip(clerks, clocks, strict=True):
            if number >= clock:
                desk.push(clerk, number)
                desk.edge(clerk, number + 1)
    desk.settle()
    assert desk.c.cutting.cuts.current is None and desk.manifests()[-1].step > 0


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
    assert desk.c.cutting.cuts.current is None and desk.c.progress.checkpoint_problem is None
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
