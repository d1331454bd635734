"""Memory for the copies of one cut, made ready before it is needed and given back after it.

Fresh pages cost more than the copy that goes into them; large ones that were touched ahead cost nothing when the cut comes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
from collections.abc import Iterable, Iterator, Mapping

import torch

PAGE = 4096
PIECE = 2 << 20
"""So much is made ready at a time: what needs the process's memory map waits for that, and so does a spare that is closed meanwhile."""
_POPULATE_WRITE = 23


class Spare:
    """A place of `sizes[index]` bytes for each block. Everything is given back when nobody holds the spare or a copy any more."""

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self._places: dict[int, tuple[int, int]] = {}
        at = 0
        for index, size in sizes.items():
            self._places[index] = (at, size)
            at += -(-size // PAGE) * PAGE
        self._memory: mmap.mmap | None = None
        if at:
            self._memory = mmap.mmap(-1, at, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(AttributeError, OSError):  # a kernel without large pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)

    def warm(self, indices: Iterable[int]) -> None:
        """Have the pages of these places made, half of the time; a kernel that cannot makes them as they are used.

        No lower priority: a thread that waits for a core while it holds the interpreter's lock, or is owed it, holds up all others.
        """
        memory = self._memory
        if memory is None:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for begin, end in _joined(sorted(self._places[index] for index in indices)):
            for at in range(begin, end, PIECE):
                size = ctypes.c_size_t(min(PIECE, end - at))
                since = time.monotonic()
                if self._memory is None or libc.madvise(ctypes.c_void_p(start + at), size, _POPULATE_WRITE):
                    return
                time.sleep(time.monotonic() - since)

    @property
    def closed(self) -> bool:
        """No memory: closed, or there is nothing to copy."""
        return self._memory is None

    def close(self) -> None:
        """No copy will be made any more."""
        self._memory = None

    def place(self, index: int, size: int) -> torch.Tensor:
        """`size` bytes for block `index`, in its place; elsewhere where it has outgrown that."""
        at, fits = self._places.get(index, (0, 0))
        memory = self._memory
        if memory is None or size > fits:
            return torch.empty(size, dtype=torch.uint8)
        return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=at)


def _joined(places: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(begin, end) of stretches that hold the places (begin, size), which are in order and begin on pages."""
    begin = end = 0
    for at, size in places:
        if at != end:
            if end > begin:
                yield begin, end
            begin = at
        end = at + -(-size // PAGE) * PAGE
    if end > begin:
        yield begin, end
