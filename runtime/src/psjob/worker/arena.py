"""The memory in which a worker lends its gradients to the shards of its host.

It has a place for every block. A gradient that the script keeps from step to step (it zeroes it instead of dropping it) comes
to live there, and then no byte is copied. Any other is copied in before its push is announced.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch

from psjob.layout import memory
from psjob.layout.memory import LentSpan
from psjob.layout.packing import Pack
from psjob.wire.shared import Region

_SEEN = "_psjob_pushed"
"""Set on a gradient that was pushed: where the next step finds it again, the script keeps it."""


class Arena:
    """Used by the script's thread, and by a link's where it pushes again. Nothing in it changes between a push and its answer."""

    def __init__(self, span: LentSpan) -> None:
        self.span = span
        self.region = Region.lend(span.size)
        layout = span.layout
        self.packs = [Pack(b, memory.lent(self.region, span.offsets[b.index], b.length, b.dtype), layout.table) for b in layout.blocks]
        self._homes: dict[int, torch.Tensor] = {}
        for row, spec in enumerate(layout.table):
            place = span.place(row)
            if place is not None:
                self._homes[row] = memory.lent(self.region, place, spec.numel, spec.dtype).view(spec.shape)
        self._kept: dict[int, torch.Tensor] = {}
        """Gradients of the script that live here, by row."""
        self._lock = threading.Lock()
        self._staged: set[int] = set()
        """Blocks of the clock in hand that are in their places: a shard may be reading them, so what is pushed again stays as it is."""

    def lay(self, row: int, grad: torch.Tensor) -> torch.Tensor | None:
        """A tensor in the row's place with the values of `grad`, as one that the script keeps; None where it has no place.

        One that was given before, and that the script holds still, is moved out of it.
        """
        home, spec = self._homes.get(row), self.span.layout.table[row]
        place = self.span.place(row)
        if home is None or place is None or self.region.withdrawn or grad.device != home.device or grad.dtype != home.dtype:
            return None
        old = self._kept.pop(row, None)
        if old is not None and old.data_ptr() == home.data_ptr() and not _forgotten(old):
            old.data = old.detach().clone()
        lent = memory.lent(self.region, place, spec.numel, spec.dtype)
        made = torch.empty(0, dtype=lent.dtype, device="cpu")
        made.set_(lent.untyped_storage(), 0, home.shape, home.stride())  # no view: nothing else holds its storage
        made.copy_(grad)
        self._kept[row] = made
        return made

    def begin(self, grads: Sequence[torch.Tensor | None], scaled: bool) -> frozenset[int]:
        """Rows whose gradient lies in its place already. One that is to be pushed `scaled` may not: the script would see the factor."""
        with self._lock:
            self._staged.clear()
        for row, old in list(self._kept.items()):
            if scaled or grads[row] is not old or old.data_ptr() != self._homes[row].data_ptr():
                del self._kept[row]
                if old.data_ptr() == self._homes[row].data_ptr():  # perhaps the script holds it still
                    old.data = old.detach().clone()
        if not scaled:
            for row, grad in enumerate(grads):
                if grad is not None and row not in self._kept and row in self._homes:
                    self._settle(row, grad)
        return frozenset(self._kept)

    def _settle(self, row: int, grad: torch.Tensor) -> None:
        home = self._homes[row]
        if not hasattr(grad, _SEEN):
            setattr(grad, _SEEN, True)
        elif is_alone(grad, home):
            home.copy_(grad)
            grad.data = home
            self._kept[row] = grad

    def stage(self, block: int, grads: Sequence[torch.Tensor | None], scale: float, kept: frozenset[int]) -> bool:
        """Bring a block's gradients into its place, but for the rows that are `kept` there. False: shards do not see them there."""
        pack = self.packs[block]
        with self._lock:
            if block in self._staged or (kept and pack.rows <= kept):
                return True
            pack.gather(grads, kept)
            if scale != 1.0:
                pack.flat.mul_(scale)
            if self.region.withdrawn:
                return False  # the region may have become private before all of it was there
            self._staged.add(block)
        return True

    def withdraw(self) -> None:
        """Nothing that this process writes from now on reaches a shard, which may still hold a push of the clock in hand."""
        self.region.withdraw()


def _forgotten(tensor: torch.Tensor) -> bool:
    """Does nobody but one caller, who was just given its only reference, hold the tensor or its memory?"""
    storage: Any = tensor.untyped_storage()
    return sys.getrefcount(tensor) <= 3 and bool(torch._C._storage_Use_Count(storage._cdata) <= 2)


def is_alone(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Could `tensor` have its memory changed for that of `like`, and nobody else see it? Not where other tensors share its memory."""
    if type(tensor.data) is not torch.Tensor or tensor.device != like.device or tensor.dtype != like.dtype or tensor.shape != like.shape:
        return False
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.is_inference():
        return False
    storage: Any = tensor.untyped_storage()
    whole = not storage.is_shared() and storage.resizable() and storage.nbytes() == tensor.numel() * tensor.element_size()
    return bool(whole and torch._C._storage_Use_Count(storage._cdata) <= 2)  # the tensor, and the object asked here
