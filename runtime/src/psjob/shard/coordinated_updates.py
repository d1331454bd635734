"""A shard's part in a decided mode: it tells the coordinator which pushes are whole here, and carries out what that decides.

Pushes wait in their blocks and tables until an order names them. Orders are carried out one after the other, in the thread that brings
them. So a snapshot which is ordered between two of them finds every block and table at the same version.

A shard's part in clipping by the norm of the mean gradient (`training.sync.maxGradNorm`).

A block whose pushes are all here is reduced and measured, and waits. When all blocks of an update are, the coordinator gets the sum
of their squares, in the order of the blocks. Once it has those of all shards it orders one factor. Every block multiplies its reduced
gradient by it before the update: the gradient is clipped as if it lay in one process."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping

from psjob.modes import ServedMode
from psjob.protocol.messages import Clip, Decide, Key, NormMeasured, PushArrived
from psjob.shard.pending import ServedState
from psjob.wire.frame import WireError


class CoordinatedUpdates:
    """Of the store of a shard. `arrived` tells the coordinator."""

    def __init__(self, shard: int, mode: ServedMode) -> None:
        self._shard = shard
        self.early = mode.may_go(0, 0, 1)
        """A worker may be answered, and write where its push lies, before that is decided on."""
        self.answerable_clocks: dict[int, int] = {}
        """By worker, how many of its clocks may be answered; every block and table looks here."""
        self.arrived: Callable[[PushArrived], None] = lambda message: None
        self._bases: dict[Key, int | None] = {}
        self._carried = 0
        self._broken = False
        """An order was not carried out to its end."""
        self._told: dict[Key, PushArrived] = {}
        """What the coordinator was told, or is to be, of whole pushes that no order has named yet."""
        self._lock = threading.Lock()

    @property
    def carried(self) -> int | None:
        """Number of the last order that was carried out since the last restore; None: one broke off."""
        return None if self._broken else self._carried

    def begin(self, clocks: Mapping[int, int]) -> None:
        """Serving begins: so many clocks of each worker are in the blocks."""
        self.answerable_clocks.clear()
        self.answerable_clocks.update(clocks)
        self._bases.clear()
        self._carried, self._broken = 0, False
        with self._lock:
            self._told.clear()

    def took(self, key: Key, base: int | None) -> None:
        """A block or table of a push was admitted; it was computed on version `base` of it. The store's lock is held."""
        least = self._bases.get(key, base)
        self._bases[key] = None if base is None or least is None else min(base, least)

    def whole(self, key: Key, restore_id: int) -> None:
        """All of a push is here: tell it."""
        message = PushArrived(self._shard, restore_id, *key, self._bases.pop(key, None), self._carried)
        with self._lock:
            self._told[key] = message
        self.arrived(message)

    def tell_again(self) -> None:
        """On a new stream to the coordinator: what the one before may have lost. It knows what it has heard."""
        with self._lock:
            told = list(self._told.values())
        for message in told:
            self.arrived(message)

    def begin_order(self, order: Decide) -> None:
        """An order begins: it is broken until `end_order`. Raises WireError if it does not follow the one before."""
        number, broken = order.number, self._broken
        self._broken = True
        if broken or number != self._carried + 1:
            raise WireError(f"the coordinator's order {number} follows on {self._carried}" + (", which broke off" if broken else ""))

    def end_order(self, order: Decide) -> None:
        """An order was carried out in every block and table."""
        with self._lock:
            for decision in order.batches:
                for key in (*decision.kept, *decision.dropped):
                    self._told.pop(key, None)
        self._carried, self._broken = order.number, False
        self.answerable_clocks.update(order.go)


class ClipNorms:
    """Of the store of a shard. `measured` tells the coordinator."""

    def __init__(self, shard: int) -> None:
        self._shard = shard
        self.measured: Callable[[NormMeasured], None] = lambda message: None
        self._squares: dict[int, float] = {}
        """By block, of the update under way."""
        self._limit = math.inf
        """The lowest that was told of these."""
        self._passed: set[int] = set()
        """Blocks that have made this update already: no worker asked for a norm there. A right worker asks in all blocks or in none."""
        self.waits: int | None = None
        """The update of which some blocks are measured, and not all."""
        self._told: NormMeasured | None = None
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

    def note(
        self, blocks: Mapping[int, ServedState], restore: int, block: int, version: int, squares: float, limit: float
    ) -> None:  # fmt: skip
        """A block of `blocks` is measured for update `version`, and waits. Called with its lock held."""
        with self._lock:
            if self.waits != version:
                self._clear()
                self.waits = version  # first: a block that passes from here on tells it
                self._passed = {index for index, cell in blocks.items() if cell.n > version}
            self._squares[block] = squares
            self._limit = min(self._limit, limit)
            message = self._whole(blocks, restore)
        if message is not None:
            self.measured(message)

    def passed(self, blocks: Mapping[int, ServedState], restore: int, block: int, made: int) -> None:
        """A block has made updates up to `made` without a norm, while others wait for theirs. Called with its lock held."""
        message = None
        with self._lock:
            if self.waits is not None and made > self.waits:
                self._passed.add(block)
                message = self._whole(blocks, restore)
        if message is not None:
            self.measured(message)

    def _whole(self, blocks: Mapping[int, ServedState], restore: int) -> NormMeasured | None:
        """What the coordinator is told, once all blocks are here."""
        if self.waits is None or not self._squares or len(self._squares) + len(self._passed) < len(blocks):
            return None
        total = sum(self._squares[index] for index in blocks if index in self._squares)
        self._told = NormMeasured(self._shard, restore, self.waits, total, self._limit)
        self._clear()
        return self._told

    def _clear(self) -> None:
        self._squares.clear()
        self._passed.clear()
        self._limit, self.waits = math.inf, None

    def tell_again(self) -> None:
        """On a new stream to the coordinator: what the one before may have lost."""
        with self._lock:
            message = self._told
        if message is not None:
            self.measured(message)

    def accept(self, order: Clip) -> bool:
        """Is an order to be carried out? False: it comes again, or is of before a restore, and changes nothing."""
        with self._lock:
            if self._told is None or (order.restore_id, order.version) != (self._told.restore_id, self._told.version):
                return False
            self._told = None
        return True
