"""The sparse work that all programs share: which rows of one table each cycle asks for and updates."""

from __future__ import annotations

import torch

TABLE = 2_000_000
UNIQUE = 100_000
WIDTH = 64
RATE = 0.05
EPS = 1e-8


def batches(count: int = 8, seed: int = 0) -> list[torch.Tensor]:
    """`count` batches of UNIQUE different int64 ids below TABLE, ascending as torch.unique leaves them; programs take them in turn."""
    chance = torch.Generator().manual_seed(seed)
    return [torch.randperm(TABLE, generator=chance)[:UNIQUE].sort().values for _ in range(count)]


def gradient() -> torch.Tensor:
    """The gradient that every cycle pushes, [UNIQUE, WIDTH] of float32."""
    return torch.randn(UNIQUE, WIDTH, generator=torch.Generator().manual_seed(1)) * 0.01
