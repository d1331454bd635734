"""The staleness of pushes: of each that counts, its lag and its gap, and what they say of the learning rate.

The *lag* is the updates between the weights that a gradient was computed on and those that it is applied to. The *gap* is the root
mean square of what the weights have moved meanwhile (Barkai et al. 2020). Both are estimates on a few blocks, so that a push costs the
same whatever the size of the model. The lag is the largest of theirs, the gap that of a fixed sample of their elements. The lag is of
every push, the gap of the pushes that are `compared`. In a steady mode (sync) both are 0 by definition, and nothing here is made.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from psjob.rules.stability import RULES, Guard
from psjob.shard.cell import Cell, Gradient
from psjob.shard.histogram import Histogram
from psjob.shard.pending import Arrived

BLOCKS = 4
"""Blocks of a shard that are looked at, spread over all of them."""
ELEMENTS = 1024
"""Elements of a shard that are looked at, spread over those blocks."""
RUN = 8
"""Neighbours that are looked at together: half a cache line."""
FIRST = 256
"""Versions of a block at its beginning of which every push is compared."""
TOGETHER = 8
"""Versions in a row that are compared or not: the guard's pairs are of pushes that overlap."""
LAGS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
GAPS = tuple(step * 10.0**power for power in range(-7, 2) for step in (1, 3))
log = logging.getLogger("psjob.shard")


def compared(version: int) -> bool:
    """Are weights of this version kept when a worker is sent them, to see how far they have moved when its push comes?

    Of the first ones all are, so that a learning rate that is too high is seen soon. Then an eighth are, by squares of a place times the
    golden section. These fall evenly on workers that come in turn, however many they are (Weyl 1916).
    """
    return version < FIRST or (version // TOGETHER) ** 2 * 2654435769 % 2**32 < 2**32 // 8


class StalenessMetrics:
    """Lag and gap of the pushes that counted here. A push is seen when the last of `blocks`, those looked at, has taken its part of it."""

    def __init__(self, blocks: int, guard: Guard | None) -> None:
        self.guard = guard
        self._blocks = blocks
        self._lag, self._gap = Histogram(LAGS), Histogram(GAPS)
        self._began = time.monotonic()
        self._open: dict[tuple[int, int], _Seen] = {}
        """By rank and clock."""
        self._lock = threading.Lock()

    def told(self) -> dict[str, Any]:
        """The histograms, as contract.STATUS_KEYS has them."""
        with self._lock:
            return {"lag": self._lag.told(), "gap": self._gap.told()}

    def word(self, attempt: int) -> dict[str, Any]:
        """What goes to the coordinator."""
        return {"did": "staleness", "attempt": attempt, "began": self._began, **self.told()}

    def add(self, rank: int, clock: int, part: _Seen, hyperparameters: Mapping[str, float | bool]) -> None:
        """A block has taken its part of a push."""
        with self._lock:
            whole = self._open.setdefault((rank, clock), _Seen(part.lag))
            whole.take(part)
            if whole.blocks < self._blocks:
                return
            del self._open[rank, clock]
            self._lag.see(whole.lag)
            if whole.elements:
                self._gap.see(math.sqrt(whole.squares / whole.elements))
            warning = self.guard.see(whole.lag, whole.agreed, whole.moved, hyperparameters) if self.guard is not None else None
        if warning:
            log.warning("%s", warning)


@dataclass
class _Seen:
    """What blocks have shown of a push: sums over their samples."""

    lag: int
    blocks: int = 0
    squares: float = 0.0
    elements: int = 0
    agreed: float = 0.0
    moved: float = 0.0

    def take(self, part: _Seen) -> None:
        self.lag = max(self.lag, part.lag)
        self.blocks += 1
        self.squares += part.squares
        self.elements += part.elements
        self.agreed += part.agreed
        self.moved += part.moved


class Sample(NamedTuple):
    """`runs` of `length` elements, the first ones of every `step`."""

    runs: int
    length: int
    step: int

    @classmethod
    def of(cls, elements: int, wanted: int) -> Sample:
        """About `wanted` of so many elements, spread evenly."""
        if elements <= wanted:
            return cls(1, elements, elements)
        runs = max(1, wanted // RUN)
        # An odd step: one that divides the rows of a matrix would meet the same columns again and again.
        return cls(runs, min(RUN, elements), max(RUN, (elements // runs - 1) | 1))

    def of_block(self, whole: torch.Tensor) -> torch.Tensor:
        """These elements of a 1-D tensor, a view of two dimensions."""
        return whole.as_strided((self.runs, self.length), (self.step, 1))


class BlockStaleness:
    """One block's part; called with its lock held."""

    def __init__(self, staleness: StalenessMetrics, sample: Sample) -> None:
        self._sight, self._sample = staleness, sample
        self._sent: dict[int, tuple[int, torch.Tensor]] = {}
        """By rank: the last version that is compared and that it was answered with, and its weights."""
        self._first: tuple[int, torch.Tensor, torch.Tensor] | None = None
        """An earlier gradient, what it was computed on, and the number of updates before it was applied."""

    def answered(self, rank: int, weights: torch.Tensor, version: int) -> None:
        """This worker's next gradient is of these weights."""
        if compared(version):
            self._sent[rank] = version, self._sample.of_block(weights).to(torch.float64, copy=True)

    def counted(self, batch: Sequence[Arrived], weights: torch.Tensor, n: int, group: int) -> None:
        """These pushes make the update that follows the first `n`; `weights` are those before it."""
        for arrived in batch:
            push, grad = arrived.push, arrived.grad
            if not isinstance(grad, Gradient) or push.base is None:
                continue
            seen = _Seen(n - push.base)
            version, sent = self._sent.get(push.worker, (None, None))
            if sent is not None and version == push.base:
                seen.squares, seen.elements = _product(gone := self._sample.of_block(weights) - sent, gone), sent.numel()
                if self._sight.guard is not None:
                    seen.agreed, seen.moved = self._pair(self._sample.of_block(grad.flat), sent, push.base, n)
            self._sight.add(push.worker, push.clock, seen, arrived.info.hyperparameters[group])

    def _pair(self, grad: torch.Tensor, sent: torch.Tensor, base: int, n: int) -> tuple[float, float]:
        """⟨Δg, Δw⟩ and ⟨Δw, Δw⟩ to an earlier gradient that these weights know nothing of."""
        if self._first is None or base > self._first[0]:
            self._first = (n, grad.to(torch.float64, copy=True), sent)
            return 0.0, 0.0
        moved = sent - self._first[2]
        return _product(grad - self._first[1], moved), _product(moved, moved)


def watch(cells: Sequence[Cell], rule: str, first: bool) -> StalenessMetrics:
    """Look at the pushes of these cells; on the `first` shard the learning rate is judged too, where the rule can be."""
    looked = cells[:: max(1, -(-len(cells) // BLOCKS))]
    staleness = StalenessMetrics(len(looked), Guard(rule) if first and rule in RULES else None)
    for cell in looked:
        cell.staleness = BlockStaleness(staleness, Sample.of(cell.block.length, ELEMENTS // len(looked)))
    return staleness


def _product(x: torch.Tensor, y: torch.Tensor) -> float:
    """⟨x, y⟩, both float64, so that no square overflows."""
    return float(x.view(-1).dot(y.view(-1)))
