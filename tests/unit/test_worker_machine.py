"""What a worker's session decides: whom it looks for, what it says again, when it may step, how it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from psjob.modes import Async, ServedMode, Sync
from psjob.protocol.records import PIECE, RecordId
from psjob.protocol.worker import events as e
from psjob.protocol.worker.events import Action
from psjob.protocol.worker.machine import STOP_SECONDS, WorkerEnding, WorkerMachine, newest_attempt
from psjob.wire.frame import Flag, Header, Kind, WireError

CONNECT = 600.0


def machine(shards: int = 2, mode: ServedMode | None = None, reduces: bool = False) -> WorkerMachine:
    return WorkerMachine(1, mode or Sync(), reduces, [f"shard-{index}:7000" for index in range(shards)], CONNECT)


def welcome(link: int, attempt: int = 1, **fields: Any) -> e.Welcomed:
    return e.Welcomed(link, attempt, 1, **{"serving": True, **fields})


def joined(shards: int = 2, mode: ServedMode | None = None, reduces: bool = False, clock: int = 3) -> WorkerMachine:
    made = machine(shards, mode, reduces)
    made.handle(e.JoinAsked(), 0.0)
    for link in range(shards):
        made.handle(welcome(link, clock=clock), 0.0)
    return made


def of(actions: Sequence[Action], kind: type[Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def sent(actions: Sequence[Action]) -> list[tuple[int, Kind]]:
    return [(action.link, action.kind) for action in of(actions, e.Send)]


def push(block: int, clock: int, kind: Kind = Kind.PUSH) -> Header:
    return Header(kind, block=block, clock=clock, info=1)


# -- finding and joining -------------------------------------------------------------------------------


@pytest.mark.parametrize("over", [e.TurnOver("finished"), e.TurnOver("left"), e.WorkerRefused("fenced", "why"), e.Rewound("")])
def test_nobody_is_dialled_once_the_turn_is_over(over: e.Event) -> None:
    m = joined()
    m.handle(over, 1.0)
    assert m.handle(e.ShardStreamEnded(0), 2.0) == [] == m.handle(e.NotFound(1), 2.0)


def test_shard_0_is_looked_for_first_and_the_others_once_the_worker_has_joined() -> None:
    m = machine(3)
    assert m.handle(e.JoinAsked(), 0.0) == [e.DialShard(0)]
    assert m.handle(e.NotFound(0), 5.0) == [e.DialShard(0, 0.1)]
    assert of(m.handle(welcome(0, clock=4), 6.0), e.DialShard) == [e.DialShard(1), e.DialShard(2)]
    assert m.joined and m.clock == 4 and not m.welcomed


def test_a_record_is_waited_for_before_the_worker_has_joined() -> None:
    m = machine()
    m.handle(e.JoinAsked(), 0.0)
    assert not of(m.handle(welcome(0, clock=4, record=True), 0.0), e.DialShard) and not m.joined
    assert m.handle(e.RecordReturned(4, b"record"), 1.0) == [e.DialShard(1)]
    assert m.joined and (m.record, m.initial) == (b"record", None)


def test_rank_0_gives_the_first_values_and_counts_who_asks_anew() -> None:
    m = machine()
    m.handle(e.JoinAsked(), 0.0)
    assert of(m.handle(welcome(0, init=True, serving=False), 0.0), e.DialShard) == [e.DialShard(1)]
    assert m.initialising and m.hello(1)["init"]
    m.handle(welcome(1, init=True, serving=False), 0.0)
    assert m.init == 2
    assert m.handle(e.FirstValues(b"x"), 1.0) == [e.SendRecord(-1, b"x", (0, 0))]
    m.handle(e.RecordReturned(-1, b"x"), 2.0)
    assert m.joined and m.initial == b"x" and not m.initialising


def test_a_shard_that_was_never_found_ends_the_turn_and_one_that_was_does_not() -> None:
    m = machine()
    m.handle(e.JoinAsked(), 0.0)
    assert m.handle(e.NotFound(0), CONNECT + 1) == []
    assert m.ending == WorkerEnding("lost", "shard 0 at shard-0:7000 was not found in 600 s; starting again")
    known = joined()
    known.handle(e.ShardStreamEnded(1), 1.0)
    assert known.handle(e.NotFound(1), 10 * CONNECT) == [e.DialShard(1, 0.1)] and known.ending is None


@pytest.mark.parametrize(("found", "which"), [([(1, 1)], 0), ([(1, 2), (2, 1)], 1), ([(2, 1), (1, 9)], 0), ([(2, 1), (2, 3)], 1)])
def test_of_several_that_answer_the_newest_is_taken(found: list[tuple[int, int]], which: int) -> None:
    assert newest_attempt(found) == which


def test_a_block_that_moved_on_while_the_worker_was_placed_begins_it_again_in_sync_only() -> None:
    for mode, ending in ((Sync(), WorkerEnding("rewind")), (Async(), None)):
        m = joined(mode=mode, clock=3)
        m.handle(e.Pulled(3, 3), 0.0)
        assert m.ending is None
        m.handle(e.Pulled(3, 4), 0.0)
        assert m.ending == ending


@pytest.mark.parametrize("body", [{}, {"attempt": "x"}, {"attempt": 1, "term": 1, "serving": True, "complete": 0, "open": 3}])
def test_a_welcome_out_of_shape_is_refused_before_it_is_an_event(body: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="WELCOME of shard 1 is not in shape"):
        e.Welcomed.of(1, body)


# -- sending again -------------------------------------------------------------------------------------


def test_what_the_shard_has_is_only_asked_for_and_the_rest_goes_again() -> None:
    m = joined()
    requests = m.links[0].requests
    requests.unsent = 5
    asked = [requests.ask(push(block, 3)) for block in (0, 2)] + [requests.ask(push(9, 3, Kind.ROW_PUSH)) for _ in range(2)]
    asked.append(requests.ask(push(4, 3, Kind.PULL)))
    m.handle(e.ShardStreamEnded(0), 1.0)
    again = [one.header for one in of(m.handle(welcome(0, complete=3, opened=frozenset({2, 9}), clock=3), 2.0), e.Resend)]
    assert [(h.request, h.kind) for h in again] == [
        (1, Kind.PUSH), (2, Kind.PULL), (3, Kind.LOOKUP), (4, Kind.LOOKUP), (5, Kind.PULL),
    ]  # fmt: skip
    assert again[0] == asked[0] and again[4] == asked[4]
    assert again[1].version == again[2].version == (0, Sync().version_for(3))


def test_where_workers_step_a_push_that_is_there_is_asked_for_with_its_update() -> None:
    m = joined(reduces=True)
    requests = m.links[0].requests
    requests.unsent = 1
    requests.ask(push(0, 3))
    again = of(m.handle(welcome(0, complete=4, clock=3), 2.0), e.Resend)
    assert again[0].header.flags == Flag.STORE


def test_another_attempt_gets_every_push_of_the_open_clock() -> None:
    m = joined()
    requests = m.links[1].requests
    requests.unsent = 3
    first, _ = requests.ask(push(1, 3)), requests.ask(push(3, 3))
    requests.settle(first.request)
    m.handle(e.ShardStreamEnded(1), 1.0)
    same = of(m.handle(welcome(1, complete=3), 2.0), e.Resend)
    assert [one.header.block for one in same] == [3]
    m.handle(e.ShardStreamEnded(1), 3.0)
    later = of(m.handle(welcome(1, attempt=2, complete=3), 4.0), e.Resend)
    assert [one.header.block for one in later] == [1, 3]


def test_a_whole_clock_is_not_sent_to_another_attempt() -> None:
    """It was answered by all; what the shard lost of it is counted, from `acked`."""
    m = joined()
    requests = m.links[1].requests
    requests.unsent = 1
    requests.settle(requests.ask(push(1, 3)).request)
    m.clock = 4
    m.handle(e.ShardStreamEnded(1), 1.0)
    assert m.hello(1)["acked"] == 4
    assert not of(m.handle(welcome(1, attempt=2, complete=3), 2.0), e.Resend)


def test_wishes_and_the_last_record_are_said_again_to_the_coordinator_alone() -> None:
    m = joined()
    m.handle(e.Said(Kind.REPORT, {"loss": 1.0}), 0.0)
    m.handle(e.Said(Kind.CHECKPOINT, {}), 0.0)
    m.handle(e.AtStepBoundary(b"record"), 0.0)
    back = m.handle(welcome(0, clock=3), 1.0)
    assert of(back, e.SendRecord) == [e.SendRecord(3, b"record", (0, 0))]
    assert sent(back) == [(0, Kind.REPORT), (0, Kind.CHECKPOINT)]
    assert sent(m.handle(welcome(1), 1.0)) == []


def test_a_wish_that_a_snapshot_has_granted_is_not_said_again() -> None:
    m = joined()
    m.handle(e.Said(Kind.CHECKPOINT, {}), 0.0)
    m.clock = 5
    m.handle(e.SnapshotTold(5, False), 0.0)
    m.handle(e.AtStepBoundary(b"record"), 0.0)
    assert Kind.CHECKPOINT not in m.told


# -- records -------------------------------------------------------------------------------------------


def test_a_long_record_goes_in_pieces_and_who_leaves_says_so_once_it_is_through() -> None:
    m = joined()
    record = bytes(3 * PIECE)
    left = m.handle(e.Through(record), 0.0)
    assert of(left, e.SendPieces) and sent(left) == [(1, Kind.LEAVE)]
    asked = m.next_piece(0.0)
    assert asked is not None and not asked.data
    assert m.handle(e.RecordHas(asked.record, 0), 0.0) == []
    assert sent(m.handle(e.RecordHas(asked.record, len(record)), 1.0)) == [(0, Kind.LEAVE)]


def test_pieces_wait_for_the_stream() -> None:
    m = joined()
    m.handle(e.Through(bytes(3 * PIECE)), 0.0)
    m.handle(e.ShardStreamEnded(0), 0.0)
    assert m.next_piece(1.0) is None
    assert of(m.handle(welcome(0, clock=3), 2.0), e.SendPieces)
    assert m.next_piece(2.0) is not None


def test_a_short_record_does_not_overtake_the_snapshots() -> None:
    m = joined()
    m.handle(e.SnapshotTold(3, False), 0.0)
    m.handle(e.AtStepBoundary(bytes(3 * PIECE)), 0.0)
    m.clock = 4
    assert not of(m.handle(e.AtStepBoundary(b"short"), 1.0), e.SendRecord)


@pytest.mark.parametrize("residual", [True, False])
def test_the_coordinator_says_whether_a_records_residual_is_still_to_be_sent(residual: bool) -> None:
    m = machine()
    m.handle(e.JoinAsked(), 0.0)
    body = {"attempt": 1, "term": 1, "serving": True, "complete": 5, "open": [], "clock": 5, "record": True, "residual": residual}
    m.handle(e.Welcomed.of(0, body), 0.0)
    assert m.residual is residual


def test_a_record_nobody_hands_in_is_nothing_to_the_machine() -> None:
    assert joined().handle(e.RecordHas(RecordId(1, 2, 3), 3), 0.0) == []


# -- snapshots and stops ------------------------------------------------------------------------------------


def test_a_snapshot_takes_the_record_of_its_clock_and_the_weights_where_workers_step() -> None:
    m = joined(reduces=True)
    m.handle(e.SnapshotTold(3, True), 0.0)
    assert m.needs_record(False)
    made = m.handle(e.AtStepBoundary(b"r"), 0.0)
    assert of(made, e.StoreWeights) == [e.StoreWeights(0), e.StoreWeights(1)] and of(made, e.SendRecord)
    assert m.may_step


def test_a_marked_snapshot_holds_the_script_until_every_shard_has_copied() -> None:
    m = joined(mode=Async())
    m.handle(e.MarkWanted(4), 0.0)
    assert m.stands(small=True)
    assert sent(m.handle(e.AtStepBoundary(b"r"), 0.0)) == [(0, Kind.MARK), (1, Kind.MARK)]
    assert not m.may_step
    m.handle(e.Released(0, 4), 1.0)
    assert not m.may_step
    m.handle(e.Released(1, 4), 1.0)
    assert m.may_step


def test_a_shard_that_comes_anew_releases_since_it_knows_nothing_of_the_snapshot() -> None:
    m = joined(mode=Async())
    m.handle(e.MarkWanted(4), 0.0)
    m.handle(e.AtStepBoundary(b"r"), 0.0)
    m.handle(e.Released(0, 4), 1.0)
    m.handle(welcome(1, attempt=2), 2.0)
    assert m.may_step


def test_a_mark_waits_for_an_edge_at_which_every_answer_is_here() -> None:
    m = joined(mode=Async())
    m.handle(e.MarkWanted(4), 0.0)
    assert sent(m.handle(e.AtStepBoundary(b"r", settled=False), 0.0)) == [] and m.may_step
    assert sent(m.handle(e.AtStepBoundary(b"r"), 1.0)) == [(0, Kind.MARK), (1, Kind.MARK)]


def test_a_void_snapshot_is_not_marked() -> None:
    m = joined(mode=Async())
    m.handle(e.MarkWanted(4), 0.0)
    m.handle(e.Released(0, 4), 0.0)
    assert sent(m.handle(e.AtStepBoundary(b"r"), 1.0)) == []


def test_who_is_asked_to_stop_asks_for_the_clock_and_goes_on_to_it() -> None:
    m = joined()
    m.stop_requested = True
    assert sent(m.handle(e.AtStepBoundary(b"r"), 0.0)) == [(0, Kind.STOP)] and not m.may_step
    m.handle(e.StopSet(5), 1.0)
    assert m.may_step, "two steps are still to be made"
    m.clock = 5
    assert sent(m.handle(e.AtStepBoundary(b"r"), 2.0)) == [] and not m.may_step


def test_who_stands_still_marks_the_last_snapshot() -> None:
    m = joined(mode=Async())
    m.handle(e.StopSet(3), 0.0)
    m.handle(e.AtStepBoundary(b"r"), 0.0)
    assert sent(m.handle(e.MarkWanted(9), 1.0)) == [(0, Kind.MARK), (1, Kind.MARK)]
    m.handle(e.Released(0, 9), 2.0)
    m.handle(e.Released(1, 9), 2.0)
    assert not m.may_step
    m.handle(e.TurnOver("stopped"), 3.0)
    assert m.ending == WorkerEnding("stopped")


def test_a_stop_that_nobody_answers_ends_all_the_same() -> None:
    m = joined()
    m.stop_requested = True
    m.handle(e.AtStepBoundary(b"r"), 0.0)
    m.handle(e.Tick(), STOP_SECONDS)
    assert m.ending is None
    m.handle(e.Tick(), STOP_SECONDS + 1)
    assert m.ending is not None and m.ending.how == "stopped"


def test_a_stop_that_comes_while_the_script_waits_is_asked_for_and_bounded() -> None:
    m = joined()
    m.begin_wait("the shards' answer", None, 0.0)
    m.stop_requested = True
    assert sent(m.handle(e.Tick(), 10.0)) == [(0, Kind.STOP)]
    assert m.handle(e.Tick(), 10.0 + STOP_SECONDS - 1) == [] and m.ending is None
    m.handle(e.Tick(), 11.0 + STOP_SECONDS)
    assert m.ending is not None and "the shards' answer" in m.ending.message
    unplaced = machine()
    unplaced.handle(e.JoinAsked(), 0.0)
    unplaced.begin_wait("the coordinator", None, 0.0)
    unplaced.stop_requested = True
    unplaced.handle(e.Tick(), 1.0)
    assert unplaced.ending == WorkerEnding("stopped")


# -- ends ----------------------------------------------------------------------------------------------


def test_who_leaves_tells_the_coordinator_last_and_again_on_a_new_stream() -> None:
    m = joined(reduces=True)
    left = m.handle(e.Through(b"r"), 0.0)
    assert sent(left) == [(1, Kind.LEAVE), (0, Kind.LEAVE)] and of(left, e.StoreWeights) == [e.StoreWeights(1), e.StoreWeights(0)]
    assert of(left, e.SendRecord) == [e.SendRecord(3, b"r", (0, 0))]
    assert sent(m.handle(welcome(1, attempt=2), 1.0)) == [(1, Kind.LEAVE)]
    assert sent(m.handle(welcome(0, attempt=2, clock=3), 1.0)) == [(0, Kind.LEAVE)]


@pytest.mark.parametrize(
    ("event", "ending"),
    [
        (e.TurnOver("finished"), WorkerEnding("finished")),
        (e.TurnOver("left"), WorkerEnding("left")),
        (e.Rewound("async"), WorkerEnding("rewind", "async")),
        (e.WorkerRefused("fenced", "a newer one is here"), WorkerEnding("fenced", "a newer one is here")),
    ],
)
def test_the_first_ending_holds(event: e.Event, ending: WorkerEnding) -> None:
    m = joined()
    m.handle(event, 0.0)
    m.handle(e.WorkerRefused("refused", "later"), 1.0)
    assert m.ending == ending


def test_what_shards_wait_for_is_logged_now_and_then() -> None:
    m = joined()
    event = e.ShardWaits.of(1, {"workers": [0], "for": "block 3", "seconds": 2.0})
    assert m.handle(event, 100.0) == [e.Log("WARNING", "psjob: waiting: shard 1 waits for workers [0] (block 3, 2.0 s)")]
    assert m.handle(event, 120.0) == [] and m.waiting_for() == event.text
    assert len(m.handle(event, 131.0)) == 1
