"""How large one worker's push may be (`training.maxPushNorm`): what is larger is scaled down, block by block, counted and reported."""

from __future__ import annotations

import math
from typing import Any

import torch

from psjob.shard.decided import squares_of
from psjob.shard.oddpushes import OddPushes


class PushNorms(OddPushes):
    """What is found in a push: the block or table that was too large, and its norm; None where it held NaN or inf."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def bounded(self, worker: int, clock: int, name: str, numbers: torch.Tensor) -> torch.Tensor:
        """`numbers`, a gradient of any shape, or another tensor whose 2-norm is the limit. One that holds NaN or inf gives zeros."""
        norm = norm_of(numbers)
        if norm is not None and norm <= self.limit:
            return numbers
        self.note(worker, clock, name, norm)
        if norm is None:
            return torch.zeros_like(numbers)
        # In half precision the factor itself could be lost.
        wide = numbers.float() if numbers.dtype in (torch.float16, torch.bfloat16) else numbers
        return (wide * (self.limit / norm)).to(numbers.dtype)

    def told(self) -> dict[str, Any] | None:
        """For the status: as contract.STATUS_KEYS has it."""
        if self.first is None:
            return None
        return {"pushes": self.count, **dict(zip(("worker", "step", "of", "norm"), self.first, strict=True))}

    def sentence(self) -> str | None:
        if self.first is None:
            return None
        worker, clock, name, norm = self.first
        was = "held NaN or inf and was left out" if norm is None else f"had a norm of {norm:.4g} and was scaled down to it"
        return f"worker {worker}'s push of {name} at step {clock} is beyond training.maxPushNorm {self.limit:g}: it {was}"


def norm_of(numbers: torch.Tensor) -> float | None:
    """The 2-norm, to about a millionth of it, also where squares are beyond float32; None of what holds NaN or inf."""
    flat = numbers.reshape(-1)
    if not len(flat):
        return 0.0
    squares = squares_of(flat)
    if math.isfinite(squares) and squares > 1e-30:
        return math.sqrt(squares)
    largest = float(flat.abs().max())
    if not math.isfinite(largest):
        return None
    if largest == 0.0:
        return 0.0
    return largest * math.sqrt(squares_of(flat.float() / largest if flat.dtype != torch.float64 else flat / largest))
