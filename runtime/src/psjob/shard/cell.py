"""One block as a shard serves it: weights, optimizer state, the pushes that wait, the pulls that wait.

All methods are called with `lock` held. A block moves on when the mode says that the pushes at hand count; a reply is
given when the version a worker needs exists.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from psjob import memory
from psjob.layout import Block, live_ranges
from psjob.modes import Push, Served
from psjob.rules import reduction
from psjob.rules.base import BlockState, Rule
from psjob.shard.pins import Pin

if TYPE_CHECKING:
    from psjob.shard.rows import RowCell
_room = memory.Scratch()


@dataclass(frozen=True)
class Info:
    """What a worker's pushes are made with: its optimizer numbers a group, the tensors without a gradient, numbers a table."""

    numbers: tuple[Mapping[str, Any], ...]
    none: frozenset[int]
    rows: tuple[Mapping[str, Any], ...] = ()


class Gradient:
    """A received gradient in a buffer of its worker's, to which it goes back when it has been applied. `own`: it may be written to."""

    own = True

    def __init__(self, pool: list[torch.Tensor], size: int, block: Block) -> None:
        self._pool, self._buffer = pool, pool.pop() if pool else torch.empty(size, dtype=torch.uint8)
        self.flat = self._buffer[: block.nbytes].view(getattr(torch, block.dtype))

    def free(self) -> None:
        """The buffer may take another block."""
        self._pool.append(self._buffer)


class Lent(Gradient):
    """A gradient where its worker has it: the script may look at it until its step is answered."""

    own = False

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat

    def free(self) -> None:
        """Nothing: the worker writes there again when it has been answered."""


class Received(Protocol):
    """What a push brought, in a buffer that is given back."""

    def free(self) -> None: ...


@dataclass(frozen=True)
class Arrived:
    """A push that was admitted and is not yet applied. `grad` is None for an absent rank."""

    push: Push
    grad: Received | None
    skip: bool
    info: Info


class Replies(Protocol):
    """Where answers go: the stream of one worker."""

    def param(self, cell: Cell, waiter: Waiter) -> None: ...

    def rows(self, cell: RowCell, waiter: Waiter) -> None: ...

    def waiting(self, waiter: Waiter, cell: Cell | RowCell, missing: list[int], seconds: float) -> None: ...


@dataclass
class Waiter:
    """A worker that wants this block at `version` or later. `update`: it wants the reduced gradient, not the weights.

    Of a table: `ids` are the rows that are wanted; None asks only to be told that the version is there.
    """

    to: Replies
    rank: int
    request: int
    version: int
    clock: int
    since: float
    update: bool = False
    ids: torch.Tensor | None = None
    place: tuple[int, torch.Tensor] | None = None
    """Where in lent memory the rows are to be put, offset and memory itself; None: they are sent."""
    lent: bool = False
    """The answer may lie in memory that this shard lends to the worker."""


