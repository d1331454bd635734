"""A worker that comes, or comes again: never on other weights than the job's, and never turned away for ever."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from psjob.protocol.coordinator import events, recovery
from psjob.protocol.coordinator.membership import rule_difference
from psjob.protocol.shard.actions import Phase
from psjob.wire.frame import Header, Kind, WireError
from tests.tensors.desk import NEVER, Desk


def at_clock_one(desk: Desk) -> None:
    """Both workers have made a step, and stand before the next one."""
    clerks = desk.begun()
    for clerk in clerks:
        desk.push(clerk, 0)
    for clerk in clerks:
        desk.edge(clerk, 1)
    desk.settle()
    assert desk.versions() == {1}


def test_a_lone_return_goes_on_where_the_job_waits(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    at_clock_one(desk)
    again = desk.hello(1, start=2)
    desk.settle()
    assert again.heard == [Kind.WELCOME, Kind.RECORD] and again.placed["clock"] == 1
    assert desk.coordination._sessions[desk.c.members[0].stream.id].heard[-1] is Kind.RECORD  # type: ignore[attr-defined]


def test_where_workers_step_a_lone_return_sends_all_back_to_the_weights_that_are_stored(tmp_path: Path) -> None:
    """The shards hold the weights of step 0; those of step 1 only the workers have."""
    desk = Desk(tmp_path, update_at="worker")
    at_clock_one(desk)
    other = desk.coordination._sessions[desk.c.members[0].stream.id]
    again = desk.hello(1, start=2)
    desk.settle()
    assert other.heard[-1] is Kind.REWIND and other.done.is_set()  # type: ignore[attr-defined]
    assert desk.versions() == {0} and again.placed["clock"] == 0


def test_where_workers_step_a_lone_return_at_a_stored_step_goes_on(tmp_path: Path) -> None:
    desk = Desk(tmp_path, update_at="worker")
    at_clock_one(desk)
    desk.keep(1)
    again = desk.hello(1, start=2)
    desk.settle()
    assert again.placed["clock"] == 1 and desk.versions() == {1}


def test_a_worker_that_came_before_there_was_a_model_is_asked_for_it_too(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    early = desk.hello(1, table=[{"name": "other", "shape": [1024], "dtype": "float32", "group": 0}])
    assert not early.heard
    desk.give(desk.hello(0))
    desk.settle()
    assert desk.c.open and early.heard[-1] is Kind.ERROR and early.done.is_set()


def test_a_worker_of_another_rule_is_refused(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    at_clock_one(desk)
    again = desk.hello(1, start=2, rule="dana-slim")
    desk.settle()
    assert again.heard == [Kind.ERROR] and again.done.is_set()


def test_a_run_goes_on_from_anothers_checkpoint_with_its_rule(tmp_path: Path) -> None:
    """The shards would take a worker's numbers for those of the rule that the checkpoint has: one with momentum would have it twice."""
    at_clock_one(Desk(tmp_path))
    begin = replace(NEVER, resume_from=str(tmp_path / "run-1"))
    desk = Desk(tmp_path, run="run-2", checkpoint=begin)
    other = desk.hello(0, rule="dana-slim")
    desk.settle()
    assert other.heard == [Kind.ERROR]
    same = desk.hello(0, start=2)
    desk.settle()
    assert Kind.ERROR not in same.heard and same.heard[-1] in (Kind.WELCOME, Kind.RECORD)
    assert rule_difference(0, "sgd", "dana-slim") and not rule_difference(0, "sgd", "sgd")


def test_a_hello_with_numbers_that_none_has_ends_no_coordinator(tmp_path: Path) -> None:
    """JSON knows Infinity; and the memory that a worker of this host asks for is checked before anyone works with it."""
    desk = Desk(tmp_path)
    desk.begun()

    for number in (float("inf"), -1, "1", True):
        with pytest.raises(WireError, match="recovery of its hello is"):
            desk.hello(1, start=2, fresh=False, recovery=number)
    for slots in (0, 65, 1.5, True):
        with pytest.raises(WireError, match=r"takes 1.*64 answers at a time"):
            desk.hello(1, start=3, slots=slots)


def test_a_worker_that_had_not_joined_when_all_shards_were_lost_comes_again(tmp_path: Path) -> None:
    """It is fenced as all others are, but never heard REWIND: its own stream broke with the shards."""
    Desk(tmp_path).begun()
    desk = Desk(tmp_path, number=2)
    for rank in range(2):
        fresh = desk.hello(rank)
        desk.settle()
        assert fresh.heard[-1] is Kind.REWIND and fresh.done.is_set()
        rewound = desk.hello(rank, rewinds=1)
        desk.settle()
        assert rewound.heard == [Kind.WELCOME, Kind.RECORD] and rewound.placed["clock"] == 0


