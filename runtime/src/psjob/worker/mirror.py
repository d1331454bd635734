"""The shards' answers as a worker sees them: every block where it lies in the memory that its shard lends.

In a steady mode the model's parameters live in it: what a shard has updated is in the model without being moved. The shard cannot be
written to through it; what a script writes into its parameters is its own until the next step, as over TCP.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch

from psjob import memory
from psjob.packing import Pack
from psjob.span import Span
from psjob.wire.frame import WireError
from psjob.wire.shared import Region, Window
from psjob.worker.arena import is_alone

_PAGEMAP = "/proc/self/pagemap"
_PRESENT, _SWAPPED, _OF_FILE = 1 << 63, 1 << 62, 1 << 61


class Mirror:
    """`window` has the offsets of `span`. A shard's part is empty until `show`."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.window = Window(span.size)
        self._shown: dict[int, tuple[int, int]] = {}
        """By shard, which memory is shown."""
        self._blocks: set[int] = set()
        self._packs: dict[int, Pack] = {}
        """Over the shards' memory itself: a page of the window may be the script's."""
        self._homes: dict[int, int] = {}
        """By row, the address of a parameter that lives here."""
        self._entries = torch.empty(span.size // span.page, dtype=torch.int64)

    def show(self, index: int, region: Region, blocks: Iterable[int]) -> None:
        """Show what shard `index` lends for its `blocks`. Raises WireError where the model lies in other memory of it.

        The memory under the model's parameters is never changed for another while the script may read it.
        """
        facts = os.fstat(region.fd)
        which = (facts.st_dev, facts.st_ino)
        if self._shown.get(index) == which:
            return
        if self._homes:
            raise WireError(f"shard {index} lends other memory than the model lies in")
        self._blocks |= set(blocks)
        self.window.show(region.fd, _joined(self.span.pages(block) for block in sorted(blocks)))
        self._shown[index] = which
        layout = self.span.layout
        for number in blocks:
            block = layout.blocks[number]
            self._packs[number] = Pack(block, memory.lent(region, self.span.offsets[number], block.length, block.dtype), layout.table)

    def adopt(self, parameters: Sequence[torch.Tensor]) -> None:
        """Let each parameter live here whose blocks are all shown, that lies in one piece, and whose memory nobody else uses."""
        layout = self.span.layout
        for row, p in enumerate(parameters):
            place = self.span.place(row)
            if place is None or not all(block.index in self._blocks for block, _ in layout.pieces_of(row)):
                continue
            home = memory.lent(self.window, place, p.numel(), layout.table[row].dtype).view(p.shape)
            if is_alone(p, home):
                p.data = home
                self._homes[row] = home.data_ptr()

    def outside(self, targets: Sequence[torch.Tensor]) -> list[torch.Tensor | None] | None:
        """The targets that do not live here, by row with None for those that do; None: all live here."""
        homes = self._homes
        found = [None if homes.get(row) == target.data_ptr() else target for row, target in enumerate(targets)]
        return None if all(target is None or not target.numel() for target in found) else found

    def scatter(self, block: int, targets: Sequence[torch.Tensor | None]) -> None:
        """Copy a block's answer to the targets that are not None."""
        self._packs[block].scatter(targets)

    def refresh(self) -> None:
        """Forget what the script wrote into parameters that live here: they are the shards' again."""
        if not self._homes:
            return
        page = self.span.page
        try:
            with open(_PAGEMAP, "rb", buffering=0) as pagemap:
                done = os.preadv(pagemap.fileno(), [memory.view(self._entries)], self.window.address // page * 8)
        except OSError:
            done = 0
        if done != self._entries.numel() * 8:  # a system that does not tell: every page is read anew
            self.window.forget(0, self.span.size)
            return
        own = ((self._entries & (_PRESENT - (1 << 64) | _SWAPPED)) != 0) & ((self._entries & _OF_FILE) == 0)
        if own.any():
            for offset, length in _joined((number * page, page) for number in own.nonzero().flatten().tolist()):
                self.window.forget(offset, length)


def _joined(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(offset, length) in rising order, neighbours made one."""
    found: list[tuple[int, int]] = []
    for offset, length in pieces:
        if found and sum(found[-1]) == offset:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((offset, length))
    return found
