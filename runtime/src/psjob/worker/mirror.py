"""The shards' answers as a worker sees them: every block where it lies in the memory that its shard lends.

In a steady mode the model's parameters live in it: what a shard has updated is in the model without being moved. The shard cannot be
written to through it; what a script writes into its parameters is its own until the next step, as over TCP.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch

from psjob.layout import memory
from psjob.layout.memory import LentSpan
from psjob.layout.packing import Pack
from psjob.process.limits import available
from psjob.wire.frame import WireError
from psjob.wire.shared import Region, Window
from psjob.worker.arena import is_alone
from psjob.worker.pagemap import Pagemap, joined


class Mirror:
    """`window` has the offsets of `span`. A shard's part is empty until `show`."""

    def __init__(self, span: LentSpan) -> None:
        self.span = span
        self.window = Window(span.size)
        self._shown: dict[int, tuple[int, int]] = {}
        """By shard, which memory is shown."""
        self._blocks: set[int] = set()
        self._packs: dict[int, Pack] = {}
        """Over the shards' memory itself: a page of the window may be the script's."""
        self._homes: dict[int, int] = {}
        """By row, the address of a parameter that lives here."""
        self._pagemap = Pagemap(span.page)

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
        self.window.show(region.fd, joined(self.span.pages(block) for block in sorted(blocks)))
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

    def shows(self, row: int, target: torch.Tensor) -> bool:
        """Does `target` live here, and hold what the shard holds at this moment?"""
        if self._homes.get(row) != target.data_ptr():
            return False
        now = torch.empty_like(target)
        for block, _ in self.span.layout.pieces_of(row):
            self._packs[block.index].scatter([now if other == row else None for other in range(len(self.span.layout.table))])
        return torch.equal(now, target)

    def scatter(self, block: int, targets: Sequence[torch.Tensor | None]) -> None:
        """Copy a block's answer to the targets that are not None."""
        self._packs[block].scatter(targets)

    def settle(self, others: int) -> None:
        """The model stays as it is: what lives here becomes this process's own, where there is memory for that and for `others` alike."""
        pages = [self.span.pages(block) for block in self._blocks] if self._homes else []
        if (1 + others) * sum(size for _, size in pages) < (available() or 0):
            for begin, size in pages:
                self.window.keep(begin, size)

    def refresh(self, block: int) -> None:
        """Forget what the script wrote into parameters that live here: the block is the shard's again."""
        if not self._homes:
            return
        begin, size = self.span.pages(block)
        own = self._pagemap.own(self.window.address + begin, size)
        for offset, length in [(0, size)] if own is None else own:  # what is not told is read anew as a whole
            self.window.forget(begin + offset, length)
