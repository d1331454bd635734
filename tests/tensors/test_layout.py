"""Blocks: every element in exactly one place, edges where kernels like them, the same for any number of shards.

- Tensors into flat blocks and back, whatever their shapes and strides.
- Bytes of tensors stay the tensor's.

Structures of tensors as bytes, and back.
"""

from __future__ import annotations

import collections
import json
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from psjob.layout import memory
from psjob.layout.blocks import EDGE, SIZES, Layout, TensorSpec, assign, live_ranges
from psjob.layout.packing import Pack
from psjob.layout.structures import ALIGNED, decode_structure, encode_structure
from psjob.wire.frame import WireError
from tests.tensors.layouts import SPECS, table


@given(SPECS, st.sampled_from([1024, 4096, 1 << 16, 4 << 20]))
def test_blocks_hold_every_element_once(rows: list[Any], limit: int) -> None:
    layout = Layout.of(table(rows), limit)
    seen = [torch.zeros(spec.numel, dtype=torch.int32) for spec in layout.table]
    for position, block in enumerate(layout.blocks):
        assert block.index == position
        assert 0 < block.nbytes <= max(limit, EDGE * SIZES[block.dtype])
        at = 0
        for piece in block.pieces:
            spec = layout.table[piece.tensor]
            assert (spec.dtype, spec.group) == (block.dtype, block.group)
            assert piece.block_offset == at and piece.length > 0 and piece.tensor_offset % EDGE == 0
            seen[piece.tensor][piece.tensor_offset : piece.tensor_offset + piece.length] += 1
            at += piece.length
        assert at == block.length
    assert all(bool((count == 1).all()) for count in seen)


@given(SPECS)
def test_layout_survives_json(rows: list[Any]) -> None:
    layout = Layout.of(table(rows))
    again = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again == layout and again.digest() == layout.digest()


@given(SPECS, st.integers(1, 9))
def test_each_block_has_one_shard(rows: list[Any], shards: int) -> None:
    layout = Layout.of(table(rows))
    owner = assign(layout, shards)
    assert owner == assign(layout, shards)
    assert len(owner) == len(layout.blocks)
    assert all(0 <= shard < shards for shard in owner)


@given(SPECS, st.integers(1, 9))
def test_no_shard_has_a_block_more_than_its_part(rows: list[Any], shards: int) -> None:
    """What a machine with a shard and a worker sends follows from its shard's bytes S: M + (m - 2) S."""
    layout = Layout.of(table(rows))
    owner = assign(layout, shards)
    loads = [sum(block.nbytes for block in layout.blocks if owner[block.index] == shard) for shard in range(shards)]
    largest = max((block.nbytes for block in layout.blocks), default=0)
    assert max(loads) <= layout.nbytes / shards + largest * (1 - 1 / shards) + 1e-6


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("width", [256, 2048])
def test_shards_are_balanced(shards: int, width: int) -> None:
    shapes = [(width, 3 * width), (3 * width,), (3 * width, width), (10, width)]
    layout = Layout.of(table([(shape, "float32", 0) for shape in shapes]), limit_bytes=64 << 10)
    loads = [0] * shards
    for block, shard in zip(layout.blocks, assign(layout, shards), strict=True):
        loads[shard] += block.nbytes
    assert max(loads) <= 1.1 * sum(loads) / shards


def test_a_small_model_gives_two_shards_work_in_few_blocks() -> None:
    layout = Layout.of(table([((64, 128), "float32", 0), ((128,), "float32", 0), ((128, 10), "float32", 0), ((10,), "float32", 0)]))
    assert set(assign(layout, 2)) == {0, 1} and len(layout.blocks) <= 3
    assert set(assign(layout, 4)) <= {0, 1, 2}


@pytest.mark.parametrize(("elements", "blocks"), [(1, 1), (1000, 1), (1024, 1), (1100, 2), (32_000, 2), (100_000, 7), (1_000_000, 9)])
def test_blocks_of_one_tensor(elements: int, blocks: int) -> None:
    assert len(Layout.of(table([((elements,), "float32", 0)])).blocks) == blocks


