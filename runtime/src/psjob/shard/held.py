"""Gradients that overlap sent before their step was made. They count when a push names them, and are dropped with their session."""

from __future__ import annotations

import threading

from psjob.shard.cell import Gradient
from psjob.wire.frame import Header, WireError


class EarlyPushes:
    """Of one worker, and used by the threads that read its streams: at most one gradient a block, and `most` bytes together."""

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, 0
        self._by_block: dict[int, tuple[int, int, Gradient]] = {}
        self._lock = threading.Lock()

    def keep(self, header: Header, gradient: Gradient) -> None:
        """Hold what came by an EARLY frame, if there is room and no later one of its block is here; else give it back."""
        with self._lock:
            clock, number, _ = self._by_block.get(header.block, (-1, -1, None))
            if (clock, number) < (header.clock, header.request):
                self._drop(header.block)
                size = _nbytes(gradient)
                if self._bytes + size <= self._most:
                    self._by_block[header.block] = (header.clock, header.request, gradient)
                    self._bytes += size
                    return
        gradient.free()

    def take(self, header: Header) -> Gradient:
        """The gradient that a HELD push names. Raises WireError where it is not here; the worker then pushes the block whole."""
        with self._lock:
            clock, number, gradient = self._by_block.pop(header.block, (-1, 0, None))
            self._bytes -= 0 if gradient is None else _nbytes(gradient)
        if gradient is None or (clock, number) != (header.clock, header.part):
            raise WireError(f"push of block {header.block} names early data {header.part} of step {header.clock}, which is not held here")
        return gradient

    def drop(self, block: int, clock: int) -> None:
        """Other contents of the block come, or none: what was held up to that clock is not the push."""
        with self._lock:
            if self._by_block.get(block, (clock + 1,))[0] <= clock:
                self._drop(block)

    def clear(self) -> None:
        """A stream has ended, and the others do."""
        with self._lock:
            for block in list(self._by_block):
                self._drop(block)

    def nbytes(self) -> int:
        """Bytes that are held."""
        return self._bytes

    def _drop(self, block: int) -> None:
        held = self._by_block.pop(block, None)
        if held is not None:
            self._bytes -= _nbytes(held[2])
            held[2].free()


def _nbytes(gradient: Gradient) -> int:
    return gradient.flat.numel() * gradient.flat.element_size()
