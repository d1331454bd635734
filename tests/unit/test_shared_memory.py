"""Places in lent memory: nobody is given what a reader may still read.

- Pages of a private map that this process has written to, as Linux tells of them.
"""

from __future__ import annotations

import mmap
import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psjob.wire.frame import WireError
from psjob.wire.shared_memory import ALIGNED, RingAllocator
from psjob.worker import sharing


@given(st.lists(st.one_of(st.integers(1, 700), st.integers(-8, -1)), max_size=200))
def test_what_is_not_copied_is_never_given_again(steps: list[int]) -> None:
    """Positive: take so many bytes; negative: the reader copies one of those that are held, in any order."""
    ring, held = RingAllocator(1024), {}
    for step in steps:
        if step < 0:
            if held:
                at = sorted(held)[-step % len(held)]
                ring.copied(at)
                del held[at]
            continue
        found = ring.take(step)
        if found is None:
            assert held  # an empty ring has room for all up to its size
            continue
        assert found % ALIGNED == 0 and found >= 0 and found + step <= 1024
        assert all(found + step <= other or end <= found for other, end in held.items())
        held[found] = found + step
        assert ring.held == held


def test_a_ring_that_is_read_in_order_goes_round_and_an_empty_one_begins_anew() -> None:
    ring = RingAllocator(4 * ALIGNED)
    assert [ring.take(ALIGNED) for _ in range(5)] == [0, 64, 128, 192, None]
    ring.copied(0)
    assert ring.take(1) == 0 and ring.take(1) is None
    ring.copied(128)
    assert ring.take(1) is None  # what lies before it is not copied
    ring.copied(64)
    assert ring.take(2 * ALIGNED) == 64
    for at in (192, 0, 64):
        ring.copied(at)
    assert not ring.held and ring.take(4 * ALIGNED) == 0
    ring.copied(0)
    assert ring.take(4 * ALIGNED + 1) is None


@pytest.mark.parametrize("offset", [1, 64, -64, 1 << 40])
def test_a_reader_that_copied_what_is_not_there_is_refused(offset: int) -> None:
    ring = RingAllocator(1024)
    assert ring.take(10) == 0
    with pytest.raises(WireError, match=f"byte {offset} of lent memory holds nothing"):
        ring.copied(offset)
    ring.copied(0)
    with pytest.raises(WireError, match="holds nothing"):
        ring.copied(0)


PAGE = mmap.PAGESIZE
PAGES = 2048


def _address(mapped: mmap.mmap) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux alone tells which pages of a map were written to")
@pytest.mark.parametrize("count", [0, 1, 7, PAGES // 2])
def test_written_pages_are_found_and_those_that_were_read_are_not(count: int) -> None:
    fd = os.memfd_create("pages")
    os.ftruncate(fd, PAGES * PAGE)
    mapped = mmap.mmap(fd, PAGES * PAGE, mmap.MAP_PRIVATE)
    os.close(fd)
    draw = random.Random(count)
    for number in draw.sample(range(PAGES), PAGES // 3):
        assert mapped[number * PAGE] == 0
    written = set(draw.sample(range(PAGES), count)) if count < PAGES // 2 else set(range(0, PAGES, 2))
    for number in written:
        mapped[number * PAGE + 5] = 1
    found = sharing.Pagemap(PAGE).own(_address(mapped), len(mapped))
    assert found is not None
    assert {at // PAGE for offset, length in found for at in range(offset, offset + length, PAGE)} == written
    assert found == sorted(found)


def test_a_system_that_does_not_tell_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_PATH", "/proc/self/no-such-file")
    assert sharing.Pagemap(PAGE).own(0, PAGE) is None
