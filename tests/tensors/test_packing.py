"""Tensors into flat blocks and back, whatever their shapes and strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob.layout.blocks import Layout
from psjob.layout.packing import Pack
from tests.tensors.layouts import SPECS, table


@given(SPECS, st.data())
@settings(max_examples=25)
def test_scatter_undoes_gather(rows: list[Any], data: st.DataObject) -> None:
    layout = Layout.of(table(rows), 1024)
    tensors = [torch.randn(spec.shape, dtype=torch.float64).to(getattr(torch, spec.dtype)) for spec in layout.table]
    tensors = [t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 and data.draw(st.booleans()) else t for t in tensors]
    back = [torch.zeros_like(t) for t in tensors]
    for block in layout.blocks:
        flat = torch.empty(block.length, dtype=getattr(torch, block.dtype))
        pack = Pack(block, flat, layout.table)
        pack.gather(tensors)
        pack.scatter(back)
    assert all(torch.equal(one, other) for one, other in zip(tensors, back, strict=True))


def test_none_is_zeros_in_and_left_out_on_the_way_back() -> None:
    layout = Layout.of(table([((4,), "float32", 0), ((3,), "float32", 0)]))
    (block,) = layout.blocks
    flat = torch.full((7,), 9.0)
    pack = Pack(block, flat, layout.table)
    pack.gather([None, torch.ones(3)])
    assert flat.tolist() == [0, 0, 0, 0, 1, 1, 1]
    target = torch.zeros(3)
    pack.scatter([None, target])
    assert target.tolist() == [1, 1, 1]


def test_gather_refuses_what_is_not_the_block() -> None:
    layout = Layout.of(table([((4,), "float32", 0)]))
    (block,) = layout.blocks
    with pytest.raises(ValueError, match="block 0 is 4 elements of float32, got shape"):
        Pack(block, torch.empty(5), layout.table)
    with pytest.raises(ValueError, match="only dense tensors"):
        Pack(block, torch.empty(4), layout.table).gather([torch.zeros(4).to_sparse()])


def test_what_lies_in_one_piece_is_used_where_it_lies() -> None:
    layout = Layout.of(table([((64, 64), "float32", 0), ((3,), "float32", 1), ((4,), "float32", 1)]), 8192)
    one, rest = [b for b in layout.blocks if b.group == 0], [b for b in layout.blocks if b.group == 1]
    tensors = [torch.arange(4096.0).view(64, 64), torch.ones(3), torch.ones(4)]
    packs = [Pack(block, torch.empty(block.length), layout.table) for block in one]
    found = [pack.direct(tensors) for pack in packs]
    assert len(found) > 1 and all(view is not None and view.untyped_storage().data_ptr() == tensors[0].data_ptr() for view in found)
    assert torch.equal(torch.cat([view for view in found if view is not None]), tensors[0].flatten())
    assert [pack.direct([tensors[0].T, *tensors[1:]]) for pack in packs] == [None] * len(one)
    assert [pack.direct([tensors[0].double(), *tensors[1:]]) for pack in packs] == [None] * len(one)
    assert packs[0].direct([None, *tensors[1:]]) is None
    assert Pack(rest[0], torch.empty(7), layout.table).direct(tensors) is None


@pytest.mark.parametrize("shapes", [[(3,), (64,), (5,)], [(2, 3), (7, 3)], [(4,), (2, 2)], [(), (3,)], [(2, 3), (3, 2)]])
def test_gathering_is_the_same_for_even_and_uneven_shapes(shapes: list[tuple[int, ...]]) -> None:
    layout = Layout.of(table([(shape, "float32", 0) for shape in shapes]))
    (block,) = layout.blocks
    tensors = [torch.randn(shape) for shape in shapes]
    pack = Pack(block, torch.empty(block.length), layout.table)
    assert torch.equal(pack.gather(tensors), torch.cat([t.flatten() for t in tensors]))
    some: list[torch.Tensor | None] = [None, *tensors[1:]]
    assert torch.equal(pack.gather(some), torch.cat([torch.zeros(tensors[0].numel()), *(t.flatten() for t in tensors[1:])]))


def test_a_tensor_that_changed_its_shape_is_not_gathered_as_another() -> None:
    layout = Layout.of(table([((4,), "float32", 0), ((3,), "float32", 0)]))
    (block,) = layout.blocks
    with pytest.raises(ValueError, match="one has another shape by now"), pytest.warns(UserWarning, match="resized"):
        Pack(block, torch.empty(block.length), layout.table).gather([torch.ones(4), torch.ones(4)])


def test_pieces_are_the_tensors_own_bytes_and_follow_them() -> None:
    layout = Layout.of(table([((4,), "float32", 0), ((2, 3), "float32", 0)]))
    (block,) = layout.blocks
    pack = Pack(block, torch.empty(block.length), layout.table)
    tensors: list[torch.Tensor | None] = [torch.zeros(4), torch.zeros(2, 3)]
    for _ in range(2):
        pieces = pack.pieces(tensors)
        assert pieces is not None and [len(piece) for piece in pieces] == [16, 24]
        for piece in pieces:
            piece[:] = b"\0\0\x80\x3f" * (len(piece) // 4)
        assert all(t is not None and bool((t == 1).all()) for t in tensors)
        tensors = [torch.zeros(4), torch.zeros(2, 3)]  # others than before
    assert pack.pieces([None, torch.zeros(2, 3)]) is None
    assert pack.pieces([torch.zeros(4), torch.zeros(3, 2).T]) is None
    assert pack.pieces([torch.zeros(4), torch.zeros(2, 3, dtype=torch.float64)]) is None
    parts = Layout.of(table([((64, 64), "float32", 0)]), 8192)
    assert Pack(parts.blocks[0], torch.empty(parts.blocks[0].length), parts.table).pieces([torch.zeros(64, 64)]) is None
