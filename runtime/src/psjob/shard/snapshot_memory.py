"""A block as it stood at a snapshot, without a copy as long as nobody changes it; and the memory for the copies.

The memory is made ready before it is needed, and kept for the snapshots that follow. Fresh pages cost more than the copy that goes into
them, on a virtual machine whose free pages are its host's a hundred times more. Those that were touched ahead cost nothing when the
snapshot comes, and a shard must have room for them at every snapshot. That work is done in the gaps between pushes, which come first for
processor time and memory bandwidth.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from psjob.process import supervise
from psjob.rules.base import BlockState
from psjob.wire.shared_memory import populate


class Voided(Exception):
    """The snapshot was given up, or the block was replaced by a restore: there is nothing to write."""


class BlockSnapshot:
    """`n`, `counts` and tensors of block `index` at a snapshot.

    Until someone is about to change the block these are the live tensors; then, or when someone comes to write it, a copy.
    `content` is the block's mark of its bytes: another object after each change. `lock` is the cell's: `keep` and `drop` are called with
    it held, the others without.
    """

    def __init__(self, index: int, n: int, state: BlockState, content: object, lock: threading.Lock, spare: SnapshotBuffer) -> None:
        self.index, self.n, self.content = index, n, content
        self.counts: dict[str, Any] = state.counts()
        self._tensors = {"weights": state.weights, **state.slots}
        self.shapes = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in self._tensors.items()}
        self.bytes = sum(tensor.nbytes for tensor in self._tensors.values())
        self._lock, self._spare = lock, spare
        self._settled = False
        self._void = False
        self.stopped = 0.0
        """Seconds for which an update waited for the copy."""

    def keep(self) -> None:
        """Copy the block, which is as it was at the snapshot, unless that is done or needless: afterwards it may change."""
        if not self._settled:
            began = time.monotonic()
            self._copy()
            self.stopped = time.monotonic() - began

    def _copy(self) -> None:
        whole = self._spare.place(self.index, room(self._tensors.values()))
        copies = {}
        at = 0
        for name, tensor in self._tensors.items():
            copies[name] = whole[at : at + tensor.nbytes].view(tensor.dtype).copy_(tensor)
            at += _pages(tensor)
        self._tensors = copies
        self._settled = True

    def drop(self, void: bool = False) -> None:
        """Nobody needs it any more; `void`: who takes it must know."""
        self._settled = True
        self._void = self._void or void
        self._tensors = {}

    def leave(self) -> None:
        """It is not to be written, or has been: no update copies it, and its copy goes."""
        with self._lock:
            self.drop()

    def give_up(self) -> None:
        """The snapshot is void."""
        with self._lock:
            self.drop(void=True)

    def take(self) -> dict[str, torch.Tensor]:
        """Its tensors by name, which nobody else changes. Raises Voided."""
        with self._lock:
            if self._void:
                raise Voided
            if not self._settled:
                self._copy()
            return self._tensors


def room(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of a copy of `tensors`. Each begins on a page, so that it can be written from where it lies."""
    return sum(_pages(tensor) for tensor in tensors)


def _pages(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // PAGE) * PAGE


PAGE = 4096
PIECE = 2 << 20
"""So much is made ready at a time: what needs the process's memory map waits for that."""


class SnapshotBuffer:
    """A place of `sizes[index]` bytes for each block, for one snapshot at a time. It is given back when nobody holds it or a copy."""

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
"""If pushes never cease, a quarter of the time is worked at first,"""
PATIENCE = 5.0
"""and three quarters once so many seconds were waited in all: however large a checkpoint is, it is not slowed forever."""


class BackgroundThrottle:
    """For one thread and one snapshot. `pushed` tells when the last push came, by the monotonic clock."""

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
