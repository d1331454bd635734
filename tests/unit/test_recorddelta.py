"""Records as what they change of the one before on their stream: the same bytes come out, or none."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psjob.protocol.records import RecordDelta, RecordsOnStream

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
    "change",
    [{"begin": 7}, {"begin": -1}, {"begin": 1 << 40}, {"size": 3}, {"size": 1 << 40}, {"crc": 1}, {"data": b"zz"}],
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
