"""id → slot: open addressing with linear probing, a whole batch of ids at a time.

A position belongs to one id for as long as the arrays live: a deleted id keeps its position (its slot says so), and a rebuild
drops it. So no id is a sentinel, and a search ends at its own position or at a free one.
"""

from __future__ import annotations

from typing import Final

import torch

from psjob.tables.mixing import GOLDEN
from psjob.tables.reserve import reserve

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
        """Put distinct ids at the ends of their searches; where several want one position, one gets it and the others go on."""
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
