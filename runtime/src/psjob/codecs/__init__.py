"""How a block's numbers are written in fewer bytes. Pure: tensors, key and ratio in; bytes out, or numbers written in place.

What `auto` takes, the measured speed of a link decides. A codec pays where the bytes that it saves would be longer on the wire than it
takes to encode and decode. Bytes saved ÷ those seconds is the speed below which it does. docs/compression.md has the measured figures. If
several pay, the steps between them leave the more exact one in place until the next saves several times what it costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psjob import contract
from psjob.codecs.base import Codec, CodecError, CodecKey
from psjob.codecs.bf16 import BF16
from psjob.codecs.fp16 import FP16
from psjob.codecs.int8 import Int8
from psjob.codecs.randomk import RandomK
from psjob.codecs.topk import TopK
from psjob.layout.blocks import FLOATS, Block

__all__ = [
    "CODECS", "LADDER", "NONE", "Codec", "CodecError", "CodecKey", "Goodput", "for_block", "for_pull", "for_push", "named", "numbered",
]  # fmt: skip

NONE: Final = "none"
"""The block's own bytes; number 0 on the wire."""
CODECS: Final[dict[str, Codec]] = {codec.name: codec for codec in (BF16(), FP16(), Int8(), TopK(), RandomK())}
_BY_NUMBER: Final = {codec.number: codec for codec in CODECS.values()}


def named(name: str) -> Codec | None:
    """The codec of that name; None for `none`. Raises ValueError, naming those that exist."""
    if name == NONE:
        return None
    try:
        return CODECS[name]
    except KeyError:
        raise ValueError(f"there is no codec {name!r}; the codecs are {NONE}, {', '.join(CODECS)}") from None


def numbered(number: int) -> Codec:
    """The codec of a frame's `codec` field. Raises CodecError for one that does not exist."""
    try:
        return _BY_NUMBER[number]
    except KeyError:
        raise CodecError(f"codec {number} is not known; this side knows 0 (none) to {max(_BY_NUMBER)}") from None


def for_block(codec: Codec | None, block: Block, ratio: float) -> Codec | None:
    """The codec that carries this block: None where it holds no floating point numbers, or would not become smaller."""
    if codec is None or block.dtype not in FLOATS or codec.bound(block.length, ratio) >= block.nbytes:
        return None
    return codec


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
    return name if name in contract.PULL_CODECS else "bf16"
