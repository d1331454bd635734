"""Which pages of a private map this process has written to, and so no longer shares: Linux tells in /proc/self/pagemap."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

_PATH: Final = "/proc/self/pagemap"
_ENTRY: Final = 8
"""Bytes that the system tells of each page, a little-endian number; its highest byte says whether it is present, swapped, a file's."""
_PRESENT, _SWAPPED, _OF_FILE = 1 << 7, 1 << 6, 1 << 5
_OTHERS: Final = bytes(top for top in range(256) if not top & (_PRESENT | _SWAPPED) or top & _OF_FILE)


class Pagemap:
    """This process's page table; a process that was forked from it needs one of its own."""

    def __init__(self, page: int) -> None:
        self._page = page
        try:
            self._fd = os.open(_PATH, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def own(self, address: int, size: int) -> list[tuple[int, int]] | None:
        """(offset, length) of the pages from `address` on that are this process's own, rising; None where the system does not tell."""
        try:
            entries = os.pread(self._fd, size // self._page * _ENTRY, address // self._page * _ENTRY)
        except OSError:
            return None
        if len(entries) != size // self._page * _ENTRY:
            return None
        tops = entries[_ENTRY - 1 :: _ENTRY]
        if not tops.translate(None, _OTHERS):
            return []
        return joined((number * self._page, self._page) for number, top in enumerate(tops) if top not in _OTHERS)


def joined(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(offset, length) in rising order, neighbours made one."""
    found: list[tuple[int, int]] = []
    for offset, length in pieces:
        if found and sum(found[-1]) == offset:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((offset, length))
    return found
