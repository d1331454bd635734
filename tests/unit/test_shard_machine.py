"""The control side of a shard as a machine: what it answers, holds, writes, deletes, and when it gives a stream up."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psjob import contract
from psjob.layout.blocks import TensorSpec
from psjob.modes import Async, ServedMode, Sync
from psjob.protocol import messages as o
from psjob.protocol.shard import events as e
from psjob.protocol.shard.events import Phase
from psjob.protocol.shard.machine import FIRST_SECONDS, PROGRESS_SECONDS, SILENCE_SECONDS, CoordinatorLinkState, ShardMachine
from psjob.wire.frame import WireError

WORKERS = 3
SNAPSHOT = {"do": "snapshot", "snapshot": 7, "step": -1, "marks": False, "base": None}
RESTORE = {"do": "restore", "term": 2, "restore_id": 5, "mode": "sync", "folder": "/ckpt", "manifest": "m-1", "fences": {}, "most": {}}
PLACED = o.ShardPosition(4, 4, 2, 4)
WRITTEN = o.SnapshotWritten(0, 7, {"table": {}}, 4, (4, 4, 3))


class Told:
    """A machine and the time; `do` gives what it wants done."""

    def __init__(self, index: int = 0, mode: ServedMode = Sync(), linked: bool = False) -> None:
        self.machine = ShardMachine(index, WORKERS, 1, mode, CoordinatorLinkState("host:1", 60.0) if linked else None)
        self.now = 0.0

    def do(self, *events: e.Event) -> list[e.Action]:
        return [action for event in events for action in self.machine.handle(event, self.now)]

    def order(self, body: dict[str, Any], stream: int | None = None) -> list[e.Action]:
        return self.do(e.Ordered(o.decode_order(body), stream))

    def serving(self) -> Told:
        """After a set-up."""
        mode = "async" if self.machine.mode == Async() else "sync"
        self.order({"do": "setup", "setup": 1, "term": 1, "mode": mode, "rule": "sgd", "table": []})
        self.do(e.AllInitialised())
        self.order({"do": "open", "term": 1, "restore_id": 1})
        return self


def said(actions: Sequence[e.Action]) -> list[str]:
    return [o.encode_message(action.message)["did"] for action in actions if isinstance(action, e.TellCoordinator)]


def kinds(actions: Sequence[e.Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


# -- snapshots -------------------------------------------------------------------------------------------


def test_a_snapshot_is_held_then_written_and_both_are_told() -> None:
    told = Told().serving()
    assert kinds(told.order(SNAPSHOT)) == ["AskRecords", "TellCoordinator", "HoldBlocks"]
    assert told.do(e.Armed(7)) == []
    held = told.do(e.Held(7))
    assert said(held) == ["held"] and kinds(held) == ["TellCoordinator", "Release", "Write"]
    assert said(told.do(WRITTEN)) == ["written"]


def test_a_snapshot_at_a_step_is_ready_when_it_is_armed_even_if_it_was_held_first() -> None:
    for first, then in ((e.Armed(7), e.Held(7)), (e.Held(7), e.Armed(7))):
        told = Told().serving()
        assert said(told.order(SNAPSHOT | {"step": 4})) == []
        assert said(told.do(first, then)) == ["ready", "held"]


def test_a_snapshot_of_decided_pushes_is_late_while_the_files_of_another_are_given_up() -> None:
    told = Told().serving()
    told.order(SNAPSHOT)
    told.do(e.Held(7))
    told.do(e.Ordered(o.Void(7)))
    clocks = [[rank, 4] for rank in range(WORKERS)]
    later = told.order(SNAPSHOT | {"snapshot": 8, "clocks": clocks})
    assert said(later) == ["late"] and "HoldBlocks" not in kinds(later)
    assert "HoldBlocks" not in kinds(told.do(e.GaveUp(7))), "by then its blocks have moved on"
    assert "HoldBlocks" in kinds(told.order(SNAPSHOT | {"snapshot": 9, "clocks": clocks}))


def test_a_snapshot_with_marks_waits_for_every_live_worker() -> None:
    told = Told(mode=Async()).serving()
    assert said(told.order(SNAPSHOT | {"marks": True})) == ["ready"]
    assert told.do(e.Marked(0, 7), e.Marked(0, 7), e.Marked(1, 6)) == [e.Release(6)], "of another snapshot: released at once"
    assert told.do(e.Marked(1, 7)) == []
    assert told.do(e.Left(2)) == [e.HoldBlocks(7, -1, None, None)]
    assert told.do(e.Marked(2, 7)) == [e.Release(7)], "it is held: nobody waits"


def test_a_worker_that_the_coordinator_knows_to_have_left_is_not_waited_for() -> None:
    told = Told(mode=Async()).serving()
    acts = told.order(SNAPSHOT | {"marks": True, "left": {"0": 3, "1": 4, "2": 5}})
    assert [act for act in acts if isinstance(act, e.NoteLeft)] == [e.NoteLeft(0, 3), e.NoteLeft(1, 4), e.NoteLeft(2, 5)]
    assert isinstance(acts[-1], e.HoldBlocks)


def test_one_writer_at_a_time_even_when_its_snapshot_is_void() -> None:
    told = Told().serving()
    told.order(SNAPSHOT)
    told.do(e.Held(7))
    assert kinds(told.order({"do": "void", "snapshot": 7})) == ["AskRecords", "GiveUp", "Release", "Discard"]
    assert told.order(SNAPSHOT | {"snapshot": 8}) == [], "it waits for the disk"
    assert said(told.do(e.Tick())) == ["progress"], "and is not silent meanwhile"
    told.order({"do": "void", "snapshot": 8})
    assert told.order(SNAPSHOT | {"snapshot": 9}) == []
    acts = told.do(e.GaveUp(7))
    assert said(acts) == ["ready"] and kinds(acts)[-1] == "HoldBlocks"
    assert said(told.do(o.SnapshotVoided(0, 7))) == ["voided"]


@pytest.mark.parametrize("written", [True, False])
def test_a_void_snapshot_is_deleted_whatever_came_of_it(written: bool) -> None:
    told = Told().serving()
    told.order(SNAPSHOT)
    told.do(e.Held(7), WRITTEN if written else e.Failed(7, "no room", full=True))
    assert e.Discard(7) in told.order({"do": "void", "snapshot": 7})
    assert told.do(WRITTEN) == [], "a writer that was done before it heard"


def test_what_was_written_and_never_committed_is_deleted_when_a_later_manifest_is_known() -> None:
    told = Told().serving()
    for snapshot in (7, 8, 9):
        told.order(SNAPSHOT | {"snapshot": snapshot})
        told.do(e.Held(snapshot), replace(WRITTEN, snapshot=snapshot))
        if snapshot == 8:
            assert e.Discard(8) in told.order(SNAPSHOT | {"snapshot": 9, "base": 7}) and told.machine.snapshots.current is not None
    assert not [act for act in told.order(SNAPSHOT | {"snapshot": 10}) if isinstance(act, e.Discard)], "without a base nothing is known"


def test_a_shard_that_is_beyond_the_step_says_so_and_keeps_nothing() -> None:
    told = Told().serving()
    told.order(SNAPSHOT | {"step": 4})
    late = told.do(e.TooLate(7, 6))
    assert said(late) == ["late"] and e.GiveUp(7) in late and e.AskRecords(-1) in late
    assert told.machine.snapshots.current is None


def test_a_full_disk_is_told() -> None:
    told = Told().serving()
    told.order(SNAPSHOT)
    told.do(e.Held(7))
    (answer,) = [act for act in told.do(e.Failed(7, "no room", full=True)) if isinstance(act, e.TellCoordinator)]
    assert answer == e.TellCoordinator(o.SnapshotUnwritten(0, 7, "no room", True))


def test_progress_is_told_once_a_second_also_when_nothing_moves() -> None:
    told = Told().serving()
    told.order(SNAPSHOT)
    assert told.do(e.Tick()) == []
    told.do(e.Held(7))
    bodies = []
    for tick in range(40):
        told.now = 10 + tick * 0.25
        bodies += [act.message for act in told.do(e.Tick(100, 300)) if isinstance(act, e.TellCoordinator)]
    assert bodies == [o.BytesMoved(0, "writing", 7, 100, 300)] * 10
    told.do(WRITTEN)
    told.now += PROGRESS_SECONDS
    assert told.do(e.Tick()) == []


# -- restoring -------------------------------------------------------------------------------------------------------------------------


def test_a_restore_is_read_and_its_standing_told() -> None:
    told = Told().serving()
    acts = told.order(RESTORE)
    assert kinds(acts) == ["Reset", "DropSessions", "Read"] and acts[1] == e.DropSessions(True)
    assert said(told.do(e.Tick(5, 9))) == ["progress"]
    (_, answer) = told.do(e.Placed(1, PLACED, (4, 4, 3), frozenset({2})))
    assert isinstance(answer, e.TellCoordinator)
    assert answer == e.TellCoordinator(o.ShardRestored(0, 5, PLACED, (4, 4, 3)))
    assert told.machine.snapshots.live == {0, 1}
    assert kinds(told.order({"do": "open", "term": 2, "restore_id": 5})) == ["Serve"]


def test_a_restore_of_the_same_manifest_goes_on_reading_and_answers_the_newer_recovery() -> None:
    """A stream that blinks costs no second reading, which may take hours."""
    told = Told().serving()
    told.order(RESTORE)
    assert "Read" not in kinds(told.order(RESTORE | {"restore_id": 6, "fences": {"1": [2, 0]}}))
    fences, answer = told.do(e.Placed(1, PLACED, (4, 4, 4)))
    assert fences == e.SetFences({1: (2, 0)}, {}) and answer == e.TellCoordinator(o.ShardRestored(0, 6, PLACED, (4, 4, 4)))
    again = told.order(RESTORE | {"restore_id": 7})
    assert "Read" not in kinds(again) and said(again) == ["restored"] and told.machine.phase is Phase.HELD
    told.order({"do": "open", "term": 2, "restore_id": 7})
    assert "Read" in kinds(told.order(RESTORE | {"restore_id": 8})), "it has served since"


def test_a_reading_that_was_given_up_counts_for_nothing() -> None:
    told = Told().serving()
    told.order(RESTORE)
    told.order(RESTORE | {"manifest": "m-2", "restore_id": 6})
    assert told.do(e.Placed(1, PLACED, (4, 4, 4))) == [] and told.do(e.Unread(1, "gone")) == []
    assert said(told.do(e.Unread(2, "gone"))) == ["unrestored"]


def test_a_snapshot_ends_where_a_restore_begins() -> None:
    told = Told().serving()
    told.order(SNAPSHOT)
    told.do(e.Held(7))
    acts = told.order(RESTORE)
    assert e.GiveUp(7) in acts and e.Discard(7) in acts and acts.index(e.Discard(7)) < kinds(acts).index("Read")


def test_nothing_is_served_without_blocks() -> None:
    told = Told().serving()
    told.order(RESTORE)
    assert kinds(told.order({"do": "open", "term": 2, "restore_id": 5})) == ["Log"]
    assert told.order({"do": "decide", "number": 1, "version": 0, "batches": [], "go": []}) == []


# -- the link --------------------------------------------------------------------------------------------------------------------------


def linked() -> Told:
    told = Told(index=1, linked=True).serving()
    assert told.do(e.Begin()) == [e.DialCoordinator(0.0)]
    return told


def test_hello_says_how_the_shard_is_and_a_snapshot_in_flight_is_given_up() -> None:
    told = linked()
    hello = told.do(e.Connected(1, 0))[0]
    assert hello == e.Hello(1, True, 1, 1, "sync", 0)
    told.order(SNAPSHOT, 1)
    told.do(e.Held(7), e.Lost(1))
    assert told.machine.snapshots.current is not None, "the coordinator may not know yet"
    assert said(told.do(WRITTEN)) == [], "there is no stream"
    told.order(SNAPSHOT | {"snapshot": 8}, 1)
    acts = told.do(e.Connected(2, 0))
    assert kinds(acts)[:2] == ["Hello", "TellArrivals"]


def test_a_wish_to_stop_is_said_again_on_a_new_stream() -> None:
    told = linked()
    told.do(e.Connected(1))
    assert said(told.do(e.Terminated())) == ["stopping"]
    told.do(e.Lost(1))
    assert said(told.do(e.Connected(2))) == ["stopping"]
    told.now = 30.0
    assert e.ExitProcess(contract.EXIT_RETRY) in told.do(e.Tick())


def test_orders_of_a_stream_that_was_given_up_are_left() -> None:
    told = linked()
    told.do(e.Connected(1), e.Lost(1), e.Connected(2))
    assert told.order({"do": "stop"}, 1) == []
    assert told.order({"do": "stop"}, 2) == [e.ExitProcess(contract.EXIT_RETRY)]


def test_a_silent_coordinator_is_dialled_anew() -> None:
    told = linked()
    told.do(e.Connected(1))
    told.now = FIRST_SECONDS - 1
    assert told.do(e.Tick()) == []
    told.order({"do": "nothing"}, 1)
    told.now += SILENCE_SECONDS
    assert told.do(e.Tick()) == []
    told.now += 0.1
    assert kinds(told.do(e.Tick())) == ["CloseStream", "Log", "DialCoordinator"]
    assert told.do(e.Lost(1)) == [], "it was hung up on"


def test_a_coordinator_that_was_never_met_is_looked_for_only_so_long() -> None:
    told = linked()
    told.now = 59.0
    assert kinds(told.do(e.Unreached())) == ["DialCoordinator"]
    told.now = 61.0
    (end,) = told.do(e.Unreached())
    assert isinstance(end, e.ExitProcess) and end.code == contract.EXIT_RETRY and "host:1 was not found in 60 s" in end.text
    told = linked()
    told.do(e.Connected(1))
    told.order({"do": "nothing"}, 1)
    told.now = 1e6
    assert e.ExitProcess not in [type(act) for act in told.do(e.Lost(1), e.Unreached())]


def test_an_order_that_does_not_fit_ends_the_stream_and_in_shard_0_the_process() -> None:
    told = linked()
    told.do(e.Connected(1))
    assert kinds(told.do(e.Misfit("order 9 follows on 1"))) == ["CloseStream", "Log", "DialCoordinator"]
    assert Told().serving().do(e.Misfit("order 9 follows on 1")) == [e.ExitProcess(1, "order 9 follows on 1")]


# -- the border ------------------------------------------------------------------------------------------------------------------------

BODIES = [
    SNAPSHOT, RESTORE, {"do": "setup", "setup": 1, "term": 1, "mode": "sync", "rule": "sgd", "table": [
        {"name": "w", "shape": [2], "dtype": "float32", "group": 0}]},
    {"do": "open", "term": 1, "restore_id": 1}, {"do": "adopt", "term": 1}, {"do": "prepare", "number": 1, "base": None},
    {"do": "void", "snapshot": 1}, {"do": "where", "ask": 1, "ranks": [0]}, {"do": "fenced", "term": 3},
    {"do": "decide", "number": 1, "version": 0,
     "batches": [{"kept": [[0, 0]], "dropped": [], "weights": None, "staleness": 0}], "go": [[0, 1]]},
]  # fmt: skip
VALUES = st.sampled_from([None, -1, "x", [], {}, 1.5, True, [[1]], {"0": None}, 2**70])


@given(st.sampled_from(BODIES), st.data())
def test_an_order_that_is_not_in_shape_is_refused_and_never_breaks_the_machine(body: dict[str, Any], data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(set(body) - {"do"})))
    broken = {name: value for name, value in body.items() if name != key}
    if data.draw(st.booleans()):
        broken[key] = data.draw(VALUES)
    order: o.Order = o.Nothing()
    with contextlib.suppress(WireError):
        order = o.decode_order(broken)
    if not isinstance(order, (o.SetUp, o.Restore)):  # whose mode may be one that nobody can change to
        Told().serving().do(e.Ordered(order))


@pytest.mark.parametrize("body", BODIES, ids=[str(body["do"]) for body in BODIES])
def test_an_order_without_its_fields_is_refused_by_name(body: dict[str, Any]) -> None:
    with pytest.raises(WireError, match=f"order {body['do']} is not in shape"):
        o.decode_order({"do": body["do"]})


@pytest.mark.parametrize(
    "order",
    [
        o.Nothing(), o.SetUp(3, (TensorSpec("w", (2, 3), "float32", 1),), "sgd", 2, "sync", ({"name": "rows"},)), o.Void(7),
        o.Restore(2, 5, "/ckpt", "m-1", "bounded:2", {1: (2, 0)}, {0: 4}), o.Bound({1: 7}), o.Open(2, 5), o.Adopt(2), o.Clip(5, 2, 0.5),
        o.Prepare(7, None), o.Prepare(7, 6), o.TakeSnapshot(7, 12, False, 6, left={1: 9}), o.TakeSnapshot(8, -1, True, None, {0: 3, 1: 4}),
        o.Where(1, (0, 2)), o.Finish(), o.Stop(), o.Fence(3), o.Decide(3, 7, (o.Decision([(0, 1)], [(1, 0)], [0.5], 2),), {0: 1}),
    ],
    ids=lambda order: type(order).__name__,
)  # fmt: skip
def test_an_order_comes_as_it_was_sent(order: o.Order) -> None:
    assert o.decode_order(json.loads(json.dumps(o.encode_order(order)))) == order


def test_an_order_of_a_newer_version_is_left_with_a_line() -> None:
    assert kinds(Told().order({"do": "dance"})) == ["Log"]


WORDS = ("snapshot", "held", "wrote", "failed", "gave-up", "void", "armed", "late", "restore", "placed", "open")


@given(st.lists(st.sampled_from(WORDS), max_size=40))
def test_whatever_happens_at_most_one_snapshot_is_written_and_none_is_answered_twice(words: list[str]) -> None:
    told = Told().serving()
    snapshot, reading = 7, 0
    writers: set[int] = set()
    ends: dict[int, int] = {}
    for word in words:
        snapshot += word == "snapshot"
        event: e.Event = {
            "snapshot": e.Ordered(o.decode_order(SNAPSHOT | {"snapshot": snapshot, "step": snapshot % 2 * 5 - 1})),
            "held": e.Held(snapshot), "wrote": replace(WRITTEN, snapshot=snapshot),
            "failed": e.Failed(snapshot, "why"), "gave-up": e.GaveUp(snapshot), "void": e.Ordered(o.Void(snapshot)),
            "armed": e.Armed(snapshot), "late": e.TooLate(snapshot, 9), "restore": e.Ordered(o.decode_order(RESTORE)),
            "placed": e.Placed(reading, PLACED, (0, 0, 0)),
            "open": e.Ordered(o.Open(2, 5)),
        }[word]  # fmt: skip
        if word in ("wrote", "failed", "gave-up"):
            writers.discard(snapshot)
        for act in told.do(event):
            if isinstance(act, e.Write):
                assert not writers, "two writers"
                writers.add(act.snapshot)
            if isinstance(act, e.Read):
                reading = act.reading
            if isinstance(act, e.TellCoordinator) and isinstance(act.message, o.SnapshotWritten | o.SnapshotUnwritten | o.SnapshotLate):
                ends[act.message.snapshot] = ends.get(act.message.snapshot, 0) + 1
        assert all(count == 1 for count in ends.values()), (words, ends)
