"""Resume records in pieces: whole and right however streams break, behind steps, the snapshot's before the newest.

- Records as what they change of the one before on their stream: the same bytes come out, or none.
- The records of a worker that shard 0 keeps.
"""

from __future__ import annotations

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psjob.protocol.coordinator import members
from psjob.protocol.coordinator.members import Member
from psjob.protocol.records import PIECE, WINDOW, RecordDelta, RecordId, RecordIn, RecordsOnStream, RecordsOut


def blob(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def carry(out: RecordsOut, into: RecordIn, pieces: int, now: float = 0.0) -> list[bytes]:
    """Let up to `pieces` pieces arrive, each confirmed at once; the records that came whole."""
    whole = []
    for _ in range(pieces):
        piece = out.next(now, stepping=False)
        if piece is None:
            break
        got = into.take(piece.record, piece.offset, bytes(piece.data))
        whole += [] if got is None else [got]
        out.has(piece.record, into.count, now)
    return whole


@given(st.integers(1, 5 * PIECE), st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=8))
def test_a_record_comes_whole_however_often_the_stream_breaks(size: int, breaks: list[tuple[int, bool]]) -> None:
    """At a break the last piece may have come without its confirmation."""
    record, out, into = blob(size), RecordsOut(), RecordIn()
    out.add(7, record, snapshot=True)
    came = []
    for pieces, unconfirmed in breaks:
        came += carry(out, into, pieces)
        piece = out.next(0.0, stepping=False) if unconfirmed else None
        if piece is not None:
            got = into.take(piece.record, piece.offset, bytes(piece.data))
            came += [] if got is None else [got]
        out.relinked()
    came += carry(out, into, 100)
    assert out.through and came and set(came) == {record}


def test_a_break_does_not_begin_from_the_first_byte() -> None:
    record, out, into = blob(10 * PIECE), RecordsOut(), RecordIn()
    out.add(7, record, snapshot=True)
    carry(out, into, 6)
    assert into.count == 5 * PIECE
    out.relinked()
    asked = out.next(0.0, stepping=False)
    assert asked is not None and not asked.data
    out.has(asked.record, into.count, 0.0)
    first = out.next(0.0, stepping=False)
    assert first is not None and first.offset == 5 * PIECE


def test_another_coordinator_that_has_nothing_gets_all() -> None:
    record, out = blob(4 * PIECE), RecordsOut()
    out.add(7, record, snapshot=True)
    carry(out, RecordIn(), 3)
    out.relinked()
    assert carry(out, RecordIn(), 100) == [record]


def test_a_step_waits_behind_one_piece_only() -> None:
    out, into = RecordsOut(), RecordIn()
    out.add(1, blob(20 * PIECE), snapshot=True)
    carry(out, into, 8)
    sent = [out.next(0.0, stepping=True), out.next(0.0, stepping=True)]
    assert sent[0] is not None and sent[1] is None
    more = 0
    while out.next(0.0, stepping=False) is not None:
        more += 1
    assert more > 1, "without a step under way more than one may follow"


@pytest.mark.parametrize(("seconds", "most"), [(0.01, WINDOW), (0.5, PIECE), (5.0, PIECE)])
def test_what_is_under_way_goes_by_how_soon_pieces_are_confirmed(seconds: float, most: int) -> None:
    out, now = RecordsOut(), 1e6
    out.add(1, blob(64 * PIECE), snapshot=True)
    asked = out.next(now, stepping=False)
    assert asked is not None
    out.has(asked.record, 0, now)
    largest = confirmed = 0
    while not out.through:
        sent = confirmed
        while (piece := out.next(now, stepping=False)) is not None:
            sent = piece.offset + len(piece.data)
        largest = max(largest, sent - confirmed)
        now, confirmed = now + seconds, sent
        out.has(asked.record, confirmed, now)
    assert largest == most


def test_the_snapshots_record_comes_through_and_then_the_newest_of_the_others() -> None:
    out, into = RecordsOut(), RecordIn()
    snapshot, between, newest = (blob(size, seed) for seed, size in enumerate((3 * PIECE, 3 * PIECE, 100)))
    out.add(4, snapshot, snapshot=True)
    carry(out, into, 2)
    out.add(5, between, snapshot=False)
    out.add(6, newest, snapshot=False)
    assert carry(out, into, 100) == [snapshot, newest]


def test_a_newer_record_takes_the_place_of_a_long_one_and_waits_for_a_short_one() -> None:
    """Else one that comes with every clock would never be through."""
    out, into = RecordsOut(), RecordIn()
    long, first, second, third = (blob(size, seed) for seed, size in enumerate((3 * PIECE, 10, 20, 30)))
    out.add(4, long, snapshot=False)
    carry(out, into, 2)
    for clock, record in enumerate((first, second, third), 5):
        out.add(clock, record, snapshot=False)
    assert carry(out, into, 100) == [first, third]


