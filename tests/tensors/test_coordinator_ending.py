"""The last checkpoint: which step it is, whose weights it holds, and when a failed one is tried again.

- A job that is asked to stop, and workers that come while a checkpoint is on its way.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from psjob import contract
from psjob.process.errors import LONGEST_MESSAGE
from psjob.protocol.coordinator.ending import COMPANY_SECONDS, FINISHED_SECONDS, LINGER_SECONDS, TOLD_SECONDS
from psjob.shard.status_server import last_words as leave_last_words
from psjob.wire.frame import Kind
from tests.tensors.desk import NEVER, Clerk, Desk, in_the_way


def half_left(folder: Path) -> tuple[Desk, Clerk]:
    """The one worker steps by itself and leaves after a step; shard 1 has neither heard so nor got the weights."""
    desk = Desk(folder, workers=1, update_at="worker")
    (clerk,) = desk.begun()
    desk.push(clerk, 0)
    desk.keep(1, shards=[0])
    desk.leave(clerk, 1, shards=[0])
    desk.tick()
    return desk, clerk


def test_the_last_checkpoint_is_of_the_newest_step(tmp_path: Path) -> None:
    """Async workers end at clocks of their own, and the manifest that readers take is that of the highest step."""
    desk = Desk(tmp_path, mode="async")
    clerks = desk.begun()
    for clerk, end in zip(clerks, (3, 5), strict=True):
        for clock in range(end):
            desk.push(clerk, clock)
        desk.leave(clerk, end)
    desk.tick()
    desk.settle()
    last = desk.manifests()[-1]
    assert last.final and last.step == 5 and desk.weights(last) == {8.0}
    assert [clerk.heard[-1] for clerk in clerks] == [Kind.FINISHED] * 2


def test_where_workers_step_the_job_ends_with_rank_0_though_others_go_on(tmp_path: Path) -> None:
    desk = Desk(tmp_path, update_at="worker", policy="FirstWorker")
    clerks = desk.begun()
    for clock in (0, 1):
        for clerk in clerks:
            desk.push(clerk, clock)
    desk.keep(2)
    desk.leave(clerks[0], 2)
    desk.push(clerks[1], 2)
    desk.tick(later=1.0)
    for clock in (3, 4, 5, 6):
        desk.push(clerks[1], clock)
    desk.settle()
    last = desk.manifests()[-1]
    assert last.final and desk.weights(last) == {2.0}
    assert clerks[1].heard[-1] is Kind.FINISHED and desk.c.ending.over


def test_where_workers_step_the_last_checkpoint_waits_for_the_weights_on_every_shard(tmp_path: Path) -> None:
    """Rank 0's streams are several: the coordinator knows that it has left before shard 1 has its last weights."""
    desk, clerk = half_left(tmp_path)
    desk.settle()
    assert not desk.c.ending.over
    desk.keep(1, shards=[1])
    desk.settle()
    last = desk.manifests()[-1]
    assert last.final and desk.weights(last) == {1.0} and clerk.heard[-1] is Kind.FINISHED


def test_every_shard_knows_in_a_checkpoint_who_has_left(tmp_path: Path) -> None:
    """Worker 1's LEAVE to shard 1 is late; a checkpoint that only half knows of it would not let the worker go."""
    desk = Desk(tmp_path)
    clerks = desk.begun()
    for clerk in clerks:
        desk.push(clerk, 0)
    desk.leave(clerks[1], 1, shards=[0])
    desk.tick(later=1.0)
    for clock in range(1, 5):
        desk.push(clerks[0], clock)
        desk.edge(clerks[0], clock + 1)
    desk.settle()
    last = desk.manifests()[-1]
    assert last.step > 1 and last.workers["1"]["leftAt"] == 1 and clerks[1].heard[-1] is Kind.LEFT


