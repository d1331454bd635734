"""Rows with their state, ids and last clocks: planes of memory that grow in place, and the slots that are free in them.

Weights, each state and the facts of a row are planes of their own. A pull reads whole rows of weights without the state between
them, and a search for old rows reads only their clocks. `reserve` takes addresses at once; pages come when they are first touched.

`Index` is id → slot: open addressing with linear probing, a whole batch of ids at a time. A position belongs to one id for as long as
the arrays live: a deleted id keeps its position (its slot says so), and a rebuild drops it. So no id is a sentinel, and a search ends at
its own position or at a free one.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Mapping
from typing import Final

import torch

from psjob.tables.spec import GOLDEN

ROWS: Final = 1 << 30
"""The most rows that a table of open ids has on a shard."""
LEAST: Final = 1 << 16
_HUGE: Final = 2 << 20
_FLAGS: Final = (
    mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" else 0)
)  # MAP_NORESERVE: a promise of addresses only


def reserve(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of shape [rows, width], or [rows] where `width` is 0, that cost memory only if they are touched.

    A system that refuses so many addresses gives fewer rows, at least LEAST. Raises MemoryError with a sentence where not even these.
    """
    size = dtype.itemsize * max(1, width)
    wanted = rows
    while True:
        try:
            region = mmap.mmap(-1, max(1, rows * size), flags=_FLAGS)
            break
        except (OSError, ValueError, OverflowError):
            if rows <= LEAST:
                raise MemoryError(
                    f"cannot reserve {rows} rows of {size} bytes of {wanted} that a table may need: raise the memory limit"
                ) from None
            rows = max(LEAST, rows // 2)
    if hasattr(mmap, "MADV_HUGEPAGE") and rows * size >= _HUGE:
        try:
            region.madvise(mmap.MADV_HUGEPAGE)  # rows are met at random: fewer, larger pages halve the time to put them back
        except OSError:
            pass
    flat = torch.frombuffer(region, dtype=dtype, count=rows * max(1, width))
    return flat.view(rows, width) if width else flat


FREE: Final = -1
DEAD: Final = -2
_LEAST: Final = 1024


class Index:
    """Slots are int32 numbers from 0, given by the caller. At most half of the positions are taken; then it is built anew, larger."""

    def __init__(self, capacity: int = _LEAST) -> None:
        self._used = self._live = 0
        self._make(capacity)

    def __len__(self) -> int:
        return self._live

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self._keys.nbytes + self._slots.nbytes

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """The slot of each id (int64) as int64, negative where it has none. Ids may be there twice."""
        return self._slots.index_select(0, self._find(ids)).long()

    def insert(self, ids: torch.Tensor, slots: torch.Tensor) -> None:
        """Give `ids`, which have no slot and are there once, these slots (int64)."""
        self._room(len(ids))
        self._claim(ids, slots.int())
        self._live += len(ids)

    def delete(self, ids: torch.Tensor) -> None:
        """Forget `ids`; those that have no slot are left."""
        at = self._find(ids)
        at = torch.unique(at[self._slots.index_select(0, at) >= 0])
        self._slots.index_fill_(0, at, DEAD)
        self._live -= len(at)

    def _find(self, ids: torch.Tensor) -> torch.Tensor:
        """The position where the search for each id ends: its own, or a free one."""
        keys, slots, mask = self._keys, self._slots, self._mask
        at = self._start(ids)
        found = keys.index_select(0, at)
        left = (found != ids).nonzero().squeeze(1)
        if not len(left):
            return at
        here, wanted = at.index_select(0, left), ids.index_select(0, left)
        while True:
            go = (slots.index_select(0, here) != FREE).logical_and_(keys.index_select(0, here) != wanted).nonzero().squeeze(1)
            if not len(go):
                return at
            left, wanted = left.index_select(0, go), wanted.index_select(0, go)
            here = here.index_select(0, go).add_(1).bitwise_and_(mask)
            at.index_copy_(0, left, here)

    def _claim(self, ids: torch.Tensor, slots: torch.Tensor) -> None:
        """Put distinct ids at the ends of their searches; where several want one position, one gets it and the others continue."""
        at = self._find(ids)
        while True:
            taken = self._slots.index_select(0, at)
            order = torch.arange(len(ids), dtype=torch.int32, device="cpu")
            self._slots.index_copy_(0, at, order)
            won = self._slots.index_select(0, at) == order
            lost = (~won).nonzero().squeeze(1)
            first = won.nonzero().squeeze(1)
            mine = at.index_select(0, first)
            self._used += int((taken.index_select(0, first) == FREE).sum())
            self._keys.index_copy_(0, mine, ids.index_select(0, first))
            self._slots.index_copy_(0, mine, slots.index_select(0, first))
            if not len(lost):
                return
            ids, slots = ids.index_select(0, lost), slots.index_select(0, lost)
            at = self._find(ids)

    def _room(self, more: int) -> None:
        """Keep half of the positions free."""
        if 2 * (self._used + more) <= len(self._keys):
            return
        capacity = len(self._keys)
        while 2 * (self._live + more) > capacity:
            capacity *= 2
        if 3 * (self._live + more) > capacity:  # else it would soon be built again
            capacity *= 2
        live = (self._slots >= 0).nonzero().squeeze(1)
        keys, slots = self._keys.index_select(0, live), self._slots.index_select(0, live)
        self._make(capacity)
        if len(keys):
            self._claim(keys, slots)

    def _make(self, capacity: int) -> None:
        bits = (max(capacity, _LEAST) - 1).bit_length()
        self._shift, self._mask = 64 - bits, (1 << bits) - 1
        self._keys = reserve(1 << bits, 0, torch.int64)
        self._slots = reserve(1 << bits, 0, torch.int32).fill_(FREE)
        self._used = 0

    def _start(self, ids: torch.Tensor) -> torch.Tensor:
        """Multiplicative hashing (Knuth, The Art of Computer Programming 3, 6.4), high half folded in first."""
        return (ids >> 32).bitwise_xor_(ids).mul_(GOLDEN).bitwise_right_shift_(self._shift).bitwise_and_(self._mask)


NOBODY: Final = -1
"""The clock of a slot without a row."""


class Slab:
    """Slots 0 to `top` - 1 have been used; those without a row have clock NOBODY. `planes`: the width of each state, 0 for one number."""

    def __init__(self, dim: int, planes: Mapping[str, int], rows: int | None, dtype: torch.dtype = torch.float32) -> None:
        most = min(ROWS, rows or ROWS)
        self.ids = reserve(most, 0, torch.int64)
        self.seen = reserve(most, 0, torch.int64)
        self.weights = reserve(most, dim, dtype)
        self.state = {name: reserve(most, width, torch.float32) for name, width in planes.items()}
        self.limit = min(len(plane) for plane in self.all().values())
        self.top = 0
        self._free: list[torch.Tensor] = []

    def all(self) -> dict[str, torch.Tensor]:
        """Every plane by name."""
        return {"ids": self.ids, "seen": self.seen, "weights": self.weights, **self.state}

    @property
    def row_bytes(self) -> int:
        """Bytes of a row over all planes."""
        return sum(plane[:1].nbytes for plane in self.all().values())

    def take(self, count: int) -> torch.Tensor:
        """`count` slots (int64) that held no row; given-back ones first. Raises MemoryError with a sentence where the table is full."""
        found: list[torch.Tensor] = []
        while count and self._free:
            last = self._free.pop()
            found.append(last[:count])
            if len(last) > count:
                self._free.append(last[count:])
            count -= len(found[-1])
        if self.top + count > self.limit:
            raise MemoryError(
                f"a table has room for {self.limit} rows on a shard, {self.top + count} are asked for: use more shards or evict_after"
            )
        found.append(torch.arange(self.top, self.top + count, device="cpu"))
        self.top += count
        return torch.cat(found) if len(found) > 1 else found[0]

    def give_back(self, slots: torch.Tensor) -> None:
        """Rows that are no more."""
        self.seen.index_fill_(0, slots, NOBODY)
        if len(slots):
            self._free.append(slots)

    def seen_until(self, clock: int) -> torch.Tensor:
        """Slots of rows that were not pushed after `clock`, as int64."""
        seen = self.seen[: self.top]
        return ((seen <= clock) & (seen >= 0)).nonzero().squeeze(1)

    def live(self) -> torch.Tensor:
        """Slots that hold a row, as int64."""
        return (self.seen[: self.top] >= 0).nonzero().squeeze(1)
