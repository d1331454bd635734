"""Checksums of samples of pushes: the same push that comes again is told from another one under its key.

Of each worker and block four bytes are kept, of the newest push that was admitted: crc32 over its first, middle and last bytes. A
whole checksum would cost a push of 4 MiB a millisecond. So other bytes are found where they differ in the sample. Those of a push
before the newest, of one before the last restore and of rows of tables are not compared.
"""

from __future__ import annotations

import zlib
from array import array

import torch

from psjob.layout import memory

RUN = 64
"""Bytes of each of the three parts of a sample."""
UNKNOWN, EMPTY = 0, 1


class PushSamples:
    """`owned` is the number of positions in the admission table."""

    def __init__(self, owned: int) -> None:
        self._owned = owned
        self._kept: dict[int, array[int]] = {}

    def keep(self, rank: int, position: int, gradient: torch.Tensor | None) -> None:
        """A push was admitted; None: it has no payload."""
        if rank not in self._kept:
            self._kept[rank] = array("I", bytes(4 * self._owned))
        self._kept[rank][position] = sample(gradient)

    def forget(self, rank: int) -> None:
        """The worker goes on at another clock: its newest push is not known."""
        self._kept.pop(rank, None)

    def knows(self, rank: int, position: int) -> bool:
        """Could a push that comes again be compared?"""
        return rank in self._kept and self._kept[rank][position] != UNKNOWN

    def differs(self, rank: int, position: int, gradient: torch.Tensor | None) -> bool:
        """Has a push other bytes than the one that was admitted, as far as that is known?"""
        return self.knows(rank, position) and self._kept[rank][position] != sample(gradient)


def sample(gradient: torch.Tensor | None) -> int:
    """The checksum of a contiguous 1-D tensor's sample."""
    if gradient is None:
        return EMPTY
    raw = memory.view(gradient)
    middle = len(raw) // 2
    crc = zlib.crc32(raw[-RUN:], zlib.crc32(raw[middle : middle + RUN], zlib.crc32(raw[:RUN])))
    return crc if crc > EMPTY else EMPTY + 1
