"""Parameters, and the table of blocks that they are packed into."""

from __future__ import annotations

from hypothesis import strategies as st

from psjob.layout.blocks import TensorSpec

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
SPECS = st.lists(st.tuples(SHAPES, st.sampled_from(["float32", "float64", "bfloat16"]), st.integers(0, 2)), max_size=12)


def table(rows: list[tuple[tuple[int, ...], str, int]]) -> list[TensorSpec]:
    return [TensorSpec(f"t{i}", shape, dtype, group) for i, (shape, dtype, group) in enumerate(rows)]