def test_big_blocks_are_four_mebibytes() -> None:
    layout = Layout.of(table([((100_000_000,), "float32", 0)]))
    assert max(block.nbytes for block in layout.blocks) <= 4 << 20
    assert min(block.nbytes for block in layout.blocks) > 3 << 20


def test_live_ranges_leave_out_and_merge() -> None:
    layout = Layout.of(table([((3,), "float32", 0), ((4,), "float32", 0), ((5,), "float32", 0), ((0,), "float32", 0)]))
    (block,) = layout.blocks
    assert live_ranges(block, frozenset()) == [(0, 12)]
    assert live_ranges(block, frozenset({1})) == [(0, 3), (7, 5)]
    assert live_ranges(block, frozenset({0})) == [(3, 9)]
    assert live_ranges(block, frozenset({0, 1, 2})) == []


BAD_ROWS: list[tuple[TensorSpec, str]] = [
    (TensorSpec("", (1,), "float32"), "name is 1..512"),
    (TensorSpec("x" * 513, (1,), "float32"), "name is 1..512"),
    (TensorSpec("a\nb", (1,), "float32"), "printable"),
    (TensorSpec("a", (1,), "complex64"), "complex64"),
    (TensorSpec("a", (1,), "float32", -1), "parameter group -1"),
    (TensorSpec("a", (-1,), "float32"), "each size"),
    (TensorSpec("a", (True,), "float32"), "each size"),
    (TensorSpec("a", (1,) * 33, "float32"), "33 dimensions, at most 32"),
    (TensorSpec("a", (1 << 40, 1 << 40), "float32"), "elements, at most"),
]


@pytest.mark.parametrize(("spec", "words"), BAD_ROWS)
def test_a_bad_table_is_refused(spec: TensorSpec, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Layout.of([spec])


def test_a_name_twice_and_too_many_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        Layout.of([TensorSpec("a", (1,), "float32"), TensorSpec("a", (1,), "float32")])
    with pytest.raises(ValueError, match="100001 tensors, at most 100000"):
        Layout.of([TensorSpec("a", (1,), "float32")] * 100_001)


def _broken() -> list[Any]:
    good = Layout.of(table([((200,), "float32", 0), ((9,), "float64", 1)])).to_json()

    def with_(change: Any) -> Any:
        copy = json.loads(json.dumps(good))
        change(copy)
        return copy

    return [
        None,
        [],
        {},
        {"format": 2},
        with_(lambda o: o.update(table=3)),
        with_(lambda o: o["table"].append(["x"])),
        with_(lambda o: o["table"][0].__setitem__(1, ["9"])),
        with_(lambda o: o["table"][0].__setitem__(1, [1 << 60])),
        with_(lambda o: o["blocks"].pop()),
        with_(lambda o: o["blocks"].append(o["blocks"][0])),
        with_(lambda o: o["blocks"][0].__setitem__(2, 1 << 62)),
        with_(lambda o: o["blocks"][0][3][0].__setitem__(0, 7)),
        with_(lambda o: o["blocks"][0][3][0].__setitem__(3, -1)),
        with_(lambda o: o["blocks"][0][3][0].__setitem__(2, 1)),
        with_(lambda o: o["blocks"][0].__setitem__(0, "float64")),
        with_(lambda o: o["blocks"][0].__setitem__(3, [])),
    ]


@pytest.mark.parametrize("obj", _broken())
def test_a_broken_layout_is_refused_with_a_sentence(obj: Any) -> None:
    with pytest.raises(ValueError, match=r"layout|table|tensor"):
        Layout.from_json(obj)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=4), max_leaves=8
)


@given(json_values, json_values)
def test_no_input_does_worse_than_value_error(one: Any, two: Any) -> None:
    with pytest.raises(ValueError):
        Layout.from_json({"format": 1, "table": [one], "blocks": [two]})


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