def test_where_workers_step_a_rank_0_killed_while_it_left_sends_all_back(tmp_path: Path) -> None:
    """Its last weights came only to shard 0; without them on all shards the job would wait forever."""
    desk, _ = half_left(tmp_path)
    again = desk.hello(0, start=2)
    desk.settle()
    assert again.heard == [Kind.WELCOME, Kind.RECORD] and again.placed["clock"] == 0 and desk.versions() == {0}


def test_where_workers_step_a_rank_0_killed_after_it_left_is_not_missed(tmp_path: Path) -> None:
    desk = Desk(tmp_path, workers=1, update_at="worker")
    (clerk,) = desk.begun()
    desk.push(clerk, 0)
    desk.keep(1)
    desk.leave(clerk, 1)
    again = desk.hello(0, start=2)
    desk.settle()
    assert desk.versions() == {1}
    desk.tick()
    desk.settle()
    assert again.heard == [Kind.FINISHED] and desk.weights(desk.manifests()[-1]) == {1.0}


@pytest.mark.parametrize("stop", [False, True], ids=["the last one", "that of a stop"])
def test_a_failed_checkpoint_at_the_end_waits_before_it_is_tried_again(tmp_path: Path, stop: bool) -> None:
    desk = Desk(tmp_path, workers=1)
    (clerk,) = desk.begun()
    desk.push(clerk, 0)
    in_the_way(desk, 1)
    if stop:
        desk.stop_job()
    else:
        desk.leave(clerk, 1)
    desk.tick()
    for clock in (1, 2) if stop else ():
        desk.push(clerk, clock)
        desk.edge(clerk, clock + 1)
    desk.settle()
    tried = desk.c.snapshots.number
    assert desk.c.snapshots.current is None and desk.c.progress.checkpoint_problem
    desk.tick()
    assert desk.c.snapshots.number == tried and not desk.c.ending.over, "not at once"
    desk.tick(later=6.0)
    if stop:
        assert desk.c.snapshots.current is not None and desk.c.snapshots.current.stop
    else:
        desk.settle()
        assert desk.manifests()[-1].final and clerk.heard[-1] is Kind.FINISHED
    assert desk.c.snapshots.number == tried + 1


def test_a_checkpoint_that_lost_something_on_the_way_is_given_up_and_tried_again(tmp_path: Path) -> None:
    """Worker 1's record of the step never came, and it hands in one of a later step."""
    desk = Desk(tmp_path)
    clerks = desk.begun()
    desk.begin_snapshot()
    for clock in range(4):
        for clerk in clerks:
            desk.push(clerk, clock)
            if clerk.rank == 0:
                desk.edge(clerk, clock + 1)
    desk.settle()
    snapshot = desk.c.snapshots.current
    assert snapshot is not None and len(snapshot.written) == 2 and desk.c.progress.step > (snapshot.step or 0)
    desk.tick(later=1000.0)
    assert desk.c.snapshots.current is snapshot, "a record may take long on its way"
    assert "waits for the records of workers [1]" in str(desk.c.progress.checkpoint_problem)
    desk.edge(clerks[1], 4)
    desk.settle()
    assert desk.c.snapshots.current is None and "worker 1 went beyond step" in str(desk.c.progress.checkpoint_problem)
    assert not list(desk.folder.glob(f"v*-c{snapshot.number:06d}-*")), "the shards have deleted what they wrote of it"
    desk.tick(later=6.0)
    assert desk.c.snapshots.current is not None and desk.c.snapshots.current.number == snapshot.number + 1


def test_the_last_words_of_many_workers_fit(tmp_path: Path, last_words: Path) -> None:
    """Acknowledged clocks and reported numbers are as many as there are; the step and the checkpoint are told all the same."""
    desk = Desk(tmp_path, workers=400)
    desk.c.progress.report(0, {f"metric-{number}": 1.0 for number in range(200)})
    leave_last_words(desk.servers[0])
    told = json.loads(last_words.read_text())
    assert len(last_words.read_bytes()) <= LONGEST_MESSAGE
    assert told["status"]["coordinator"]["step"] == 0 and told["status"]["counters"]["pushes"] == 0 and "met" in told


