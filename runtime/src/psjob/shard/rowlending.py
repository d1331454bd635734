"""Rows to and from one worker of this host in memory that the two lend each other. The worker alone says where in it they lie."""

from __future__ import annotations

import torch

from psjob.layout import memory
from psjob.tables import TableSpec
from psjob.wire.frame import Header, WireError
from psjob.wire.rows import ALIGNED, ID_BYTES, LENT_ANSWERS, LENT_PUSHES
from psjob.wire.shared import Region


class RowLending:
    """Made when a worker has come for the handover; `fd` is the memory from which it pushes.

    It names a place for an answer only when it has no more need of what it finds there, so that no answer is ever waited with for another.
    """

    def __init__(self, fd: int) -> None:
        self._pushes = Region.borrow(fd, LENT_PUSHES)
        self.answers = Region.lend(LENT_ANSWERS)

    def pushed(self, header: Header, spec: TableSpec, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and gradients of a push where their worker has them, and could change them. Raises WireError outside of what it lends."""
        at = _aligned(header)
        ids = memory.lent(self._pushes, at, rows, "int64")
        grads = memory.lent(self._pushes, at + ID_BYTES * rows, rows * spec.dim, spec.dtype)
        return ids, grads.view(rows, spec.dim)

    def place(self, header: Header, spec: TableSpec, rows: int) -> tuple[int, torch.Tensor]:
        """Offset and memory for the rows of a lookup. Raises WireError outside of what this shard lends."""
        at = _aligned(header)
        return at, memory.lent(self.answers, at, rows * spec.dim, spec.dtype).view(rows, spec.dim)


def _aligned(header: Header) -> int:
    if header.part % ALIGNED:
        raise WireError(f"{header.kind.name} names byte {header.part} of lent memory, expected a multiple of {ALIGNED}")
    return header.part