@pytest.mark.parametrize("another", [False, True], ids=["the same coordinator", "another process of it"])
def test_a_worker_that_was_out_of_reach_when_all_went_back_comes_again(tmp_path: Path, another: bool) -> None:
    """Its process had not joined. Shards let in none of its start but with more rewinds, so that it would wait for ever."""
    desk = Desk(tmp_path)
    desk.begun()
    out_of_reach = desk.hello(1, start=2)
    out_of_reach.gone()
    desk.does(lambda state: recovery.rewind_all(state, "a shard was lost"))
    desk.settle()
    assert all(server.store.admission.rows[1].incarnation == (2, 1) for server in desk.servers)
    if another:  # it knows only what shard 0 has in memory
        desk.c.fences = {}
        desk.c.members[1].incarnation = (2, 1)
    again = desk.hello(1, start=2)
    desk.settle()
    assert again.heard == [Kind.REWIND] and again.done.is_set()
    rewound = desk.hello(1, start=2, rewinds=1)
    desk.hello(0, rewinds=1)
    desk.settle()
    assert rewound.heard[0] is Kind.WELCOME


def test_a_run_that_begins_from_another_knows_nothing_of_its_processes(tmp_path: Path) -> None:
    """The other run's workers had been started seven times; this one's first start is not an older process of theirs."""
    desk = Desk(tmp_path)
    clerks = desk.begun(start=7, rewinds=3)
    for clerk in clerks:
        desk.push(clerk, 0)
        desk.edge(clerk, 1)
    desk.begin_cut()
    for clock in (1, 2):
        for clerk in clerks:
            desk.push(clerk, clock)
            desk.edge(clerk, clock + 1)
    desk.settle()
    (begin,) = {made.step for made in desk.manifests()} - {0}
    desk = Desk(tmp_path, run="run-2", checkpoint=replace(NEVER, resume_from=str(desk.folder)))
    again = [desk.hello(rank) for rank in range(2)]
    desk.settle()
    assert [clerk.heard for clerk in again] == [[Kind.WELCOME, Kind.RECORD]] * 2
    assert {clerk.placed["clock"] for clerk in again} == {begin}


def test_a_shard_that_kept_its_blocks_is_not_restored(tmp_path: Path) -> None:
    """Async: shard 1 turns out to serve while its restore is awaited; shard 0, which nobody lost, keeps its updates."""
    desk = Desk(tmp_path, mode="async")
    clerks = desk.begun()
    desk.push(clerks[0], 0)
    desk.servers[1].control.answer = lambda body: None  # the stream breaks under the answer
    desk.relink(1, serving=False)
    desk.settle()
    assert desk.c.phase == "restoring" and desk.servers[1].store.phase is Phase.HELD
    desk.relink(1, serving=True)
    desk.settle()
    assert desk.c.open
    assert {cell.n for cell in desk.servers[0].store.cells.values()} == {1}


@pytest.mark.parametrize("mode", ["sync", "bounded", "softsync"])
def test_what_a_worker_said_before_all_went_back_does_not_count(tmp_path: Path, mode: str) -> None:
    """It had come to its end as a restore was ordered: it makes its steps again, and the others wait for it."""
    desk = Desk(tmp_path, mode=mode)
    clerks = desk.begun()
    desk.does(lambda state: recovery.rewind_all(state, "a shard was lost"))
    desk.edge(clerks[0], 5)
    desk.say(clerks[0], Header(Kind.LEAVE, clock=5), {}, b"")
    desk.settle()
    again = [desk.hello(rank, rewinds=1) for rank in range(2)]
    desk.settle()
    assert [clerk.placed.get("clock") for clerk in again] == [0, 0] and not desk.c.members[0].records.keys() - {0}


def test_a_worker_that_was_told_to_begin_again_is_not_welcomed_as_it_is(tmp_path: Path) -> None:
    """Its stream is still open when the restore is ordered: its clocks would count as taken, and their pushes as duplicates."""
    desk = Desk(tmp_path)
    desk.begun()
    before = desk.c.restore_id
    desk.coordination.feed(events.ShardAnnounced(2))
    old = desk.hello(0, lingers=True, fresh=False, recovery=before, acked=3, attempt=1)
    desk.servers[1].store.attempt = 2
    desk.relink(1, serving=False)
    desk.settle()
    assert desk.c.open and old.heard == [Kind.REWIND] * 2