def test_a_view_keeps_its_tensor() -> None:
    """`bytes(view(make()))` reads the tensor after the last name of it is gone."""
    tensor = torch.arange(4, dtype=torch.int64)
    alive = weakref.ref(tensor)
    part = memory.view(tensor)[8:16]
    del tensor
    assert alive() is not None and bytes(part) == (1).to_bytes(8, "little")
    del part
    assert alive() is None


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64]
SHAPES = st.lists(st.integers(0, 4), max_size=3)


def sent(value: Any) -> Any:
    head, parts = encode_structure(value)
    assert len(head) % ALIGNED == 0
    return decode_structure(head, memoryview(bytearray(b"".join(parts))))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    made = torch.randint(0, 2, draw(SHAPES)).to(dtype)
    if made.dim() > 1 and draw(st.booleans()):
        made = made.transpose(0, 1)
    return made.requires_grad_(draw(st.booleans()) and (dtype.is_floating_point or dtype.is_complex))


PLAIN = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=5))
VALUES = st.recursive(
    st.one_of(tensors(), PLAIN),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_what_is_read_is_what_was_written(value: Any) -> None:
    came = sent(value)
    leaves, structure = pytree.tree_flatten(value)
    others, same = pytree.tree_flatten(came)
    assert structure == same
    for one, other in zip(leaves, others, strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other) and one.dtype == other.dtype and one.requires_grad == other.requires_grad
            assert not one.numel() or one.stride() == other.stride() or 1 in one.shape
        else:
            assert one == other and type(one) is type(other)


def test_numbers_that_are_none_travel_too() -> None:
    came = sent((float("nan"), float("inf"), torch.tensor([float("nan"), -0.0])))
    assert came[0] != came[0] and came[1] == float("inf") and came[2].signbit().tolist() == [False, True]


def test_a_tensor_is_not_copied_before_it_is_sent() -> None:
    tensor = torch.zeros(64)
    _, (raw,) = encode_structure(tensor)
    tensor[0] = 1.0
    assert bytes(raw[:4]) == b"\0\0\x80?"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (object(), "holds object"),
        ({1: 2}, "keys that are no strings"),
        (collections.OrderedDict(a=1), "holds OrderedDict"),
        (torch.zeros(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.nn.Linear(1, 1), "holds Linear"),
    ],
)
def test_what_cannot_be_sent_is_named(value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        encode_structure([value])


def test_what_is_nested_too_deep_is_neither_written_nor_read() -> None:
    deep: Any = 1
    told: Any = {"v": 1}
    for _ in range(40):
        deep, told = [deep], {"l": [told]}
    with pytest.raises(ValueError, match="nested deeper"):
        encode_structure(deep)
    with pytest.raises(WireError, match="nested deeper"):
        decode_structure(json.dumps(told).encode(), memoryview(b""))


@pytest.mark.parametrize(
    "told",
    [
        1, [], {}, {"v": []}, {"x": []}, {"t": ["float32", [2], False]}, {"t": ["float31", [0], False]}, {"t": ["float32", [-1], False]},
        {"t": ["float32", [1 << 62, 1 << 62], False]}, {"t": ["float32", [0, True], False]}, {"u": 1}, {"d": [1]}, {"t": [1]},
        {"l": [{"v": 1}], "u": []},
    ],
)  # fmt: skip
def test_what_is_no_structure_is_refused(told: Any) -> None:
    with pytest.raises(WireError):
        decode_structure(json.dumps(told).encode(), memoryview(b""))


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_other_bytes_are_refused(head: bytes, body: bytes) -> None:
    with pytest.raises(WireError):
        decode_structure(head, memoryview(bytearray(body + b"x")))


def test_bytes_that_nobody_told_of_are_refused() -> None:
    with pytest.raises(WireError, match="has 64 bytes of tensors, and says 0"):
        decode_structure(b'{"v":1}', memoryview(bytearray(64)))
