"""Bytes of tensors without a copy, and without numpy."""

from __future__ import annotations

import ctypes
from typing import Any

import torch


def view(tensor: torch.Tensor) -> memoryview:
    """A writable byte view of a contiguous CPU tensor, which lives as long as its view."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("only a contiguous CPU tensor has a byte view")
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray(0))
    raw: Any = (ctypes.c_char * size).from_address(tensor.data_ptr())
    raw.tensor = tensor
    return memoryview(raw).cast("B")