class Cell:
    """`n` is the number of updates decided for this block; in sync it is also the open clock."""

    def __init__(self, block: Block, position: int, rule: Rule, mode: Served) -> None:
        self.block = block
        self.index = block.index
        self.position = position
        self.rule = rule
        self.mode = mode
        self.lock = threading.Lock()
        self.state: BlockState | None = None
        self.home: torch.Tensor | None = None
        """Where that which workers are answered with lives: this block's place in memory that the shard lends them."""
        self.update: torch.Tensor | None = None
        self.none: frozenset[int] = frozenset()
        """Tensors of this block for which no worker had a gradient at the last update; said only where the workers step."""
        self.skipped = False
        """The last update was none: a worker found inf, or nobody had a batch. Workers that step by themselves leave it out too."""
        self.n = 0
        self.stored = 0
        self.pending: dict[int, Arrived] = {}
        self.waiters: list[Waiter] = []
        self.content = object()
        """Stands for the bytes of the state: another one after each change of them."""
        self._cut: tuple[int, int, Callable[[Cell], Pin]] | None = None
        self._pin: Pin | None = None

    @property
    def name(self) -> str:
        return f"block {self.index}"

    def put(self, state: BlockState, n: int) -> None:
        """Set the block to a known state (initialisation or restore) and forget what waited."""
        self.void_cut()
        self.content = object()
        self.state, self.n, self.stored = state, n, n
        self.update = None
        if self.rule.name == "reduce":
            self.update = torch.empty_like(state.weights) if self.home is None else self.home
        elif self.home is not None:
            self.home.copy_(state.weights)
            state.weights = self.home
        self.none = frozenset()
        self.pending.clear()
        self.waiters.clear()

    def advance(self, expected: Callable[[int], frozenset[int]]) -> int:
        """Apply what counts, answer who waited. Returns the number of updates made."""
        made = 0
        while taken := self.mode.takes([a.push for a in self.pending.values()], expected(self.n), self.n):
            batch = [self.pending.pop(push.worker) for push in taken.kept]
            self._apply(batch)
            for arrived in batch:
                if arrived.grad is not None:
                    arrived.grad.free()
            self.n += 1
            made += 1
            self._pin_if_due()
        self.answer()
        return made

    def tensors(self) -> list[torch.Tensor]:
        """Everything of the state that a checkpoint holds."""
        return [] if self.state is None else [self.state.weights, *self.state.slots.values()]

    def wait_for(self, waiter: Waiter) -> None:
        self.waiters.append(waiter)

    def store(self, weights: torch.Tensor, version: int) -> None:
        """Worker-side update: these are the weights of `version`."""
        assert self.state is not None
        if version > self.stored or version == self.n:
            self._changing()
            self.state.weights.copy_(weights)
            self.stored = version
            self._pin_if_due()

    def order_cut(self, step: int, pin: Callable[[Cell], Pin], stored: int = 0) -> bool:
        """Hold on to this block with `pin` when it is at `step` (where that is negative: as it stands). False: too late.

        Where the workers step by themselves, a block that is held as it stands has the weights of clock `stored` at least.
        """
        if step >= 0 and self.n > step:
            return False
        self._cut = (step, stored, pin)
        self._pin_if_due()
        return True

    def void_cut(self) -> None:
        """No cut holds this block any more."""
        self._cut = None
        if self._pin is not None:
            self._pin.drop(void=True)
            self._pin = None

    def drop_waiters(self, to: Replies) -> None:
        self.waiters = [w for w in self.waiters if w.to is not to]

    def _apply(self, batch: list[Arrived]) -> None:
        assert self.state is not None
        present = [a.grad.flat for a in batch if isinstance(a.grad, Gradient)]
        self.skipped = not present or any(a.skip for a in batch)
        self.none = frozenset()
        if self.skipped:
            if self.update is not None:
                self.update.zero_()
            return
        none = frozenset.intersection(*(a.info.none for a in batch if a.grad is not None))
        none &= {piece.tensor for piece in self.block.pieces} if none else none
        mean = present[0]
        if len(present) > 1:
            first = next(a.grad for a in batch if isinstance(a.grad, Gradient))
            mean = first.flat if first.own else self._sum()
            reduction.mean_in_rank_order(present, mean)
        if self.update is not None:
            self.update.copy_(mean)
            self.none = none
            return
        info = batch[0].info
        ranges = None
        if none:
            ranges = live_ranges(self.block, none)
            if not ranges:
                return
        base = batch[0].push.base
        lag = self.n - base if base is not None else None
        self._changing()
        self.rule.apply(self.state, mean, info.numbers[self.block.group], ranges=ranges, lag=lag)

    def _sum(self) -> torch.Tensor:
        """Room for a sum that may not be written over a gradient; the thread's own, used up before it goes on."""
        assert self.state is not None
        return _room(self.block.nbytes).view(self.state.weights.dtype)

    def _changing(self) -> None:
        """The state is about to change: a cut that holds it keeps a copy, the only one that an update ever waits for."""
        if self._pin is not None:
            self._pin.keep()
            self._pin = None
        self.content = object()

    def _pin_if_due(self) -> None:
        if self._cut is None or self.state is None:
            return
        step, stored, pin = self._cut
        if step >= 0 and (self.n != step or (self.update is not None and self.stored != step)):
            return
        if step < 0 and self.update is not None and self.stored < stored:
            return  # a worker has left, but its last weights are still on their way
        self._cut = None
        self._pin = pin(self)

    def answer(self) -> None:
        """Serve the pulls that can be served now."""
        keep = []
        for waiter in self.waiters:
            if self.n >= waiter.version:
                waiter.to.param(self, waiter)
            else:
                keep.append(waiter)
        self.waiters = keep
