"""What a codec is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import torch

SPAN: Final = 1 << 16
"""Elements that are worked on at a time: their scratch of float32 stays in a core's own cache."""


class CodecError(ValueError):
    """A body that the codec cannot have written; the text names what was read and what was expected."""


@dataclass(frozen=True)
class CodecKey:
    """Which push or answer this is: random choices follow only from it, so both ends make the same ones."""

    seed: int = 0
    clock: int = 0
    block: int = 0
    rank: int = 0


class Codec(Protocol):
    """One way to write a block of `length` floating point numbers; objects hold no state.

    A codec with `feeds_back` loses much of a single block. Its residual, what was lost, must be added to the next one (error feedback): it
    encodes a float32 tensor of gradient plus residual, and leaves the new residual in it.
    """

    @property
    def name(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def feeds_back(self) -> bool: ...

    def bound(self, length: int, ratio: float) -> int:
        """The most bytes that a block of `length` elements becomes; known before anything is read or allocated."""

    def check_size(self, size: int, length: int, ratio: float) -> None:
        """Raise CodecError unless a body of `size` bytes can hold such a block."""

    def encode(self, source: torch.Tensor, body: torch.Tensor, key: CodecKey, ratio: float) -> int:
        """Write `source` (1-D, floating point) to `body` (uint8, `bound` bytes or more); bytes written.

        0: it holds inf, NaN or what this form has no number for, and must go as it is; `source` is then unchanged. With
        `feeds_back`, `source` is float32 and afterwards holds the residual.
        """

    def decode(self, body: torch.Tensor, out: torch.Tensor, key: CodecKey, ratio: float) -> None:
        """Write every element of `out` (1-D, floating point) from a whole body of uint8. Raises CodecError, and never writes elsewhere."""


class FixedSize(ABC):
    """Of a codec whose bodies have one size."""

    name: str

    @abstractmethod
    def bound(self, length: int, ratio: float) -> int:
        """As of `Codec`: the size of a body."""

    def check_size(self, size: int, length: int, ratio: float) -> None:
        """Raise CodecError unless a body has the one size that it can have."""
        if size != (expected := self.bound(length, ratio)):
            raise CodecError(f"a {self.name} body of {length} elements has {size} bytes, expected {expected}")


def largest(source: torch.Tensor) -> float:
    """The largest magnitude of `source`; inf where it holds inf or NaN."""
    found = 0.0
    for span in spans(source.numel()):
        low, high = torch.aminmax(source[span])
        here = float(torch.maximum(low.neg(), high))
        if not math.isfinite(here):
            return math.inf
        found = max(found, here)
    return found


def spans(length: int) -> Iterator[slice]:
    """`length` elements in stretches of at most SPAN."""
    for begin in range(0, length, SPAN):
        yield slice(begin, min(begin + SPAN, length))
