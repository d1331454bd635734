"""Mixing of whole numbers, so that near ids end far apart. The same on every machine: torch's int64 and int32 wrap."""

from __future__ import annotations

import hashlib
from typing import Final

import torch

GOLDEN: Final = -7046029254386353131
"""0x9E3779B97F4A7C15 as int64: 2^64 over the golden ratio, the step of splitmix64."""


def splitmix64(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) of int64s."""
    x = x + GOLDEN
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def seed_of(*parts: str | int) -> int:
    """An int64 from words and numbers: the first 8 bytes of their sha256."""
    digest = hashlib.sha256("\0".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right, zeros coming in."""
    return (x >> by) & ((1 << (64 - by)) - 1)
