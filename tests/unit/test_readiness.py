"""Which blocks are ready in a backward pass, and what a forward pass uses first: tables and a property."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from psjob.layout.blocks import Layout, TensorSpec
from psjob.worker.overlap import Readiness, learned, nothing_learned


def layout(*numels: int, limit: int = 1024) -> Layout:
    return Layout.of([TensorSpec(f"t{i}", (n,), "float32") for i, n in enumerate(numels)], limit)


def blocks_of(of: Layout, row: int) -> list[int]:
    return [block.index for block, _ in of.pieces_of(row)]


def test_a_block_waits_for_all_its_tensors_and_a_cut_tensor_readies_all_its_blocks() -> None:
    """Three small tensors share a block; the large one is cut into parts."""
    of = layout(64, 64, 64, 1000)
    ready = Readiness(of)
    assert ready.told(3) == blocks_of(of, 3) and len(blocks_of(of, 3)) == 4
    assert ready.told(1) == [] and ready.told(0) == []
    assert ready.told(2) == blocks_of(of, 2) == blocks_of(of, 0)
    assert ready.whole == {block.index for block in of.blocks}


def test_a_gradient_that_comes_again_makes_its_block_stale_until_all_have() -> None:
    """Accumulation, or a batch that was dropped: the block is ready again once, not once a tensor."""
    of = layout(64, 64)
    ready = Readiness(of)
    assert [ready.told(row) for row in (1, 0)] == [[], [0]]
    assert ready.told(1) == [] and ready.whole == set()
    assert ready.told(0) == [0] and ready.whole == {0}


def test_passes_a_step_are_learned_from_the_step_before() -> None:
    of = layout(64, 64)
    ready = Readiness(of)
    for _ in range(3):
        ready.told(0), ready.told(1)
    ready.step_made()
    assert [ready.told(row) for row in (0, 1, 0, 1, 0, 1)] == [[], [], [], [], [], [0]]
    ready.step_made()
    ready.step_made()  # a step without a batch teaches nothing
    assert [ready.told(row) for row in (0, 1, 0, 1, 0)] == [[]] * 5 and ready.told(1) == [0]


def test_a_tensor_that_had_no_gradient_is_not_waited_for_and_spoils_its_block_when_it_comes() -> None:
    of = layout(64, 64)
    ready = Readiness(of)
    assert ready.told(0) == []
    ready.step_made()
    assert ready.told(0) == [0] and ready.whole == {0}
    assert ready.told(1) == [] and ready.whole == set()
    ready.step_made()
    assert ready.told(0) == [] and ready.told(1) == [0]


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 5), max_size=30), max_size=6))
def test_a_whole_block_has_a_gradient_of_every_expected_row(steps: list[list[int]]) -> None:
    """Whatever comes: `whole` is exactly what was given out and not touched since, and never before its expected rows came."""
    of = layout(64, 64, 64, 64, 300, 64)
    ready = Readiness(of)
    expected = [1] * 6
    for told in steps:
        seen = [0] * 6
        current: set[int] = set()
        for row in told:
            seen[row] += 1
            given_out = ready.told(row)
            current = (current - set(blocks_of(of, row))) | set(given_out)
            for block in given_out:
                rows = {piece.tensor for piece in of.blocks[block].pieces}
                assert all(seen[r] >= expected[r] for r in rows) and any(expected[r] for r in rows)
            assert ready.whole == current
        ready.step_made()
        expected = seen if told else expected


def test_order_of_use_and_who_waits() -> None:
    """`c` never ran by itself: its parent reads it. `d` belongs to nobody who ran."""
    of = layout(200, 200, 200, 200, limit=1024)
    tree = {"": [], "a.last": [0], "a": [], "a.first": [1], "b": [], "b.c": [2], "d": [3]}
    use = learned(of, tree, ["a", "a.first", "a.last", "b"])
    assert use.waits == {"a": frozenset(), "a.first": {1}, "a.last": {0}, "b": {2}}
    assert use.at_once == {3}
    assert use.rank == (2, 1, 3, 0)


def test_a_tied_tensor_is_waited_for_by_both_and_ranked_by_the_first() -> None:
    of = layout(200, 200)
    use = learned(of, {"": [], "embed": [0], "body": [1], "head": [0]}, ["", "embed", "body"])
    assert use.waits == {"": {0}, "embed": {0}, "body": {1}} and use.rank == (0, 1) and use.at_once == frozenset()


def test_before_anything_is_learned_all_is_waited_for() -> None:
    use = nothing_learned(layout(200, 200))
    assert use.rank == (0, 1) and use.waits == {} and use.at_once == {0, 1}
