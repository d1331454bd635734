"""Memory that the processes of one worker share: the gradients of each, and the answers of the shards once for all."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from psjob.layout.blocks import Layout
from psjob.layout.memory import ALIGN, LentSpan
from psjob.layout.packing import Pack
from psjob.protocol.worker.together import owner
from psjob.rules import arrays

_CPU = torch.device("cpu")


class PodMemory:
    """Of process `local` of so many. What `fd` is open for has `size` bytes; it is taken over.

    Each process writes its own gradients. Sums are written over those of the first process that is present, each block by its owner.
    `device` is where this process's tensors lie. For a GPU the memory is pinned in this process, where the driver allows that.
    """

    def __init__(self, layout: Layout, processes: int, local: int, fd: int, device: torch.device = _CPU) -> None:
        self._layout, self._local = layout, local
        span = LentSpan.of(layout, ALIGN)
        try:
            self._map = mmap.mmap(fd, size_of(layout, processes))
        finally:
            os.close(fd)
        self._gradients = [self._packs(span, number * span.size) for number in range(processes)]
        self._weights = self._packs(span, processes * span.size)
        self._first = 0
        self._device, self._pinned = device, device.type == "cuda" and pin(self, self._map, device)

    def _packs(self, span: LentSpan, begin: int) -> list[Pack]:
        made = []
        for block in self._layout.blocks:
            dtype = getattr(torch, block.dtype)
            at = begin + span.offsets[block.index]
            flat = (
                torch.frombuffer(self._map, dtype=dtype, count=block.length, offset=at)
                if block.length
                else torch.empty(0, dtype=dtype, device="cpu")
            )
            made.append(Pack(block, flat, self._layout.table))
        return made

    def gather(self, gradients: Sequence[torch.Tensor | None], scale: float) -> None:
        """Copy this process's gradients, `scale` times what they are, to its own place."""
        with torch.no_grad():
            for pack in self._gradients[self._local]:
                pack.gather(gradients, non_blocking=self._pinned)
            self._settle()
            for pack in self._gradients[self._local] if scale != 1.0 else ():
                pack.flat.mul_(scale)

    def sum(self, present: Sequence[int], active: Sequence[int], mean: bool) -> None:
        """Make the sum, or the mean, of the blocks that this process owns among the `active` ones: added in the order of `present`, then
        one multiplication."""
        if not present:
            return
        self._first = present[0]
        with torch.no_grad():
            for block in self._layout.blocks:
                if owner(block.index, active) != self._local:
                    continue
                flats = [self._gradients[number][block.index].flat for number in present]
                for flat in flats[1:]:
                    arrays.join("add", flats[0], flat, flats[0])
                if mean and len(flats) > 1:
                    flats[0].mul_(1.0 / len(flats))

    @contextmanager
    def filling(self, first: int) -> Iterator[Callable[[int, torch.Tensor], object]]:
        """Inside, what is yielded puts a block of the sum to its place; `first` is the first process that is present."""
        self._first = first
        yield lambda block, flat: self._gradients[first][block].flat.copy_(flat, non_blocking=self._pinned)
        self._settle()

    def summed(self, block: int) -> torch.Tensor:
        """A block of the sum that was made last, 1-D."""
        return self._gradients[self._first][block].flat

    def answer(self, block: int) -> torch.Tensor:
        """Where the shards' answer of a block lies, 1-D."""
        return self._weights[block].flat

    def scatter(self, targets: Sequence[torch.Tensor]) -> None:
        """Copy all answers to where they are wanted."""
        for pack in self._weights:
            pack.scatter(targets, non_blocking=self._pinned)
        self._settle()

    def _settle(self) -> None:
        """Copies that were begun are through: what comes next writes to the same memory."""
        if self._pinned:
            torch.cuda.current_stream(self._device).synchronize()


def pin(owner: object, mapped: mmap.mmap, device: torch.device) -> bool:
    """Pin memory in this process while `owner` lives, so that a GPU copies by itself and several times as fast. Is it?

    It is released before it is unmapped: the driver would take what is mapped there next for the same.
    """
    flat = torch.frombuffer(mapped, dtype=torch.uint8)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        if int(runtime.cudaHostRegister(flat.data_ptr(), flat.nbytes, 0)) == 0:
            weakref.finalize(owner, runtime.cudaHostUnregister, flat.data_ptr()).atexit = False
            return True
        with contextlib.suppress(RuntimeError):  # CUDA keeps the refusal for the next kernel of this thread
            torch.zeros(1, dtype=torch.uint8, device=device)
    return False


def size_of(layout: Layout, processes: int) -> int:
    """Bytes of the memory of so many processes."""
    return (processes + 1) * LentSpan.of(layout, ALIGN).size


def make(layout: Layout, processes: int) -> int:
    """A descriptor of new memory of that size, without a name. Raises OSError."""
    fd = os.memfd_create("psjob-processes", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_of(layout, processes))
    except BaseException:
        os.close(fd)
        raise
    return fd
