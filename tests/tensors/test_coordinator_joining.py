"""A worker that comes, or comes again: never on other weights than the job's, and never turned away forever.

- A running job goes over to another mode: at a checkpoint, with every process, and back to one of the two if anything dies.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from psjob import contract
from psjob.modes import Async, Backup, Bounded, ServedMode, Softsync, Sync, format_mode, of, parse_mode
from psjob.process.config import desired_config, place
from psjob.process.errors import Refused
from psjob.protocol.coordinator import events, recovery
from psjob.protocol.coordinator.ending import following, next_mode
from psjob.protocol.coordinator.membership import rule_difference
from psjob.protocol.shard.events import Phase
from psjob.wire.frame import Header, Kind, WireError
from tests.support.runkeys import key_file
from tests.tensors.desk import NEVER, Clerk, Desk, take_snapshot


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
        with pytest.raises(WireError, match="restore_id of its hello is"):
            desk.hello(1, start=2, fresh=False, restore_id=number)
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
    """Its process had not joined. Shards let in none of its start but with more rewinds, so that it would wait forever."""
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
    desk.begin_snapshot()
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
    old = desk.hello(0, lingers=True, fresh=False, restore_id=before, acked=3, attempt=1)
    desk.servers[1].store.attempt = 2
    desk.relink(1, serving=False)
    desk.settle()
    assert desk.c.open and old.heard == [Kind.REWIND] * 2


@pytest.mark.parametrize(
    ("runs", "wish", "after"),
    [
        (Sync(), Bounded(2), Bounded(2)),
        (Sync(), Async(), Async()),
        (Bounded(2), Sync(), Sync()),
        (Bounded(2), Bounded(5), Bounded(5)),
        (Bounded(2), Async(), Async()),
        (Async(), Bounded(1), Bounded(1)),
        (Async(), Sync(), Bounded(3)),
        (Bounded(2), Bounded(2), None),
        (Sync(), Backup(1), None),
        (Softsync(), Sync(), None),
    ],
)
def test_the_way_to_another_mode(runs: ServedMode, wish: ServedMode, after: ServedMode | None) -> None:
    assert following(runs, wish) == after


@pytest.mark.parametrize("mode", [Sync(), Async(), Bounded(1), Bounded(7)])
def test_a_mode_is_read_as_it_was_written(mode: ServedMode) -> None:
    assert parse_mode(format_mode(mode)) == mode
    for word in ("some", "bounded:many"):
        with pytest.raises(ValueError, match=word.partition(":")[2] or word):
            parse_mode(word)


def again(desk: Desk, rewinds: int, mode: ServedMode | None = None) -> list[Clerk]:
    """All workers say hello as fresh processes that run `mode` (None: the job's)."""
    word = format_mode(desk.c.mode if mode is None else mode)
    clerks = [desk.hello(rank, rewinds=rewinds, mode=word) for rank in desk.c.members.all]
    desk.settle()
    return clerks


def wish(desk: Desk, mode: ServedMode) -> None:
    """The config asks for another mode."""
    desk.coordination.feed(events.ModeWished(mode))


def test_the_manifest_says_which_request_it_answers_to_who_starts_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    clerks = desk.begun()
    desk.coordination.feed(events.ModeWished(Sync(), request=7))
    take_snapshot(desk, clerks, [1, 1])
    assert [made.request for made in desk.manifests()] == [None, 7]
    desk.coordination.feed(events.ModeWished(Sync(), request=8))
    desk = Desk(tmp_path, number=2)
    assert desk.coordination.machine.status(0.0, 0.0)["checkpoint"]["observedRequest"] == 7
    desk.coordination.feed(events.ModeWished(Sync(), request=7))
    assert not desk.c.snapshots.requested, "it is answered"
    desk.coordination.feed(events.ModeWished(Sync(), request=8))
    assert desk.c.snapshots.requested, "shard 0 was lost before the commit"
    take_snapshot(desk, again(desk, 1), [3, 3])
    assert desk.manifests()[-1].request == desk.coordination.machine.status(0.0, 0.0)["checkpoint"]["observedRequest"] == 8


def test_all_go_over_at_a_checkpoint(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    clerks = desk.begun()
    wish(desk, Bounded(2))
    assert desk.c.snapshots.requested and desk.c.mode == Sync(), "not before there is a checkpoint"
    take_snapshot(desk, clerks, [1, 1])
    (step,) = {made.step for made in desk.manifests()} - {0}
    assert [clerk.heard[-1] for clerk in clerks] == [Kind.REWIND] * 2
    assert {server.store.mode for server in desk.servers} == {desk.c.mode} == {Bounded(2)}
    late = again(desk, 1, mode=Sync())
    assert [clerk.heard for clerk in late] == [[Kind.REWIND]] * 2, "they come in the mode that was: once more"
    clerks = again(desk, 2)
    assert [clerk.placed["clock"] for clerk in clerks] == [step] * 2
    for clock in range(step, step + 3):
        desk.push(clerks[0], clock)
    assert {server.store.clocks()[0] for server in desk.servers} == {step + 3}, "one push each, and nobody waits yet"
    assert all(cell.waiters for cell in desk.servers[0].store.cells.values()), "now it does"


def test_from_async_to_sync_nobody_skips_a_batch(tmp_path: Path) -> None:
    desk = Desk(tmp_path, mode="async")
    clerks = desk.begun()
    wish(desk, Sync())
    take_snapshot(desk, clerks, [5, 1])
    assert desk.c.mode == Bounded(3)
    clerks = again(desk, 1)
    assert [clerk.placed["clock"] for clerk in clerks] == [5, 1], "each where it was"
    take_snapshot(desk, clerks, [5, 5])
    assert desk.c.mode == Sync()
    clerks = again(desk, 2)
    step = desk.manifests()[-1].step
    assert step > 5 and [clerk.placed["clock"] for clerk in clerks] == [step] * 2 and desk.versions() == {step}
    for clerk in clerks:
        desk.push(clerk, step)
    weights = {float(cell.state.weights[0]) for server in desk.servers for cell in server.store.cells.values() if cell.state}
    assert weights == {2.0 * step + 1.0} and desk.versions() == {step + 1}
    desk.coordination.feed(events.ModeWished(Sync()))
    assert not desk.c.snapshots.requested, "it is there"


@pytest.mark.parametrize(
    ("was", "asked", "runs"),
    [("sync", "async", Async()), ("bounded", "sync", Sync()), ("async", "sync", Async()), ("async", "bounded", Bounded(3))],
)
def test_a_coordinator_that_starts_again_runs_what_the_checkpoint_allows(tmp_path: Path, was: str, asked: str, runs: ServedMode) -> None:
    """Everything died after the checkpoint, and before anyone had gone over."""
    desk = Desk(tmp_path, mode=was)
    take_snapshot(desk, desk.begun(), [3, 3] if was == "sync" else [4, 2])
    begin = [desk.manifests()[-1].workers[str(rank)]["clock"] for rank in range(2)]
    desk = Desk(tmp_path, mode=asked, number=2)
    assert desk.c.mode == runs and {server.store.mode for server in desk.servers} == {runs}
    assert [clerk.placed["clock"] for clerk in again(desk, 1)] == begin
    assert next_mode(desk.c) == following(runs, desk.c.change.wish)


def test_a_shard_that_still_serves_the_mode_before_goes_over_too(tmp_path: Path) -> None:
    """The coordinator died while all went over, and its successor meets one that had not heard of it."""
    desk = Desk(tmp_path, mode="bounded")
    clerks = desk.begun()
    take_snapshot(desk, clerks, [1, 1])
    desk.servers[1].store.mode = desk.servers[1].control.machine.mode = Async()
    desk.relink(1)
    desk.settle()
    assert desk.c.open and {server.store.mode for server in desk.servers} == {Bounded(3)}
    assert [clerk.heard[-1] for clerk in clerks] == [Kind.REWIND] * 2


def test_a_run_begins_in_one_mode(tmp_path: Path) -> None:
    """The config changed while the pods of a new job came: shard 1 has read the newer one."""
    desk = Desk(tmp_path)
    desk.servers[1].store.mode = desk.servers[1].control.machine.mode = Async()
    clerks = desk.begun()
    assert {server.store.mode for server in desk.servers} == {Sync()}
    desk.push(clerks[0], 0)
    assert desk.versions() == {0}, "it waits for the other one on every shard"


def test_where_workers_step_the_mode_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(tmp_path, update_at="worker")
    desk.begun()
    wish(desk, Bounded(2))
    assert next_mode(desk.c) is None and not desk.c.snapshots.requested
    assert "training.mode bounded:2 is asked for; the job stays sync: the workers' optimizer has no rule on the shards" in caplog.text


@pytest.mark.parametrize(
    ("mode", "asked", "more", "why"),
    [
        ("async", Sync(), {"update_rule": "lr-over-lag"}, "training.updateRule lr-over-lag goes with mode async"),
        ("sync", Async(), {"reduction": "median"}, "training.sync.reduction median goes with mode sync"),
    ],
)
def test_what_goes_with_one_mode_keeps_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str, asked: ServedMode, more: dict[str, str], why: str
) -> None:
    desk = Desk(tmp_path, mode=mode, **more)
    take_snapshot(desk, desk.begun(), [2, 2])
    before = desk.c.mode
    wish(desk, asked)
    assert next_mode(desk.c) is None and not desk.c.snapshots.requested
    assert why in caplog.text
    assert Desk(tmp_path, mode=asked.name, number=2, **more).c.mode == before, "nor when the coordinator starts again"


def test_where_workers_step_the_mode_stays_when_the_coordinator_starts_again(tmp_path: Path) -> None:
    Desk(tmp_path, update_at="worker").begun()
    desk = Desk(tmp_path, update_at="worker", mode="async", number=2)
    assert desk.c.mode == Sync() and {server.store.mode for server in desk.servers} == {Sync()}
    late = again(desk, 1, mode=Async())
    assert [clerk.heard for clerk in late] == [[Kind.REWIND]] * 2
    assert [clerk.placed["clock"] for clerk in again(desk, 2)] == [0, 0]


def test_the_config_is_read_again_where_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = {
        "format": contract.CONFIG_FORMAT, "job": "j", "run": "r", "specHash": "", "mode": "bounded", "staleness": 2, "seed": 0,
        "workers": 1,
        "shards": [{"host": "a", "port": 1, "statusPort": 2}], "checkpoint": {"intervalSeconds": 1, "keep": 2, "disabled": False},
        "successPolicy": "AllWorkers", "shardTimeoutSeconds": 10,
    }  # fmt: skip
    path.write_text(json.dumps(config))
    environ = {
        contract.ENV_ROLE: "worker",
        contract.ENV_INDEX: "0",
        contract.ENV_START: "1",
        contract.ENV_RUN: "r",
        contract.ENV_CONFIG: str(path),
        contract.ENV_KEYS: key_file(tmp_path, "worker", 0),
    }
    here = place(environ)
    told = place({**environ, contract.ENV_MODE: "bounded:5"})
    assert here is not None and told is not None
    assert (of(here.config), of(told.config)) == (Bounded(2), Bounded(5)), "a process that was told a mode runs that"
    with pytest.raises(Refused, match="PSJOB_MODE: "):
        place({**environ, contract.ENV_MODE: "bounded:many"})
    path.write_text(json.dumps({**config, "mode": "async"}))
    found = desired_config(here)
    assert found is not None and of(found) == Async()
    asked = [{**config, "checkpoint": {**config["checkpoint"], "request": request}} for request in (0, -1, 2**53)]
    for text in (json.dumps(config)[:-9], json.dumps({**config, "run": "another"}), *map(json.dumps, asked)):
        path.write_text(text)
        assert desired_config(here) is None
