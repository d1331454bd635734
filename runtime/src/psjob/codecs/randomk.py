"""k = ⌈ratio · length⌉ elements chosen by chance, 4 bytes each: both ends know the places, so only values are sent.

The block is cut in k stretches, and one element of each is chosen by a hash of (seed, clock, block, rank, stretch). Over the clocks every
element has the same chance. The residual is added to the next gradient. Sources: Stich, Cordonnier, Jaggi, "Sparsified SGD with
Memory" (2018); the hash is SplitMix64 (Steele, Lea, Flood, 2014), in whole numbers only, so that it is the same everywhere.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from psjob.codecs.base import CodecKey, FixedSize, largest
from psjob.codecs.topk import most

_GAMMA: Final = 0x9E3779B97F4A7C15
_MIXES: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
_WORD: Final = (1 << 64) - 1


class RandomK(FixedSize):
    """Body: the values (float32), in the order of their places."""

    name = "randomk"
    number = 5
    feeds_back = True

    def bound(self, length: int, ratio: float) -> int:
        """A value for each of k."""
        return 4 * most(length, ratio)

    def encode(self, source: torch.Tensor, body: torch.Tensor, key: CodecKey, ratio: float) -> int:
        """Refuses (0) a block with inf or NaN."""
        if not math.isfinite(largest(source)):
            return 0
        chosen = places(source.numel(), most(source.numel(), ratio), key)
        size = 4 * chosen.numel()
        body[:size].view(torch.float32).copy_(source[chosen])
        source[chosen] = 0.0
        return size

    def decode(self, body: torch.Tensor, out: torch.Tensor, key: CodecKey, ratio: float) -> None:
        """Puts the values where `key` says; the rest is 0."""
        self.check_size(body.numel(), out.numel(), ratio)
        out.zero_()
        out[places(out.numel(), most(out.numel(), ratio), key)] = body.view(torch.float32).to(out.dtype)


def places(length: int, k: int, key: CodecKey) -> torch.Tensor:
    """The k rising places (int64) that `key` chooses of `length`, 1 ≤ k ≤ `length`."""
    state = 0
    for word in (key.seed, key.clock, key.block, key.rank):
        state = _mix_one((state + word + _GAMMA) & _WORD)
    numbers = torch.arange(k, dtype=torch.int64, device="cpu")
    begins = numbers * length // k
    widths = (numbers + 1) * length // k - begins
    chance = _mix(numbers * _signed(_GAMMA) + _signed(state)) & 0x7FFFFFFF
    return begins + (chance * widths >> 31)


def _mix_one(word: int) -> int:
    for shift, factor in _MIXES:
        word = (word ^ word >> shift) * factor & _WORD
    return word


def _mix(words: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finisher on int64 that wraps around; its shifts fill with zeros."""
    for shift, factor in _MIXES:
        words = (words ^ (words >> shift & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return words


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
