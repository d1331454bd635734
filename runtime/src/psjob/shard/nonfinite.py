"""Pushes that hold NaN or inf: how many came, and which was the first. `training.nonFinite` says what becomes of their update.

Workers look before they push, where it is skip or refuse. A shard looks again, since a worker may be compromised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from psjob.layout.blocks import Block
from psjob.shard.oddpushes import OddPushes
from psjob.shard.pending import Arrived

DONE = {
    "pass": "was applied (training.nonFinite: skip leaves it out)",
    "skip": "was left out (training.nonFinite is skip)",
    "refuse": "training.nonFinite is refuse (skip leaves such a step out, pass applies it)",
}
"""What became of such a push, by policy."""
WHOLE = 1 << 16
"""Elements of a gradient that are looked at whole at each update."""
PARTS = 8


class NonFinitePushes(OddPushes):
    """What is found in a push: the tensor that held such a number."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = "pass"
        """`training.nonFinite`."""
        self.on_refused: Callable[[str], None] = lambda sentence: None
        """Told of a push that is to end the job."""
        self.names: Sequence[str] = ()
        """Of the model's tensors, in the table's order, then of tables of rows."""

    def named(self, index: int) -> str:
        """The name of a tensor or table."""
        return self.names[index] if 0 <= index < len(self.names) else f"tensor {index}"

    @property
    def passes(self) -> bool:
        """Is an update that is not finite made? Then what is large is looked at in parts."""
        return self.policy == "pass"

    def bad(self, numbers: torch.Tensor, update: int) -> bool:
        """Does this sum or push hold NaN or inf, as far as it is looked at?"""
        looked = looked_at(numbers, update) if self.passes else numbers
        return not is_sound(looked) and first_bad(numbers) is not None

    def told(self) -> dict[str, Any] | None:
        """For the status: as contract.STATUS_KEYS has it."""
        if self.first is None:
            return None
        return {"pushes": self.count, **dict(zip(("worker", "step", "tensor"), self.first, strict=True))}

    def sentence(self) -> str | None:
        if self.first is None:
            return None
        worker, clock, tensor = self.first
        return f"worker {worker}'s gradient of {tensor[:100]} held NaN or inf at step {clock} and {DONE[self.policy]}"

    def left_out(self) -> bool:
        """Is an update that was found to be bad not made? Ends the job where the policy says so; once it is noted."""
        if self.policy == "refuse":
            self.on_refused(self.sentence() or "a gradient held NaN or inf, and training.nonFinite is refuse")
        return not self.passes

    def blame(self, block: Block, batch: Sequence[Arrived], reduced: torch.Tensor) -> None:
        """An update of `block` is not finite: note the pushes that are to blame. `reduced` may lie in the memory of the first push."""
        over, found = None, False
        for arrived in batch:
            flat = getattr(arrived.grad, "flat", None)
            if not isinstance(flat, torch.Tensor):
                continue
            if flat.data_ptr() == reduced.data_ptr():
                over = arrived
            elif (at := first_bad(flat)) is not None:
                self.note(arrived.push.worker, arrived.push.clock, self._tensor(block, at))
                found = True
        if found or (at := first_bad(reduced)) is None:
            return
        if over is not None:
            self.note(over.push.worker, over.push.clock, self._tensor(block, at))
        else:  # each is finite
            push = batch[0].push
            self.note(push.worker, push.clock, f"{self._tensor(block, at)} (added to those of others)")

    def _tensor(self, block: Block, at: int) -> str:
        inside = [piece for piece in block.pieces if piece.block_offset <= at < piece.block_offset + piece.length]
        return self.named(inside[0].tensor) if inside else f"block {block.index}"


def looked_at(numbers: torch.Tensor, update: int) -> torch.Tensor:
    """What is looked at of a gradient: all of it, or where it is large an eighth of it at an update, each in turn.

    A whole look takes a tenth of the time of a large update. NaN in one weight is found at the latest eight updates later, since it
    stays; NaN all over a gradient, as after a loss that is NaN, at once.
    """
    flat = numbers.view(-1)
    if flat.numel() <= WHOLE:
        return flat
    size = -(-flat.numel() // PARTS)
    begin = update % PARTS * size
    return flat[begin : begin + size]


def is_sound(numbers: torch.Tensor) -> bool:
    """Is the sum of these finite? Where it is, so is each of them; where it is not, the sum of large ones may be to blame."""
    return not numbers.is_floating_point() or math.isfinite(float(numbers.sum()))


def first_bad(numbers: torch.Tensor) -> int | None:
    """The place of the first NaN or inf of a tensor of any shape; None without one."""
    if is_sound(numbers):
        return None
    bad = torch.isfinite(numbers).logical_not_().reshape(-1).nonzero()
    return int(bad[0]) if len(bad) else None
