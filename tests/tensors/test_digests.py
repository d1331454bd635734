"""Sums over tensors: equal bytes give equal sums, one changed value another, and a clock chooses the same windows everywhere."""

from __future__ import annotations

import pytest
import torch

from psjob.api import consistency as digests

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 7, 8, 1001])
def test_one_value_changes_the_sum(dtype: torch.dtype, count: int) -> None:
    values = torch.arange(count).to(dtype)
    before = digests.sums([values, values.clone()])
    assert before[0] == before[1] and 0 <= before[0] < 1 << 32
    for at in {0, count // 2, count - 1}:
        changed = values.clone()
        changed[at] = not changed[at] if dtype is torch.bool else changed[at] + 3
        assert digests.sums([changed]) != before[:1]


def test_how_a_tensor_lies_changes_nothing() -> None:
    flat = torch.randn(4, 6)
    odd = torch.empty(25)[1:].copy_(flat.flatten()).view(4, 6)
    assert digests.sums([flat]) == digests.sums([flat.t().contiguous().t()]) == digests.sums([odd])
    assert digests.sums([torch.empty(0), torch.nn.parameter.UninitializedParameter(), torch.eye(2).to_sparse()]) == [digests.UNREAD] * 3
    assert digests.sums([torch.view_as_complex(torch.ones(3, 2)).conj().imag]) == digests.sums([-torch.ones(3)]), "a lazy negative bit"


def test_windows_come_to_all_bytes() -> None:
    tensors = [torch.zeros(3), torch.zeros(0), torch.zeros(20_000), torch.zeros(500, dtype=torch.float64)]
    seen = {row for clock in range(200) for row, _ in digests.Windows(tensors).at(clock)}
    assert {2, 3} <= seen and 1 not in seen
    before = [digests.Windows(tensors).at(clock) for clock in range(40)]
    assert before == [digests.Windows([tensor.clone() for tensor in tensors]).at(clock) for clock in range(40)]
    tensors[2][12_345] = 1.0
    assert before != [digests.Windows(tensors).at(clock) for clock in range(40)]


def test_a_large_model_is_summed_in_parts() -> None:
    tensors = [torch.zeros(100) for _ in range(10)]
    assert digests.rows_of_part(tensors, 3) == list(range(10))
    parts = {tuple(digests.rows_of_part(tensors, clock, 1000)) for clock in range(100)}
    assert sorted(row for part in parts for row in part) == list(range(10)) and len(parts) == 4
    assert digests.rows_of_part([], 3) == []


def test_many_sums_become_few() -> None:
    assert digests.grouped_sums([5, 6], 2) == [(0, 5), (1, 6)]
    runs = digests.grouped_sums(list(range(10)), 4)
    assert [at for at, _ in runs] == [0, 3, 6, 9]
    changed = digests.grouped_sums([*range(9), 10], 4)
    assert [one == other for one, other in zip(runs, changed, strict=True)] == [True, True, True, False]
