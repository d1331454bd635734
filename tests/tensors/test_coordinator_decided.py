"""A coordinator that decides which pushes count: snapshots, stops, ends, and whoever is lost on the way."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from psjob.checkpoint.manifest import Manifest, read_records
from psjob.protocol.coordinator.updates import RECORD_SECONDS, WISH_SECONDS, decided_clock, missing
from psjob.resume.record import unpack
from psjob.wire.frame import Kind
from tests.tensors.desk import NEVER, Clerk, Desk

BACKUP: dict[str, Any] = {"workers": 3, "backup_workers": 1}
EVERY_1 = replace(NEVER, every_steps=1)


def decided(desk: Desk, rank: int) -> int:
    assert desk.c.updates is not None
    return decided_clock(desk.c.updates, rank)


def at_version_one(desk: Desk) -> list[Clerk]:
    """Workers 0 and 1 have made the first update and stand before their next step; worker 2 is late."""
    clerks = desk.begun()
    for clerk in clerks:
        desk.edge(clerk, 0)
    for clerk in clerks[:2]:
        desk.push(clerk, 0)
    desk.settle()
    for clerk in clerks[:2]:
        desk.edge(clerk, 1)
    assert desk.versions() == {1}
    return clerks


def clocks(made: Manifest) -> list[int]:
    return [int(made.workers[str(rank)]["clock"]) for rank in range(len(made.workers))]


def kept(desk: Desk, made: Manifest) -> dict[int, int]:
    """The clocks of the records that a manifest holds."""
    return {rank: unpack(raw).step for rank, raw in read_records(desk.folder, made).items()}


def test_a_stop_holds_the_decided_and_waits_for_nobody_who_waits(tmp_path: Path) -> None:
    """Worker 0's next push waits for another; it is made again after the stop, as worker 2's first is."""
    desk = Desk(tmp_path, **BACKUP)
    clerks = at_version_one(desk)
    desk.push(clerks[0], 1, version=1)
    desk.push(clerks[2], 0, shards=[1])
    desk.settle()
    assert missing(desk.c) == [1, 2]
    desk.stop_job()
    desk.tick()
    desk.settle()
    assert [clerk.heard[-2:] for clerk in clerks] == [[Kind.STOP, Kind.STOPPED]] * 3
    made = desk.manifests()[-1]
    assert (made.step, clocks(made), kept(desk, made)) == (1, [1, 1, 0], {0: 1, 1: 1, 2: 0})
    after = Desk(tmp_path, number=2, **BACKUP)
    again = [after.hello(rank, start=2) for rank in range(3)]
    after.settle()
    assert [clerk.placed["clock"] for clerk in again] == [1, 1, 0] and after.versions() == {1}
    after.push(again[2], 0, version=1)
    after.push(again[0], 1, version=1)
    after.settle()
    assert after.versions() == {2} and [decided(after, rank) for rank in range(3)] == [2, 1, 1]


def test_a_snapshot_takes_an_older_record_when_none_comes(tmp_path: Path) -> None:
    """Worker 1 died before its next step's edge: it makes the step before it again, without effect."""
    desk = Desk(tmp_path, checkpoint=EVERY_1, **BACKUP)
    clerks = desk.begun()
    for clerk in clerks:
        desk.edge(clerk, 0)
        desk.push(clerk, 0)
    desk.settle()
    desk.edge(clerks[0], 1)
    desk.edge(clerks[2], 1)
    desk.tick()
    desk.settle()
    assert desk.manifests()[-1].step == 0, "it waits for that record"
    desk.tick(later=RECORD_SECONDS + 1)
    made = desk.manifests()[-1]
    assert (made.step, clocks(made), kept(desk, made)) == (1, [1, 1, 1], {0: 1, 1: 0, 2: 1})
    after = Desk(tmp_path, number=2, **BACKUP)
    again = [after.hello(rank, start=2) for rank in range(3)]
    after.settle()
    assert [(clerk.placed["clock"], clerk.placed["residual"]) for clerk in again] == [(1, True), (1, False), (1, True)]


