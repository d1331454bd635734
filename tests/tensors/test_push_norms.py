"""How large a push may be: measured exactly, scaled down to the limit, told once."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psjob.shard.push_metrics import PushNorms, norm_of

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), max_size=3000), st.floats(1e-6, 1e12))
def test_what_comes_out_is_within_the_limit_and_points_the_same_way(values: list[float], limit: float) -> None:
    push = torch.tensor(values, dtype=torch.float32)
    before = push.clone()
    norms = PushNorms(limit)
    out = norms.bounded(0, 1, "block 0", push)
    norm = float(push.double().norm())
    assert torch.equal(push, before), "the worker may look at it still"
    assert float(out.double().norm()) <= limit * (1 + 1e-4)
    if norm <= limit * (1 - 1e-4):
        assert out is push and norms.first is None
    elif norm > limit * (1 + 1e-4):
        assert norms.count == 1
        assert torch.allclose(out.double(), push.double() * (limit / norm), rtol=1e-3, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 1e4, 1e25, 1e38])
def test_the_norm_is_right_also_where_squares_overflow_or_vanish(dtype: torch.dtype, scale: float) -> None:
    numbers = (torch.linspace(0.1, 1.0, 5000, dtype=torch.float64) * scale).to(dtype).view(50, 100)
    found, right = norm_of(numbers), float(numbers.double().norm())
    if math.isinf(right) or bool(numbers.isinf().any()):
        assert found is None
    else:
        assert found == pytest.approx(right, rel=1e-5, abs=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_inf_count_as_zeros(bad: float, dtype: torch.dtype) -> None:
    push = torch.ones(2000, dtype=dtype)
    push[1500] = bad
    norms = PushNorms(1e9)
    out = norms.bounded(3, 7, "table words", push)
    assert out.dtype == dtype and not out.any()
    assert norms.told() == {"pushes": 1, "worker": 3, "step": 7, "of": "table words", "norm": None}
    assert norms.sentence() == (
        "worker 3's push of table words at step 7 is beyond training.maxPushNorm 1e+09: it held NaN or inf and was left out"
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_scaled_without_loss_of_the_factor(dtype: torch.dtype) -> None:
    push = torch.full((4000,), 60000.0, dtype=dtype)
    out = PushNorms(1e-3).bounded(0, 1, "block 0", push)
    assert float(out.double().norm()) == pytest.approx(1e-3, rel=0.02)


def test_a_push_counts_once_and_the_first_is_named() -> None:
    norms = PushNorms(1.0)
    for worker, clock in ((1, 4), (1, 4), (0, 4), (1, 5), (1, 3)):
        norms.bounded(worker, clock, "block 2", torch.full((4,), 5.0))
    assert norms.count == 3 and norms.first == (1, 4, "block 2", 10.0)
    assert (
        norms.sentence()
        == "worker 1's push of block 2 at step 4 is beyond training.maxPushNorm 1: it had a norm of 10 and was scaled down to it"
    )
    assert norms.bounded(0, 9, "block 3", torch.empty(0)).numel() == 0
