"""Which pages of a private map this process has written to, and so no longer shares: Linux tells in /proc/self/pagemap."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterable
from typing import Final

import torch

from psjob import memory

_PATH: Final = "/proc/self/pagemap"
_PRESENT, _SWAPPED, _OF_FILE = 1 << 63, 1 << 62, 1 << 61
_SCAN: Final = 0xC0606610
"""PAGEMAP_SCAN of linux/fs.h, since 6.7: it looks at the page table alone, and tells regions in place of a number a page."""
_ARG: Final = struct.Struct("<12Q")
_REGION: Final = struct.Struct("<3Q")
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
REGIONS: Final = 512


class Pagemap:
    """This process's page table; a process that was forked from it needs one of its own."""

    def __init__(self, page: int) -> None:
        self._page = page
        self._regions = torch.empty(REGIONS * 3, dtype=torch.int64)
        try:
            self._fd = os.open(_PATH, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def own(self, address: int, size: int) -> list[tuple[int, int]] | None:
        """(offset, length) of the pages from `address` on that are this process's own, rising; None where the system does not tell."""
        if self._fd < 0:
            return None
        try:
            return _scanned(self._fd, address, size, self._regions)
        except OSError:
            return _read(self._fd, address, size, self._page)


def _scanned(fd: int, address: int, size: int, regions: torch.Tensor) -> list[tuple[int, int]]:
    """By the scan. Raises OSError where the kernel has none."""
    found: list[tuple[int, int]] = []
    start, end = address, address + size
    while start < end:
        arg = bytearray(
            _ARG.pack(_ARG.size, 0, start, end, 0, regions.data_ptr(), REGIONS, 0, _IS_FILE, _IS_FILE, _IS_PRESENT | _IS_SWAPPED, _IS_FILE)
        )
        count = fcntl.ioctl(fd, _SCAN, arg)
        raw = memory.view(regions)
        for number in range(count):
            begin, stop, _ = _REGION.unpack_from(raw, number * _REGION.size)
            found.append((begin - address, stop - begin))
        walked = _ARG.unpack(arg)[4]
        if walked <= start:
            raise OSError(f"the scan of {_PATH} stands still")
        start = walked
    return found


def _read(fd: int, address: int, size: int, page: int) -> list[tuple[int, int]] | None:
    """By a number a page."""
    entries = torch.empty(size // page, dtype=torch.int64)
    try:
        done = os.preadv(fd, [memory.view(entries)], address // page * 8)
    except OSError:
        return None
    if done != entries.numel() * 8:
        return None
    own = ((entries & (_PRESENT - (1 << 64) | _SWAPPED)) != 0) & ((entries & _OF_FILE) == 0)
    return joined((number * page, page) for number in own.nonzero().flatten().tolist()) if own.any() else []


def joined(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(offset, length) in rising order, neighbours made one."""
    found: list[tuple[int, int]] = []
    for offset, length in pieces:
        if found and sum(found[-1]) == offset:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((offset, length))
    return found
