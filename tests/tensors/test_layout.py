"""Blocks: every element in exactly one place, edges where kernels like them, the same for any number of shards."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psjob.layout.blocks import EDGE, SIZES, Layout, TensorSpec, assign, live_ranges
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
