"""A block as it stood at a cut, without a copy as long as nobody changes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import torch

from psjob.rules.base import BlockState
from psjob.shard.spare import PAGE, Spare


class Voided(Exception):
    """The cut was given up, or the block was replaced by a restore: there is nothing to write."""


class Pin:
    """`n`, `counts` and tensors of block `index` at a cut.

    Until someone is about to change the block these are the live tensors; then, or when someone comes to write it, a copy.
    `content` is the block's mark of its bytes: another object after each change. `lock` is the cell's: `keep` and `drop` are called with
    it held, the others without.
    """

    def __init__(self, index: int, n: int, state: BlockState, content: object, lock: threading.Lock, spare: Spare) -> None:
        self.index, self.n, self.content = index, n, content
        self.counts: dict[str, Any] = state.counts()
        self._tensors = {"weights": state.weights, **state.slots}
        self.shapes = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in self._tensors.items()}
        self.bytes = sum(tensor.nbytes for tensor in self._tensors.values())
        self._lock, self._spare = lock, spare
        self._settled = False
        self._void = False
        self.stopped = 0.0
        """Seconds for which an update waited for the copy."""

    def keep(self) -> None:
        """Copy the block, which is as it was at the cut, unless that is done or needless: afterwards it may change."""
        if not self._settled:
            began = time.monotonic()
            self._copy()
            self.stopped = time.monotonic() - began

    def _copy(self) -> None:
        whole = self._spare.place(self.index, room(self._tensors.values()))
        copies = {}
        at = 0
        for name, tensor in self._tensors.items():
            copies[name] = whole[at : at + tensor.nbytes].view(tensor.dtype).copy_(tensor)
            at += _pages(tensor)
        self._tensors = copies
        self._settled = True

    def drop(self, void: bool = False) -> None:
        """Nobody needs it any more; `void`: who takes it must know."""
        self._settled = True
        self._void = self._void or void
        self._tensors = {}

    def leave(self) -> None:
        """It is not to be written, or has been: no update copies it, and its copy goes."""
        with self._lock:
            self.drop()

    def give_up(self) -> None:
        """The cut is void."""
        with self._lock:
            self.drop(void=True)

    def take(self) -> dict[str, torch.Tensor]:
        """Its tensors by name, which nobody else changes. Raises Voided."""
        with self._lock:
            if self._void:
                raise Voided
            if not self._settled:
                self._copy()
            return self._tensors


def room(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of a copy of `tensors`. Each begins on a page, so that it can be written from where it lies."""
    return sum(_pages(tensor) for tensor in tensors)


def _pages(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // PAGE) * PAGE
