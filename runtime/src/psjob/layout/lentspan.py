"""Where each block lies in memory that is lent: the same places in every region of a job, on either side. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from psjob.layout.blocks import Layout

ALIGN = 64
"""Torch's own tensors begin at multiples of so many bytes; kernels may give other bits for others."""


@dataclass(frozen=True)
class LentSpan:
    """`offsets` in bytes by block, each at a page's begin; a region that holds all of them has `size` bytes."""

    layout: Layout
    page: int
    offsets: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, layout: Layout, page: int) -> LentSpan:
        """Blocks one after the other; those of one tensor leave no gap where all but its last are whole pages."""
        offsets = []
        at = 0
        for block in layout.blocks:
            offsets.append(at)
            at += -(-block.nbytes // page) * page
        return cls(layout, page, tuple(offsets), max(at, page))

    def pages(self, block: int) -> tuple[int, int]:
        """Offset and length of the whole pages that a block has for itself."""
        return self.offsets[block], -(-self.layout.blocks[block].nbytes // self.page) * self.page

    def place(self, row: int) -> int | None:
        """Offset of a tensor of the table that lies there in one piece, aligned as torch's own; None: it does not."""
        spec = self.layout.table[row]
        begin = end = None
        for block, piece in self.layout.pieces_of(row):
            at = self.offsets[block.index] + piece.block_offset * (spec.nbytes // spec.numel)
            if end is not None and at != end:
                return None
            begin = at if begin is None else begin
            end = at + piece.length * (spec.nbytes // spec.numel)
        return None if begin is None or begin % ALIGN else begin
