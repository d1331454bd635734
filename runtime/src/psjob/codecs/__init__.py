"""How a block's numbers are written in fewer bytes. Pure: tensors, key and ratio in; bytes out, or numbers written in place."""

from __future__ import annotations

from typing import Final

from psjob.codecs.base import Codec, CodecError, CodecKey
from psjob.codecs.bf16 import BF16
from psjob.codecs.fp16 import FP16
from psjob.codecs.int8 import Int8
from psjob.codecs.randomk import RandomK
from psjob.codecs.topk import TopK
from psjob.layout.blocks import FLOATS, Block

__all__ = ["CODECS", "NONE", "Codec", "CodecError", "CodecKey", "for_block", "named", "numbered"]

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