def test_large_records_are_asked_for_before_a_snapshot(tmp_path: Path) -> None:
    """They do not come at every step."""
    desk = Desk(tmp_path, checkpoint=replace(NEVER, every_steps=2), **BACKUP)
    clerks = desk.begun()
    for clock in range(3):
        for clerk in clerks[:2]:
            desk.push(clerk, clock, version=clock)
        desk.settle()
        desk.tick()
    server = desk.servers[0]
    assert server.job.record_requested and desk.manifests()[-1].step == 0
    for clerk in clerks[:2]:
        desk.edge(clerk, 3)
    desk.tick()
    desk.settle()
    made = desk.manifests()[-1]
    assert (made.step, clocks(made), kept(desk, made)) == (3, [3, 3, 0], {0: 3, 1: 3}) and not server.job.record_requested
    after = Desk(tmp_path, number=2, **BACKUP)
    late = after.hello(2, start=2)
    after.settle()
    assert late.placed["clock"] == 0 and late.placed["record"], "it begins with the run's first buffers"


def test_a_snapshot_waits_for_large_records_only_so_long(tmp_path: Path) -> None:
    desk = Desk(tmp_path, checkpoint=replace(NEVER, every_steps=2), **BACKUP)
    clerks = desk.begun()
    for clock in range(3):
        for clerk in clerks[:2]:
            desk.push(clerk, clock, version=clock)
        desk.settle()
    desk.tick()
    desk.tick(later=WISH_SECONDS + 1)
    desk.settle()
    desk.tick(later=WISH_SECONDS + RECORD_SECONDS + 3)
    assert desk.manifests()[-1].step == 3


def test_a_shard_in_which_an_order_broke_off_sends_all_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the shards told before is void."""
    desk = Desk(tmp_path, **BACKUP)
    clerks = at_version_one(desk)
    before = desk.c.restore_id
    desk.servers[1].control.order({"do": "decide", "number": 9, "version": 1, "batches": [], "go": []})
    desk.servers[1].control.order({"do": "decide", "number": 2, "version": 1, "batches": [], "go": []})
    said = [record.getMessage() for record in caplog.records]
    assert any("order 9 follows on 1" in line for line in said) and any("order 2 follows on 1, which broke off" in line for line in said)
    desk.relink(1)
    desk.settle()
    assert desk.versions() == {0} and [clerk.heard[-1] for clerk in clerks] == [Kind.REWIND] * 3
    for index in range(2):
        desk.coordination.answer(index, {"did": "arrived", "restore_id": before, "push": [0, 0], "base": 0, "carried": 0})
    desk.settle()
    assert missing(desk.c) == [0, 1, 2]
    again = [desk.hello(rank, rewinds=1) for rank in range(3)]
    desk.settle()
    for clerk in again[1:]:
        desk.push(clerk, 0)
    desk.settle()
    assert desk.versions() == {1} and decided(desk, 0) == 0


def test_who_leaves_in_softsync_goes_when_its_pushes_are_decided(tmp_path: Path) -> None:
    desk = Desk(tmp_path, workers=3, mode="softsync")
    clerks = desk.begun()
    for clerk in clerks:
        desk.edge(clerk, 0)
    desk.push(clerks[0], 0)
    desk.settle()
    desk.leave(clerks[0], 1)
    desk.tick(later=1.0)
    assert desk.c.snapshots.current is None and desk.versions() == {0}, "no checkpoint can hold its end"
    desk.push(clerks[1], 0)
    desk.settle()
    assert desk.versions() == {1}
    desk.edge(clerks[1], 1)
    desk.tick(later=1.0)
    desk.settle()
    made = desk.manifests()[-1]
    assert (made.step, clocks(made), made.workers["0"]["leftAt"]) == (1, [1, 1, 0], 1) and clerks[0].heard[-1] is Kind.LEFT


def test_who_comes_back_while_its_last_push_waits_asks_for_no_checkpoint(tmp_path: Path) -> None:
    """Not one could hold its end."""
    desk = Desk(tmp_path, workers=3, mode="softsync")
    clerks = desk.begun()
    desk.push(clerks[0], 0)
    desk.settle()
    desk.leave(clerks[0], 1)
    back = desk.hello(0, start=2)
    desk.settle()
    desk.tick(later=1.0)
    assert desk.c.snapshots.current is None and not desk.c.snapshots.requested
    for clerk in clerks[1:]:
        desk.edge(clerk, 0)
    desk.push(clerks[1], 0)
    desk.settle()
    desk.edge(clerks[1], 1)
    desk.tick(later=1.0)
    desk.settle()
    assert desk.manifests()[-1].workers["0"]["leftAt"] == 1 and back.heard[-1] is Kind.LEFT


def test_the_last_to_leave_end_the_job(tmp_path: Path) -> None:
    """What is pending counts when nobody else can push; each shard's own news of who has left may come later."""
    desk = Desk(tmp_path, workers=3, mode="softsync")
    clerks = desk.begun()
    for clerk in clerks[:2]:
        desk.push(clerk, 0)
    desk.settle()
    for clerk in clerks[:2]:
        desk.leave(clerk, 1, shards=[0])
    desk.leave(clerks[2], 0)
    desk.tick()
    desk.settle()
    made = desk.manifests()[-1]
    assert made.final and clocks(made) == [1, 1, 0] and [clerk.heard[-1] for clerk in clerks] == [Kind.FINISHED] * 3


