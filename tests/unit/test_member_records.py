"""The records of a worker that shard 0 keeps."""

from __future__ import annotations

import pytest

from psjob.protocol.coordinator import members
from psjob.protocol.coordinator.members import Member


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


def test_what_a_cut_in_flight_pins_and_large_records_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "MOST_KEPT", 100)
    member = Member(1)
    for clock in range(5):
        member.keep(clock, bytes(80), pinned=2, since=0)
    assert sorted(member.records) == [0, 2, 3, 4]
