"""Gradients that overlap sent before their step was made. They count when a push names them, and are dropped with their stream."""

from __future__ import annotations

from psjob.shard.cell import Gradient
from psjob.wire.frame import Header, WireError


class EarlyPushes:
    """Of one stream, and used by the thread that reads it: at most one gradient a block, of the open clock."""

    def __init__(self) -> None:
        self._by_block: dict[int, tuple[int, int, Gradient]] = {}

    def keep(self, header: Header, gradient: Gradient) -> None:
        """Hold what came by an EARLY frame."""
        self._by_block[header.block] = (header.clock, header.request, gradient)

    def take(self, header: Header) -> Gradient:
        """The gradient that a HELD push names. Raises WireError where it is not here; the worker then pushes the block whole."""
        clock, number, gradient = self._by_block.pop(header.block, (-1, 0, None))
        if gradient is None or (clock, number) != (header.clock, header.part):
            raise WireError(f"push of block {header.block} names early data {header.part} of clock {header.clock}, which is not held here")
        return gradient

    def drop(self, block: int) -> None:
        """Other contents of the block come, or none: what was held is not the push."""
        held = self._by_block.pop(block, None)
        if held is not None:
            held[2].free()

    def clear(self) -> None:
        """The stream has ended."""
        for block in list(self._by_block):
            self.drop(block)

    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(gradient.flat.numel() * gradient.flat.element_size() for _, _, gradient in list(self._by_block.values()))
