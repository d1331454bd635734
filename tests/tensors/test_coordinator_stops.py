"""A job that is asked to stop, and workers that come while a checkpoint is on its way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from psjob.wire.frame import Kind
from tests.tensors.desk import NEVER, Desk


def test_a_stop_takes_the_checkpoint_that_is_on_its_way(tmp_path: Path) -> None:
    """Workers that stand still would never come to its step: they are told to go on to it, and end there."""
    desk = Desk(tmp_path)
    clerks = desk.begun()
    desk.begin_cut()
    cut = desk.c.cuts.current
    assert cut is not None and cut.step is not None and cut.step > 1
    desk.stop_job()
    desk.tick()
    assert [clerk.heard[-1] for clerk in clerks] == [Kind.STOP] * 2
    for clock in range(cut.step):
        for clerk in clerks:
            desk.push(clerk, clock)
            desk.edge(clerk, clock + 1)
    desk.settle()
    assert desk.manifests()[-1].step == cut.step and desk.c.cuts.number == cut.number
    assert [clerk.heard[-1] for clerk in clerks] == [Kind.STOPPED] * 2


def test_a_stop_waits_for_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    """Everybody has passed it: it ends by itself, and the stop takes one of its own."""
    desk = Desk(tmp_path)
    clerks = desk.begun()
    desk.begin_cut()
    cut = desk.c.cuts.current
    assert cut is not None and cut.step is not None
    for clock in range(cut.step):
        for clerk in clerks:
            desk.push(clerk, clock)
    desk.stop_job()
    desk.tick()
    assert not cut.stop and Kind.STOP not in clerks[0].heard
    for clerk in clerks:
        desk.edge(clerk, cut.step)
    desk.settle()
    desk.tick()
    after = desk.c.cuts.current
    assert desk.manifests()[-1].step == cut.step and after is not None and after.stop


def test_who_comes_while_others_hold_is_asked_for_its_mark(tmp_path: Path) -> None:
    desk = Desk(tmp_path, mode="async")
    clerks = desk.begun()
    desk.tick(later=NEVER.interval_seconds + 1.0)
    desk.settle()
    assert clerks[0].heard[-1] is Kind.MARK
    again = desk.hello(1, start=2)
    desk.settle()
    assert Kind.MARK in again.heard


def test_what_a_dead_worker_lost_with_a_shard_is_counted(tmp_path: Path) -> None:
    """Worker and shard died together: the shard's blocks went back to clock 2 of 5, and nobody but the successor can tell."""
    desk = Desk(tmp_path, mode="async")
    clerks = desk.begun()
    for clock in range(5):
        desk.push(clerks[0], clock)
    desk.servers[0].store.attempt = 2
    table = desk.servers[0].store.admission
    table.load({**table.save(), "0": {"complete": 2, "incarnation": [1, 0]}}, {})
    again = desk.hello(0, start=2)
    desk.settle()
    assert again.placed["clock"] == 5
    assert desk.servers[0].store.counters.lost == 3 and desk.servers[1].store.counters.lost == 0


def test_weights_stored_before_a_restore_do_not_come_after_it(tmp_path: Path) -> None:
    desk = Desk(tmp_path, workers=1, update_at="worker")
    desk.begun()
    store = desk.servers[0].store
    cell = next(iter(store.cells.values()))
    late = torch.full((cell.block.length,), 9.0)
    store.keep(cell, late, 3, store.generation - 1)
    assert cell.stored == 0 and cell.state is not None and not cell.state.weights.any()
    store.keep(cell, late, 3, store.generation)
    assert cell.stored == 3


def test_a_damaged_manifest_that_was_passed_over_is_told(tmp_path: Path) -> None:
    Desk(tmp_path).begun()
    (tmp_path / "run-1" / "manifest-v000001-s000000000009.json").write_text("{")
    desk = Desk(tmp_path, run="run-2", checkpoint=replace(NEVER, resume_from=str(tmp_path / "run-1")))
    assert "s000000000009" in str(desk.c.progress.checkpoint_problem)
