"""What `auto` takes: the measured speed of a link decides.

A codec pays where the bytes that it saves would be longer on the wire than it takes to encode and decode. Bytes saved ÷ those
seconds is the speed below which it does. docs/compression.md has the measured figures. If several pay, the steps between
them leave the more exact one in place until the next saves several times what it costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psjob.codecs import NONE
from psjob.contract import PULL_CODECS

LADDER: Final = ((20e9, NONE), (5e9, "bf16"), (0.1e9, "int8"), (0.0, "topk"))
"""(bits a second, codec): the first whose speed is reached."""
ENOUGH_BYTES: Final = 16 << 20
ENOUGH_CLOCKS: Final = 20
LEAST_CLOCKS: Final = 3
"""The first clocks are slower than those after them."""


@dataclass
class Goodput:
    """What a receiver saw of a link: bytes of payloads, and the seconds from each header to its last byte."""

    bytes: int = 0
    seconds: float = 0.0
    first: int | None = None
    """The clock of the first payload."""

    def add(self, clock: int, count: int, seconds: float) -> None:
        """A payload of `count` bytes came."""
        if self.first is None:
            self.first = clock
        if clock > self.first:  # buffers and windows still grow at the first
            self.bytes += count
            self.seconds += seconds

    def enough(self, clock: int) -> bool:
        """Is this a measurement, at the end of `clock`?"""
        clocks = 0 if self.first is None else clock - self.first
        return clocks >= LEAST_CLOCKS and (self.bytes >= ENOUGH_BYTES or clocks >= ENOUGH_CLOCKS)

    @property
    def bits(self) -> float:
        """Bits a second; 0 where nothing came."""
        return 8 * self.bytes / self.seconds if self.seconds > 0 else 0.0


def for_push(bits: float) -> str:
    """The codec for gradients over a link of `bits` a second; none where nothing was measured."""
    return next(name for least, name in LADDER if bits >= least) if bits > 0 else NONE


def for_pull(bits: float) -> str:
    """The codec for weights: bf16 where gradients would be compressed at all."""
    name = for_push(bits)
    return name if name in PULL_CODECS else "bf16"
