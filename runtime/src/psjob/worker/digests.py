"""Sums over what tensors hold, at the speed of memory: of all of a tensor, or of a few windows that a step's number chooses."""

from __future__ import annotations

import platform
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Final

import torch

from psjob.layout import memory

WINDOWS, WINDOW = 4, 4 << 10
"""So many windows of so many bytes are looked at in a step."""
PART: Final = 1 << 30
"""Bytes that are summed at one moment: of a larger model a part, which the step's number chooses."""
UNREAD: Final = -1
"""In place of a sum: the tensor has no memory, or not one array of it."""
_SPREAD: Final = 0x9E3779B97F4A7C15
"""2^64 by the golden ratio: multiples of it lie far apart (Knuth, The Art of Computer Programming, 6.4)."""
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def sums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A number of 32 bits for each tensor, made of all its bytes: of two that differ in one element it differs."""
    made = [_sum(tensor) for tensor in tensors]
    devices = dict.fromkeys(one.device for one in made if one is not None)
    told: dict[int, int] = {}
    for device in devices:  # one answer a device: each would wait for its stream
        rows = [row for row, one in enumerate(made) if one is not None and one.device == device]
        told |= zip(rows, torch.stack([one for row in rows if (one := made[row]) is not None]).tolist(), strict=True)
    return [UNREAD if (found := told.get(row)) is None else _folded(found) for row in range(len(made))]


class Windows:
    """Parts of these tensors, a few a step. They keep their sizes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._ends = list(accumulate(map(_nbytes, tensors)))

    def at(self, clock: int) -> list[tuple[int, int]]:
        """(row, crc32) of WINDOWS parts; the same clock chooses the same ones in every process."""
        if not self._ends or not self._ends[-1]:
            return []
        found = []
        for number in range(WINDOWS):
            place = _spread(clock * WINDOWS + number, self._ends[-1])
            row = bisect_right(self._ends, place)
            flat = _flat(self._tensors[row])
            if flat is None:
                continue
            count = WINDOW // flat.element_size()
            before = self._ends[row - 1] if row else 0
            at = max(0, min((place - before) // flat.element_size(), flat.numel() - count))
            found.append((row, zlib.crc32(memory.view(flat[at : at + count].cpu().contiguous()))))
        return found


def part_of(tensors: Sequence[torch.Tensor], clock: int, most: int = PART) -> list[int]:
    """Rows of the tensors that are summed whole after step `clock`: all, or those of a part of at most about `most` bytes."""
    ends = list(accumulate(map(_nbytes, tensors)))
    parts = -(-(ends[-1] if ends else 0) // most)
    if parts < 2:
        return list(range(len(tensors)))
    chosen = _spread(clock, parts)
    return [row for row, end in enumerate(ends) if min(parts - 1, (end - 1) // most) == chosen]


def grouped(sums_: Sequence[int], most: int) -> list[tuple[int, int]]:
    """(first row, sum) of at most `most` runs of rows, so that a digest of any model fits in a frame."""
    size = max(1, -(-len(sums_) // most))
    if size == 1:
        return list(enumerate(sums_))
    return [(at, zlib.crc32(repr(list(sums_[at : at + size])).encode())) for at in range(0, len(sums_), size)]


def _spread(number: int, below: int) -> int:
    return ((number * _SPREAD) & 0xFFFF_FFFF_FFFF_FFFF) * below >> 64


def _folded(total: int) -> int:
    return (total ^ (total >> 32)) & 0xFFFF_FFFF


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size() if _is_array(tensor) else 0


def _is_array(tensor: torch.Tensor) -> bool:
    """Is it a plain array with memory, and not empty?"""
    if torch.nn.parameter.is_lazy(tensor) or type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return not tensor.is_quantized and tensor.numel() > 0


def _flat(tensor: torch.Tensor) -> torch.Tensor | None:
    """Its elements, 1-D and contiguous; None of one that is no plain array with memory."""
    if not _is_array(tensor):
        return None
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)


_PLAIN: Final = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) if hasattr(torch.nn, "Buffer") else (torch.Tensor, torch.nn.Parameter)


def _sum(tensor: torch.Tensor) -> torch.Tensor | None:
    """A sum over its bytes as whole numbers, 0-dimensional and on its device."""
    flat = _flat(tensor)
    if flat is None:
        return None
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    each = 8 // flat.element_size()
    if flat.data_ptr() % 8 or flat.storage_offset() % each:
        flat = flat.clone()
    even = flat.numel() // each * each
    rest = flat[even:].view(_WORDS[flat.element_size()]).sum(dtype=torch.int64)
    return rest + flat[:even].view(torch.int64).sum() if even else rest


@cache
def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            named = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        named = ""
    return named or platform.processor() or platform.machine()


def machine(tensors: Sequence[torch.Tensor]) -> str:
    """The kind of processor that computes with these, in words; workers with different ones may round otherwise."""
    cuda = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    return _processor() if cuda is None else torch.cuda.get_device_name(cuda)
