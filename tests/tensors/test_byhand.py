"""Which changes of weights are seen, and what is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from psjob.api import scriptchanges
from psjob.api.scriptchanges import WeightChangeDetector as Detector


def watched(*tensors: torch.Tensor, lent: Callable[[int], bool] = lambda _row: False) -> tuple[Detector, list[torch.nn.Parameter]]:
    parameters = [torch.nn.Parameter(t, requires_grad=t.is_floating_point() or t.is_complex()) for t in tensors]
    by_hand = Detector(parameters, lent)
    by_hand.remember()
    return by_hand, parameters


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(300, 200),
        torch.randn(()),
        torch.randn(64, 8, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(64, 32).t(),
        torch.randn(64, 32)[:, ::2],
        torch.randn(40, dtype=torch.bfloat16),
        torch.randn(40, dtype=torch.complex64),
        torch.randn(40, dtype=torch.float64),
        torch.arange(40),
    ],
    ids=lambda t: f"{str(t.dtype).removeprefix('torch.')}-{'x'.join(map(str, t.shape))}",
)
def test_a_change_is_seen_and_one_that_is_put_back_is_none(tensor: torch.Tensor) -> None:
    by_hand, (other, p) = watched(torch.randn(4), tensor.clone(memory_format=torch.preserve_format))
    assert by_hand.change() is None
    kept = p.detach().clone()
    p.data.add_(3)
    found = by_hand.change()
    assert found is not None and found.row == 1 and "was" in found.seen
    p.data.copy_(kept)
    assert by_hand.change() is None
    by_hand.remember()
    with torch.no_grad():
        other.zero_()
    assert (found := by_hand.change()) is not None and found.row == 0


def test_other_memory_of_the_same_values_is_no_change_and_what_it_holds_is_compared() -> None:
    by_hand, (p,) = watched(torch.randn(50, 50))
    own = p.data
    p.data = p.data.clone()
    assert by_hand.change() is None
    p.data = torch.zeros(50, 50)
    assert by_hand.change() is not None
    p.data = own
    assert by_hand.change() is None
    p.data = own.double()
    found = by_hand.change()
    assert found is not None and found.seen == "it was float32 of shape (50, 50) on cpu and is float64 of shape (50, 50) on cpu"


def test_rounding_is_no_change_and_a_nan_is_itself() -> None:
    by_hand, (p,) = watched(torch.cat([torch.randn(1000), torch.tensor([float("nan"), float("inf")])]))
    step = torch.randn(1002) * 0.05
    p.data.add_(step)
    assert by_hand.change() is not None
    p.data.sub_(step)
    assert by_hand.change() is None
    p.data[1000] = 0.0
    assert by_hand.change() is not None


def test_a_value_that_is_not_looked_at_is_seen_the_second_time() -> None:
    by_hand, (p,) = watched(torch.zeros(scriptchanges.VALUES * 10))
    with torch.no_grad():
        p[1] = 5.0
    assert by_hand.change() is None
    by_hand.remember()
    with torch.no_grad():
        p[1] = 6.0
    found = by_hand.change()
    assert found is not None and found.seen == "a value was 5 and is 6"


def test_of_many_parameters_the_looks_take_turns() -> None:
    by_hand, parameters = watched(*[torch.zeros(3) for _ in range(scriptchanges.ROWS * 2)])
    parameters[scriptchanges.ROWS + 5].data.fill_(1.0)
    assert by_hand.change() is None
    by_hand.remember()
    parameters[scriptchanges.ROWS + 5].data.fill_(2.0)
    found = by_hand.change()
    assert found is not None and found.row == scriptchanges.ROWS + 5


def test_the_shards_own_change_and_an_unfinished_step_are_none() -> None:
    by_hand, (p,) = watched(torch.zeros(4), lent=lambda _row: True)
    p.data.fill_(1.0)
    assert by_hand.change() is None
    by_hand, (p,) = watched(torch.zeros(4))
    by_hand.forget()
    p.data.fill_(1.0)
    assert by_hand.change() is None


def test_nothing_to_look_at() -> None:
    by_hand, _ = watched(torch.zeros(0, 3))
    assert by_hand.change() is None
