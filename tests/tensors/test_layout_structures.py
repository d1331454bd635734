"""Structures of tensors as bytes, and back."""

from __future__ import annotations

import collections
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from psjob.layout.structures import ALIGNED, read, write
from psjob.wire.frame import WireError

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64]
SHAPES = st.lists(st.integers(0, 4), max_size=3)


def sent(value: Any) -> Any:
    head, parts = write(value)
    assert len(head) % ALIGNED == 0
    return read(head, memoryview(bytearray(b"".join(parts))))


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
    _, (raw,) = write(tensor)
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
        write([value])


def test_what_is_nested_too_deep_is_neither_written_nor_read() -> None:
    deep: Any = 1
    told: Any = {"v": 1}
    for _ in range(40):
        deep, told = [deep], {"l": [told]}
    with pytest.raises(ValueError, match="nested deeper"):
        write(deep)
    with pytest.raises(WireError, match="nested deeper"):
        read(json.dumps(told).encode(), memoryview(b""))


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
        read(json.dumps(told).encode(), memoryview(b""))


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_other_bytes_are_refused(head: bytes, body: bytes) -> None:
    with pytest.raises(WireError):
        read(head, memoryview(bytearray(body + b"x")))


def test_bytes_that_nobody_told_of_are_refused() -> None:
    with pytest.raises(WireError, match="has 64 bytes of tensors, and says 0"):
        read(b'{"v":1}', memoryview(bytearray(64)))
