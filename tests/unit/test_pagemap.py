"""Pages of a private map that this process has written to, as Linux tells of them."""

from __future__ import annotations

import mmap
import os
import random

import pytest

from psjob.worker import sharing

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