def test_what_is_waited_for_is_said(tmp_path: Path) -> None:
    desk = Desk(tmp_path, **BACKUP)
    clerks = at_version_one(desk)
    desk.push(clerks[0], 1, version=1)
    desk.push(clerks[1], 1, shards=[0], version=1)
    desk.settle()
    server = desk.servers[0]
    cell = next(iter(server.store.cells.values()))
    waiter = next(iter(cell.waiters))
    assert server.store.awaited(cell, waiter) == ([2], 1)
    assert server.missing([2], 1) == "update 1 waits for pushes of workers [2]"
    desk.push(clerks[2], 0, shards=[0])
    assert server.store.awaited(cell, waiter) == ([], 1)
    assert server.missing([], 1) == "update 1 waits for pushes of workers [1, 2]"


def test_a_worker_that_leaves_while_a_snapshot_is_ordered_does_not_hold_for_it(tmp_path: Path) -> None:
    """The order that follows may move blocks: all are held when the order of the snapshot has been carried out, whoever comes between."""
    desk = Desk(tmp_path, workers=3, mode="softsync")
    desk.begun()
    server = desk.servers[0]
    cells = list(server.store.cells.values())
    leaver = threading.Thread(target=server.control.left, args=(2,))

    def answer(body: dict[str, Any]) -> None:
        if body["did"] == "ready":
            leaver.start()
            leaver.join(0.2)

    server.control.answer = answer
    pins = [cell._pin for cell in cells]
    cells[-1].lock.acquire()
    threading.Timer(0.6, cells[-1].lock.release).start()
    order = {"do": "snapshot", "snapshot": 1 << 20, "step": -1, "marks": False, "base": None, "clocks": [[0, 0], [1, 0], [2, 0]]}
    server.control.order(order)
    held = [cell._pin is not pin for cell, pin in zip(cells, pins, strict=True)]
    leaver.join()
    assert held == [True] * len(cells)


@pytest.mark.parametrize("index", [0, 1])
def test_a_shard_whose_update_breaks_off_is_gone(tmp_path: Path, index: int) -> None:
    """It would hold an update in some of its blocks only, and nobody would be answered."""
    desk = Desk(tmp_path, **BACKUP)
    clerks = desk.begun()
    for cell in desk.servers[index].store.cells.values():
        assert cell.state is not None
        cell.state.weights = torch.zeros(cell.block.length, dtype=torch.int64)
    for clerk in clerks[:2]:
        desk.push(clerk, 0)
    desk.settle()
    assert [server._exit for server in desk.servers] == [[1] if server.place.index == index else [] for server in desk.servers]