def test_the_next_snapshots_record_replaces_all() -> None:
    out, into = RecordsOut(), RecordIn()
    out.add(4, blob(3 * PIECE, 1), snapshot=True)
    out.add(5, blob(3 * PIECE, 2), snapshot=False)
    carry(out, into, 2)
    later = blob(2 * PIECE, 3)
    out.add(9, later, snapshot=True)
    assert carry(out, into, 100) == [later]


def test_a_record_that_is_handed_in_again_is_told_again_not_sent_again() -> None:
    """The coordinator has gone back to a checkpoint meanwhile: it is given what its process already has."""
    record, into = blob(3 * PIECE), RecordIn()
    first = RecordsOut()
    first.add(4, record, snapshot=True)
    assert carry(first, into, 100) == [record]
    again = RecordsOut()
    again.add(4, record, snapshot=False)
    assert carry(again, into, 1) == [record] and again.through


def test_a_damaged_record_is_not_taken() -> None:
    into, record = RecordIn(), blob(100)
    assert into.take(RecordId(1, 5, 100), 0, record) is None
    assert into.count == 0


def test_pieces_that_do_not_follow_are_left_out() -> None:
    into, name = RecordIn(), RecordId(1, 0, 100)
    assert into.take(name, 10, bytes(10)) is None and into.count == 0
    into.take(name, 0, bytes(40))
    into.take(name, 20, bytes(20))
    into.take(name, 40, bytes(100))
    assert into.count == 40


PARTS = st.sampled_from([b"", b"a", b"ab", b"cursor 9", b"cursor 10", b"." * 50, b"x" * 300])
RECORDS = st.lists(st.lists(PARTS, max_size=6).map(b"".join), min_size=1, max_size=12)


@given(RECORDS)
def test_what_is_sent_comes_out(records: list[bytes]) -> None:
    here, there = RecordsOnStream(), RecordsOnStream()
    for record in records:
        delta = here.delta(record)
        if delta is None:
            there.last = record
        else:
            assert len(delta.data) <= len(record) // 2 and there.take(delta) == record
        assert there.last == here.last == record


def test_a_first_record_is_whole_and_a_changed_clock_is_few_bytes() -> None:
    here, tail = RecordsOnStream(), bytes(range(256)) * 50
    assert here.delta(b'{"step":9}' + tail) is None
    delta = here.delta(b'{"step":10}' + tail)
    assert delta is not None and (delta.begin, delta.data, delta.size) == (8, b"10", 11 + len(tail))


def test_a_record_of_other_bytes_is_whole() -> None:
    here = RecordsOnStream()
    here.delta(b"a" * 100)
    assert here.delta(b"b" * 100) is None
    assert here.delta(b"b" * 100) == RecordDelta(100, zlib.crc32(b"b" * 100), 100, b"")


@pytest.mark.parametrize(
    "change", [{"begin": 7}, {"begin": -1}, {"begin": 1 << 40}, {"size": 3}, {"size": 1 << 40}, {"crc": 1}, {"data": b"zz"}]
)
def test_a_delta_of_another_record_is_refused(change: dict[str, object]) -> None:
    here, there = RecordsOnStream(), RecordsOnStream()
    here.delta(b"clock 1" + b"." * 90)
    there.last = here.last
    delta = here.delta(b"clock 2" + b"." * 90)
    assert delta is not None
    with pytest.raises(ValueError, match="a record of"):
        there.take(delta._replace(**change))  # type: ignore[arg-type]
    assert there.take(delta) == here.last


def test_a_stream_that_has_brought_no_record_takes_no_delta() -> None:
    with pytest.raises(ValueError, match="as a change of one of None"):
        RecordsOnStream().take(RecordDelta(0, 0, 1, b"a"))


def test_records_of_clocks_ahead_take_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a decided mode the oldest stay, which are decided first, and the two newest."""
    monkeypatch.setattr(members, "MOST_KEPT", 100)
    member = Member(1)
    for clock in range(60):
        member.keep(clock, bytes(10), pinned=None, since=0)
        assert sum(map(len, member.records.values())) <= 100
    assert sorted(member.records) == [*range(8), 58, 59]
    member.keep(60, bytes(10), pinned=None, since=5)
    assert sorted(member.records) == [5, 6, 7, 58, 59, 60]


def test_what_a_snapshot_in_flight_pins_and_large_records_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "MOST_KEPT", 100)
    member = Member(1)
    for clock in range(5):
        member.keep(clock, bytes(80), pinned=2, since=0)
    assert sorted(member.records) == [0, 2, 3, 4]
