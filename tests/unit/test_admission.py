"""Once only: the table of what a shard has taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from psjob.shard.admission import Admission, Verdict


def test_a_clock_is_taken_block_by_block_and_never_twice() -> None:
    table = Admission(workers=2, owned=2)
    assert table.admit(0, (1, 0), 0, 0) is Verdict.ADMIT
    assert table.admit(0, (1, 0), 0, 0) is Verdict.DUPLICATE
    assert table.admit(0, (1, 0), 1, 0) is Verdict.GAP
    assert table.admit(0, (1, 0), 0, 1) is Verdict.ADMIT
    assert table.rows[0].complete == 1
    assert table.admit(0, (1, 0), 0, 1) is Verdict.DUPLICATE
    assert table.admit(0, (1, 0), 1, 0) is Verdict.ADMIT
    assert table.rows[1].complete == 0


def test_an_older_process_is_fenced_and_a_newer_resets_nothing() -> None:
    table = Admission(workers=1, owned=1)
    assert table.meet(0, (1, 0)) and table.admit(0, (1, 0), 0, 0) is Verdict.ADMIT
    assert table.meet(0, (2, 0))
    assert not table.meet(0, (1, 9))
    assert table.admit(0, (1, 9), 1, 0) is Verdict.FENCED
    assert table.admit(0, (2, 0), 0, 0) is Verdict.DUPLICATE
    assert table.admit(0, (2, 0), 1, 0) is Verdict.ADMIT


def test_a_leaver_is_absent_from_its_clock_on() -> None:
    table = Admission(workers=3, owned=1)
    table.leave(1, 5)
    assert table.expected(4) == {0, 1, 2}
    assert table.expected(5) == {0, 2}
    assert table.live() == {0, 2}
    assert table.admit(1, (0, 0), 5, 0) is Verdict.GONE


def test_lost_clocks_are_counted_once() -> None:
    table = Admission(workers=1, owned=2)
    for clock in range(3):
        for position in range(2):
            table.admit(0, (0, 0), clock, position)
    restored = Admission(workers=1, owned=2)
    restored.load(table.save(), {})
    assert restored.jump(0, 7) == 4
    assert restored.jump(0, 7) == 0
    assert restored.admit(0, (0, 0), 7, 0) is Verdict.ADMIT


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 2)), max_size=200), st.integers(0, 199))
def test_every_key_counts_at_most_once_across_a_restore(pushes: list[tuple[int, int, int]], cut: int) -> None:
    """Whatever arrives, twice or out of order, before and after a save and load: each (worker, clock, block) is admitted once."""
    table, taken = Admission(workers=3, owned=3), set()
    for number, (worker, clock, position) in enumerate(pushes):
        if number == cut:
            again = Admission(workers=3, owned=3)
            again.load(table.save(), {})
            table = again
        if table.admit(worker, (1, 0), clock, position) is Verdict.ADMIT:
            assert (worker, clock, position) not in taken
            taken.add((worker, clock, position))
    for worker in range(3):
        complete = table.rows[worker].complete
        assert {(worker, c, p) for c in range(complete) for p in range(3)} <= taken