def finished(folder: Path) -> Desk:
    """A run of three workers that have made a step each and left."""
    desk = Desk(folder, workers=3)
    for clerk in desk.begun():
        desk.push(clerk, 0)
        desk.leave(clerk, 1)
    desk.tick(1.0)
    desk.settle()
    return desk


def test_a_shard_0_that_comes_back_to_a_finished_run_tells_whoever_comes_and_goes_soon_after(tmp_path: Path) -> None:
    desk = finished(tmp_path)
    assert desk.manifests()[-1].final and desk.c.members.met() == "1:0-2"
    back = Desk(tmp_path, workers=3, number=2)
    assert back.c.members.met() == "1:0-2", "who was met before is in the manifest"
    back.tick(later=FINISHED_SECONDS - 2)
    assert not back.servers[0]._exit
    clerk = back.hello(1, start=2)
    assert clerk.heard == [Kind.FINISHED] and back.c.members.met() == "1:0,2 2:1"
    clerk.gone()
    back.hear()
    back.tick(later=COMPANY_SECONDS - 1)
    assert not back.servers[0]._exit, "another one may be on its way"
    back.tick(later=2.0)
    assert back.servers[0]._exit == [contract.EXIT_DONE]


def test_a_worker_that_comes_again_and_again_does_not_keep_a_finished_run(tmp_path: Path) -> None:
    desk = finished(tmp_path)
    desk.tick(later=LINGER_SECONDS + TOLD_SECONDS - 2)
    for _ in range(8):
        desk.hello(1)
        desk.tick(later=COMPANY_SECONDS / 4)
    assert desk.servers[0]._exit == [contract.EXIT_DONE]


def test_a_stop_takes_the_checkpoint_that_is_on_its_way(tmp_path: Path) -> None:
    """Workers that stand still would never come to its step: they are told to continue to it, and end there."""
    desk = Desk(tmp_path)
    clerks = desk.begun()
    desk.begin_snapshot()
    snapshot = desk.c.snapshots.current
    assert snapshot is not None and snapshot.step is not None and snapshot.step > 1
    desk.stop_job()
    desk.tick()
    assert [clerk.heard[-1] for clerk in clerks] == [Kind.STOP] * 2
    for clock in range(snapshot.step):
        for clerk in clerks:
            desk.push(clerk, clock)
            desk.edge(clerk, clock + 1)
    desk.settle()
    assert desk.manifests()[-1].step == snapshot.step and desk.c.snapshots.number == snapshot.number
    assert [clerk.heard[-1] for clerk in clerks] == [Kind.STOPPED] * 2


def test_a_stop_waits_for_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    """Everybody has passed it: it ends by itself, and the stop takes one of its own."""
    desk = Desk(tmp_path)
    clerks = desk.begun()
    desk.begin_snapshot()
    snapshot = desk.c.snapshots.current
    assert snapshot is not None and snapshot.step is not None
    for clock in range(snapshot.step):
        for clerk in clerks:
            desk.push(clerk, clock)
    desk.stop_job()
    desk.tick()
    assert not snapshot.stop and Kind.STOP not in clerks[0].heard
    for clerk in clerks:
        desk.edge(clerk, snapshot.step)
    desk.settle()
    desk.tick()
    after = desk.c.snapshots.current
    assert desk.manifests()[-1].step == snapshot.step and after is not None and after.stop


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
    store.keep(cell, late, 3, store.restored_by - 1)
    assert cell.stored == 0 and cell.state is not None and not cell.state.weights.any()
    store.keep(cell, late, 3, store.restored_by)
    assert cell.stored == 3


def test_a_damaged_manifest_that_was_passed_over_is_told(tmp_path: Path) -> None:
    Desk(tmp_path).begun()
    (tmp_path / "run-1" / "manifest-v000001-s000000000009.json").write_text("{")
    desk = Desk(tmp_path, run="run-2", checkpoint=replace(NEVER, resume_from=str(tmp_path / "run-1")))
    assert "s000000000009" in str(desk.c.progress.checkpoint_problem)
