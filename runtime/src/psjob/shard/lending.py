"""Blocks to and from one worker of this host in memory that the two lend each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from psjob.layout import memory
from psjob.layout.blocks import Block
from psjob.layout.memory import LentSpan
from psjob.shard.block import Cell
from psjob.shard.pending import Lent
from psjob.shard.store import Store
from psjob.wire.frame import Header, WireError
from psjob.wire.shared_memory import Region

MOST_SLOTS = 64


class Lending:
    """Made when a worker has come for the handover. `gradients` is what it lends.

    In a steady mode every answer lies where the block itself lives, for all workers alike. In sync no block moves before every worker
    has pushed again, and a worker pushes when its script is done with the weights. So they need no second buffer. Otherwise an
    answer is copied to one of a lane's slots, in turn. The worker takes a lane's answers in the order in which they are sent. It asks
    for no more at a time than there are slots, so the one that comes next is one that it has read.
    """

    def __init__(self, store: Store, span: LentSpan, fd: int, slots: int) -> None:
        self.gradients = Region.borrow(fd, span.size)
        self._span = span
        self._blocks: dict[int, Lent] = {}
        self._slots, self._largest = slots, max(store.largest, 1)
        self.answers = store.region or Region.lend(lent_bytes(store, slots))
        self._room = None if store.region is not None else memory.lent(self.answers, 0, self.answers.size, "uint8")

    def gradient(self, header: Header, block: Block) -> Lent:
        """The gradient of a push where its worker has it. Raises WireError for any other place than the block's."""
        if header.part != self._span.offsets[block.index]:
            raise WireError(f"push of block {block.index} lies at byte {header.part}, expected {self._span.offsets[block.index]}")
        lent = self._blocks.get(block.index)
        if lent is None:
            lent = self._blocks[block.index] = Lent(memory.lent(self.gradients, header.part, block.length, block.dtype))
        return lent

    def place(self, cell: Cell, answer: torch.Tensor, lane: int, number: int) -> int | None:
        """Offset of answer `number` of a lane in what this shard lends, copied there where it must be; None: it is not to be lent."""
        if self._room is None:
            return self._span.offsets[cell.block.index] if answer is cell.home else None
        offset = (lane * self._slots + number % self._slots) * self._largest
        self._room[offset : offset + cell.block.nbytes].view(answer.dtype).copy_(answer)
        return offset


def slots_of(hello: Mapping[str, Any]) -> int:
    """How many answers a worker takes at a time. Raises WireError for a number that no worker has."""
    slots = hello.get("slots", 1)
    if type(slots) is not int or not 1 <= slots <= MOST_SLOTS:
        raise WireError(f"a worker takes 1..{MOST_SLOTS} answers at a time, got {str(slots)[:40]}")
    return slots


def transports_of(hello: Mapping[str, Any], what: str) -> list[str]:
    """How a worker's blocks, or its rows, may come and go. Raises WireError for what is no list of names."""
    ways = hello.get(what, [])
    if not isinstance(ways, list) or not all(isinstance(way, str) for way in ways):
        raise WireError(f"{what} of a worker's hello are {str(ways)[:40]!r}, expected a list of names such as shared and tcp")
    return ways


def lent_bytes(store: Store, slots: int) -> int:
    """Size of the memory of a worker's answers."""
    return store.region.size if store.region is not None else store.lanes * slots * max(store.largest, 1)
