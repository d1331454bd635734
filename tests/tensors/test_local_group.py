"""What the processes of a worker bring to a step, their memory, and their records."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob.layout.blocks import Layout, TensorSpec
from psjob.modes import Push
from psjob.protocol.worker.local_group import SMALL, Part, RecordMaker, Records, Whole, join_records, owner, split_records, together
from psjob.shard.pending import PendingPush, PushMetadata, push_weights
from psjob.worker import localreduce
from psjob.worker.localreduce import PodMemory

TABLE = tuple(TensorSpec(f"t{row}", (size, 3), "float32", 0) for row, size in enumerate((50, 400, 7, 260)))
LAYOUT = Layout.of(TABLE, limit_bytes=1024)


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ({0: Part(3), 1: Part(3)}, Whole((0, 1), False, False, frozenset(), None)),
        ({1: Part(3), 0: Part(3, absent=True)}, Whole((1,), False, False, frozenset(), None)),
        ({0: Part(3, absent=True), 1: Part(3, absent=True)}, Whole((), True, False, frozenset(), None)),
        ({0: Part(3), 1: Part(3, skip=True, bad=4)}, Whole((), False, True, frozenset(), 4)),
        ({0: Part(3, none=frozenset({1, 2})), 2: Part(3, none=frozenset({2, 5}))}, Whole((0, 2), False, False, frozenset({2}), None)),
        ({0: Part(3, none=frozenset({1})), 2: Part(3, absent=True)}, Whole((0,), False, False, frozenset({1}), None)),
    ],
)
def test_one_push_of_several_processes(parts: dict[int, Part], whole: Whole) -> None:
    assert together(parts) == whole


@given(st.builds(Part, st.integers(0), st.booleans(), st.booleans(), st.frozensets(st.integers(0, 99)), st.none() | st.integers(0, 99)))
def test_a_part_is_what_it_was_told_as(part: Part) -> None:
    assert Part.of(part.to_json()) == part


@given(st.lists(st.integers(0, 63), min_size=1, unique=True).map(sorted), st.integers(1, 200))
def test_each_block_has_one_owner_and_none_has_many_more_than_others(active: list[int], blocks: int) -> None:
    counts = [sum(owner(block, active) == local for block in range(blocks)) for local in active]
    assert sum(counts) == blocks and max(counts) - min(counts) <= 1


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(0, 99), st.booleans(), st.data())
def test_the_sum_is_that_of_the_present_in_their_order(processes: int, seed: int, mean: bool, data: st.DataObject) -> None:
    present = data.draw(st.lists(st.integers(0, processes - 1), min_size=1, unique=True).map(sorted))
    torch.manual_seed(seed)
    gradients = [[torch.randn(spec.shape) if row != 2 else None for row, spec in enumerate(TABLE)] for _ in range(processes)]
    fd = localreduce.make(LAYOUT, processes)
    memories = [PodMemory(LAYOUT, processes, local, os.dup(fd)) for local in range(processes)]
    os.close(fd)
    for local in present:
        memories[local].gather(gradients[local], 0.5)
    for memory in memories:
        memory.sum(present, list(range(processes)), mean)
    targets = [torch.empty(spec.shape) for spec in TABLE]
    for block in LAYOUT.blocks:
        memories[0].answer(block.index).copy_(memories[0].summed(block.index))
    memories[-1].scatter(targets)
    for row, target in enumerate(targets):
        total = torch.zeros(TABLE[row].shape)
        for number, local in enumerate(present):
            gradient = gradients[local][row]
            scaled = torch.zeros(TABLE[row].shape) if gradient is None else gradient * 0.5
            total = scaled if number == 0 else total + scaled
        assert torch.equal(target, total * (1.0 / len(present)) if mean and len(present) > 1 else total)


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=9))
def test_records_of_several_come_back_as_they_were(records: list[bytes]) -> None:
    assert split_records(join_records(records)) == records


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=5), st.integers(0, 400))
def test_a_torn_composite_is_refused(records: list[bytes], cut: int) -> None:
    whole = join_records(records)
    for torn in (whole[: 4 + cut % (len(whole) - 4)], whole + b"x"):
        with pytest.raises(ValueError, match="record of"):
            split_records(torn)


def test_a_record_of_one_process_is_alone() -> None:
    assert split_records(b"PSJR") == [b"PSJR"]


def test_a_large_record_is_made_where_it_is_wanted() -> None:
    maker = RecordMaker()
    assert maker.make(lambda: b"a" * SMALL, large=False) == b"a" * SMALL
    assert maker.make(lambda: b"a" * (SMALL + 1), large=False) == b"a" * (SMALL + 1)
    assert maker.make(lambda: b"b", large=False) is None
    maker.wanted = True
    assert maker.make(lambda: b"c", large=True) == b"c"
    maker.wanted = False
    assert maker.make(lambda: b"d", large=True) is None and maker.make(lambda: b"e", large=False) == b"e"


def test_the_record_of_a_worker_is_of_one_clock() -> None:
    records = Records(3)
    records.add(0, 4, b"zero")
    records.add(2, 4, b"two")
    assert records.whole(4) is None
    records.add(1, 3, b"old")
    assert records.whole(4) is None
    records.add(1, 4, b"one")
    assert split_records(records.whole(4) or b"") == [b"zero", b"one", b"two"] and records.whole(5) is None
    records.add(1, None, b"through")
    records.add(0, 5, b"next")
    records.add(2, 5, b"next")
    assert split_records(records.whole(5) or b"") == [b"next", b"through", b"next"]


@pytest.mark.parametrize(
    ("counts", "shares"), [([2, 2, 2], None), ([None, 4], None), ([2, 1, None], [2 / 3, 1 / 3, 0.0]), ([1, 4], [0.2, 0.8])]
)
def test_a_push_counts_by_its_processes(counts: list[int | None], shares: list[float] | None) -> None:
    class Grad:
        def free(self) -> None:
            """As a gradient's buffer."""

    batch = [
        PendingPush(Push(rank, 3, None), None if count is None else Grad(), False, PushMetadata((), frozenset(), processes=count or 1))
        for rank, count in enumerate(counts)
    ]
    assert push_weights(batch) == shares
