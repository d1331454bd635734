"""A shard's part in clipping by the norm of the mean gradient (`training.maxGradNorm`).

A block whose pushes are all here is reduced and measured, and waits. When all blocks of an update are, the coordinator is told the sum
of their squares, in the order of the blocks. Once it has those of all shards it orders one factor. Every block multiplies its reduced
gradient by it before the update: the gradient is clipped as if it lay in one process.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from psjob.shard.store import Store

PART = 1024
"""Elements that are summed in float32 before their sums are added in float64."""


class ClipNorms:
    """Of one store. `measured` tells the coordinator."""

    def __init__(self) -> None:
        self.measured: Callable[[dict[str, Any]], None] = lambda body: None
        self._squares: dict[int, float] = {}
        """By block, of the update under way."""
        self._limit = math.inf
        """The lowest that was told of these."""
        self._passed: set[int] = set()
        """Blocks that have made this update already: no worker asked for a norm there. A right worker asks in all blocks or in none."""
        self.waits: int | None = None
        """The update of which some blocks are measured, and not all."""
        self._told: dict[str, Any] | None = None
        """What the coordinator was told and has not answered."""
        self.ordered: tuple[int, float] | None = None
        """The update that was ordered last, and its factor: a block that is measured for it again need not ask."""
        self._taken: tuple[int, float] | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Serving begins, or blocks were restored: nothing waits."""
        with self._lock:
            self._clear()
            self._told = None
            self.ordered, self._taken = self._taken, None

    def take_up(self, ordered: tuple[int, float] | None) -> None:
        """What a process before this one was ordered last: it holds when serving begins."""
        self._taken = ordered

    def factor(self, version: int) -> float | None:
        """What update `version` is multiplied by, if that was ordered; a process before this one may have made it in some blocks only."""
        return self.ordered[1] if self.ordered is not None and self.ordered[0] == version else None

    def note(self, store: Store, block: int, version: int, squares: float, limit: float) -> None:
        """A block of update `version` is measured, and waits. Called with its lock held."""
        with self._lock:
            if self.waits != version:
                self._clear()
                self.waits = version  # first: a block that passes from here on tells it
                self._passed = {index for index, cell in store.cells.items() if cell.n > version}
            self._squares[block] = squares
            self._limit = min(self._limit, limit)
            body = self._whole(store)
        if body is not None:
            self.measured(body)

    def passed(self, store: Store, block: int, made: int) -> None:
        """A block has made updates up to `made` without a norm, while others wait for theirs. Called with its lock held."""
        body = None
        with self._lock:
            if self.waits is not None and made > self.waits:
                self._passed.add(block)
                body = self._whole(store)
        if body is not None:
            self.measured(body)

    def _whole(self, store: Store) -> dict[str, Any] | None:
        """What the coordinator is told, once all blocks are here."""
        if not self._squares or len(self._squares) + len(self._passed) < len(store.cells):
            return None
        total = sum(self._squares[index] for index in store.cells if index in self._squares)
        self._told = body = {
            "did": "measured", "recovery": store.recovery, "version": self.waits, "limit": self._limit,
            "squares": total if math.isfinite(total) else None, "nan": math.isnan(total),
        }  # fmt: skip
        self._clear()
        return body

    def _clear(self) -> None:
        self._squares.clear()
        self._passed.clear()
        self._limit, self.waits = math.inf, None

    def tell_again(self) -> None:
        """On a new stream to the coordinator: what the one before may have lost."""
        with self._lock:
            body = self._told
        if body is not None:
            self.measured(body)

    def carry_out(self, store: Store, body: Mapping[str, Any]) -> None:
        """Make the updates that wait with the ordered factor, and answer. What comes again, or of before a restore, changes nothing."""
        version, factor = read_order(body)
        with self._lock:
            if self._told is None or (int(body["recovery"]), version) != (self._told["recovery"], self._told["version"]):
                return
            self._told = None
        store.note_clip(version, factor)
        try:
            for cell in store.cells.values():
                with cell.lock:
                    before = cell.n
                    if before > version:
                        continue  # it has made this update without a norm
                    cell.clip(version, factor)
                    store.moved(before, cell.n)
        except Exception as error:  # some blocks have the update and others have not
            store.on_failure(f"update {version} was not made, {type(error).__name__}: {str(error)[:300]}")
            return
        if store.counters.first_applied is None:
            store.counters.first_applied = time.time()
        store.tell_step()


def read_order(body: Mapping[str, Any]) -> tuple[int, float]:
    """Version and factor of an order to clip."""
    return int(body["version"]), float("nan") if body["factor"] is None else float(body["factor"])


def squares_of(gradient: torch.Tensor) -> float:
    """Sum of the squares of a flat tensor, exact to about a millionth of it: float32 within parts, float64 between them."""
    flat = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
    whole = len(flat) // PART * PART
    total = 0.0
    if whole:
        parts = flat[:whole].view(-1, 1, PART)
        total = float(torch.bmm(parts, parts.transpose(1, 2)).sum(dtype=torch.float64))
    if whole < len(flat):
        rest = flat[whole:].double()
        total += float(rest.dot(rest))
    return total
