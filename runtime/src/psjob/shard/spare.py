"""Memory for the copies of a cut, made ready before it is needed and kept for the cuts that follow.

Fresh pages cost more than the copy that goes into them, on a virtual machine whose free pages are its host's a hundred times more. Those
that were touched ahead cost nothing when the cut comes, and a shard must have room for them at every cut.

Background work of a shard runs in the gaps between pushes: pushes come first for processor time and memory bandwidth.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from psjob.process import supervise
from psjob.wire.shared_memory import populate

PAGE = 4096
PIECE = 2 << 20
"""So much is made ready at a time: what needs the process's memory map waits for that."""


class Spare:
    """A place of `sizes[index]` bytes for each block, for one cut at a time. It is given back when nobody holds the spare or a copy."""

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self.sizes = dict(sizes)
        self._warming = threading.Lock()
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
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        with self._warming:  # whoever comes meanwhile finds them made
            for begin, end in _joined(sorted(self._places[index] for index in indices)):
                for at in range(begin, end, PIECE):
                    since = time.monotonic()
                    if not populate(start + at, min(PIECE, end - at)):
                        return
                    time.sleep(time.monotonic() - since)

    def place(self, index: int, size: int) -> torch.Tensor:
        """`size` bytes for block `index`, in its place; elsewhere where it has outgrown that."""
        at, fits = self._places.get(index, (0, 0))
        memory = self._memory
        if memory is None or size > fits:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
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


CALM = 0.01
"""Seconds without a push after which nobody is held up."""
SHARE = 3
"""Where pushes never cease, a quarter of the time is worked at first,"""
PATIENCE = 5.0
"""and three quarters once so many seconds were waited in all: however large a checkpoint is, it is not slowed for ever."""


class PushGaps:
    """For one thread and one cut. `pushed` tells when the last push came, by the monotonic clock."""

    def __init__(self, pushed: Callable[[], float], patience: float = PATIENCE) -> None:
        self._pushed, self._patience = pushed, patience
        self._since = time.monotonic()
        self.waited = 0.0
        """Seconds in all."""

    def wait(self) -> None:
        """Wait until no push has come for a moment.

        At most SHARE times as long as the caller has worked since the last call; a third as long, once its patience is used up.
        """
        began = now = time.monotonic()
        worked = now - self._since
        until = now + max(min(SHARE * worked, self._patience - self.waited), worked / SHARE)
        while now < until and now - self._pushed() < CALM:
            time.sleep(min(CALM / 4, until - now))
            now = time.monotonic()
        self.waited += now - began
        self._since = now
        supervise.beat()
