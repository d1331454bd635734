"""What a worker and the shards of its host lend each other: its gradients, and their answers."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from psjob.layout.blocks import Layout
from psjob.layout.memory import LentSpan
from psjob.wire import handover, shared
from psjob.wire.frame import Header, WireError
from psjob.wire.shared import Region
from psjob.worker.arena import Arena
from psjob.worker.mirror import Mirror

SLOTS = 8
"""Answers in lent memory that this worker takes at a time from a shard whose blocks do not hold still."""


class Sharing:
    """Empty until a shard offers. `steady`: answers lie in the shards' blocks, which hold still until this worker pushes again."""

    def __init__(self, layout: Layout, steady: bool) -> None:
        self.steady = steady
        self.span = LentSpan.of(layout, shared.PAGE)
        self._making = threading.Lock()
        """Links come each by a thread of its own, and all lend the same memory."""
        self._arena: Arena | None = None
        self._mirror: Mirror | None = None
        self._kept: frozenset[int] = frozenset()
        self._outside: Sequence[torch.Tensor | None] | None = ()
        """The targets to which answers must be copied, None for the others; None: all see them as they are."""

    def take(self, index: int, blocks: Sequence[int], offer: Mapping[str, Any]) -> Region:
        """Hand over the gradients' memory to shard `index` and take that of its answers. Raises OSError or WireError."""
        size = int(offer["bytes"])
        if self.steady and size != self.span.size:
            raise WireError(f"shard {index} lends {size} bytes, expected {self.span.size}")
        with self._making:
            arena = self._arena = self._arena or Arena(self.span)
        region = Region.borrow(handover.fetch(str(offer["name"]), str(offer["token"]), arena.region.fd), size)
        if self.steady:
            with self._making:
                self._mirror = self._mirror or Mirror(self.span)
                self._mirror.show(index, region, blocks)
        return region

    def adopt(self, parameters: Sequence[torch.Tensor]) -> None:
        """In a steady mode, let the model's parameters live where the shards have them."""
        if self._mirror is not None:
            self._mirror.adopt(parameters)

    def lay(self, row: int, grad: torch.Tensor) -> torch.Tensor | None:
        """Begin the row's gradient of the next push where the shards read it; None: it does not lie there.

        No push may be under way, and the caller adds to what is given until the next one begins.
        """
        return None if self._arena is None or not self.steady else self._arena.lay(row, grad)

    def begin(self, grads: Sequence[torch.Tensor | None] | None, scaled: bool) -> None:
        """A clock begins with these gradients (None: this rank is absent)."""
        self._kept = self._arena.begin(grads, scaled) if self._arena is not None and grads is not None else frozenset()

    def aim(self, targets: Sequence[torch.Tensor]) -> None:
        """Answers that come from now on are for these."""
        self._outside = targets if self._mirror is None else self._mirror.outside(targets)

    def place(self, block: int) -> tuple[int, int]:
        """Offset and length of a block where both sides lend it."""
        return self.span.offsets[block], self.span.layout.blocks[block].nbytes

    def stage(self, block: int, grads: Sequence[torch.Tensor | None], scale: float) -> bool:
        """Bring a block's gradients where the shards read them, before they are told. False: they have to be sent."""
        assert self._arena is not None
        return self._arena.stage(block, grads, scale, self._kept)

    def land(self, header: Header) -> bool:
        """An answer lies in lent memory: copy it to those targets that do not live there. False: it has to be read as any other."""
        if self._mirror is None:
            return False
        if (header.part, header.length) != self.place(header.block):
            raise WireError(f"PARAM of block {header.block}: {header.length} bytes at {header.part}, expected {self.place(header.block)}")
        if self._outside is not None:
            self._mirror.scatter(header.block, self._outside)
        return True

    def refresh(self, block: int) -> None:
        """What of a block lives in its shard's memory is as the shard has it, whatever the script has written there."""
        if self._mirror is not None:
            self._mirror.refresh(block)

    def shows(self, row: int, target: torch.Tensor) -> bool:
        """Is what the row's parameter holds in this moment the shard's memory as it is?"""
        return self._mirror is not None and self._mirror.shows(row, target.detach())

    def settle(self, others: int) -> None:
        """No update reaches the model any more: who reads it later sees what it holds. `others` may do the same at this moment."""
        if self._mirror is not None:
            self._mirror.settle(others)

    def withdraw(self) -> None:
        """The script goes on without an answer, or this is a fork: what it writes must not reach a push that a shard still holds."""
        if self._arena is not None:
            self._arena.withdraw()
