"""Bytes of tensors stay the tensor's."""

from __future__ import annotations

import weakref

import torch

from psjob.layout import memory


def test_a_view_keeps_its_tensor() -> None:
    """`bytes(view(make()))` reads the tensor after the last name of it is gone."""
    tensor = torch.arange(4, dtype=torch.int64)
    alive = weakref.ref(tensor)
    part = memory.view(tensor)[8:16]
    del tensor
    assert alive() is not None and bytes(part) == (1).to_bytes(8, "little")
    del part
    assert alive() is None
