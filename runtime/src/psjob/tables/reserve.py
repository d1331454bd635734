"""Memory that grows in place: addresses are reserved at once, pages come when they are first touched."""

from __future__ import annotations

import mmap
import sys
from typing import Final

import torch

ROWS: Final = 1 << 30
"""The most rows that a table of open ids has on a shard."""
LEAST: Final = 1 << 16
_HUGE: Final = 2 << 20
_FLAGS: Final = (
    mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" else 0)
)  # MAP_NORESERVE: a promise of addresses only


def reserve(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of shape [rows, width], or [rows] where `width` is 0, that cost memory only where they are touched.

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
