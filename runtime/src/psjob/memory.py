"""Bytes of tensors without a copy, and without numpy."""

from __future__ import annotations

import ctypes
from typing import Any

import torch


def view(tensor: torch.Tensor) -> memoryview:
    """A writable byte view of a contiguous CPU tensor, which lives as long as its view. Raises ValueError for another tensor."""
    raw = _raw(tensor)
    raw.tensor = tensor
    return memoryview(raw).cast("B")


def borrowed(tensor: torch.Tensor) -> memoryview:
    """As `view`, but the tensor is not held: for a caller who holds it as long as the bytes are used."""
    return memoryview(_raw(tensor)).cast("B")


def _raw(tensor: torch.Tensor) -> Any:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("only a contiguous CPU tensor has a byte view")
    size = tensor.numel() * tensor.element_size()
    kind: Any = ctypes.c_char * size
    return kind.from_address(tensor.data_ptr()) if size else kind()
