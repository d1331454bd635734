"""Gradients that were left, or changed after they were clipped: a step of them is refused, and one of others is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from psjob.api.attached import AttachedJob
from psjob.api.owngradients import CHANGED, LOST, UNCLIPPED, LeftGradients
from psjob.api.state import renewed
from psjob.resume import record

Change = Callable[[torch.nn.Linear], object]


def every(_row: int) -> bool:
    return True


def backward(model: torch.nn.Linear) -> None:
    model(torch.ones(1, 3)).sum().backward()


def anew(model: torch.nn.Linear) -> None:
    model.zero_grad()
    backward(model)


def zeroed(model: torch.nn.Linear) -> None:
    model.zero_grad(set_to_none=False)
    backward(model)


def stepped() -> tuple[torch.nn.Linear, LeftGradients]:
    """A model whose step was made, and its gradients."""
    model = torch.nn.Linear(3, 1)
    backward(model)
    return model, LeftGradients(list(model.parameters()), [0, 1])


@pytest.mark.parametrize(
    ("between", "problem"),
    [
        (lambda _: None, ""),
        (backward, CHANGED),
        (anew, CHANGED),
        (lambda model: model.weight.grad.mul_(2.0), CHANGED),
        (torch.nn.Linear.zero_grad, CHANGED),
        (lambda model: model.weight.data.mul_(2.0), ""),
    ],
)
def test_a_gradient_that_changes_after_it_was_clipped_is_refused(between: Change, problem: str) -> None:
    model, left = stepped()
    left.clip([0, 1])
    between(model)
    assert left.problem(every) == problem


def test_a_gradient_that_is_clipped_once_more_is_as_it_was_then() -> None:
    model, left = stepped()
    left.clip([0, 1])
    backward(model)
    left.clip([0, 1])
    assert not left.problem(every)
    backward(model)
    left.forget(every)
    assert not left.problem(every), "that step was over, or was not made"


def test_a_step_of_other_rows_may_be_made() -> None:
    model, left = stepped()
    left.clip([1])
    backward(model)
    assert not left.problem(lambda row: row == 0)
    assert left.problem(lambda row: row == 1) == CHANGED


def test_what_a_job_makes_while_the_script_evaluates_can_be_trained_with() -> None:
    with torch.inference_mode():
        made = AttachedJob.carry_out(cast(Any, None), lambda: torch.zeros(1))
    assert not made.is_inference() and not made.requires_grad


@pytest.mark.parametrize(("between", "problem"), [(backward, UNCLIPPED), (lambda _: None, UNCLIPPED), (anew, ""), (zeroed, "")])
def test_a_gradient_that_the_shards_have_clipped_is_cleared_before_it_is_used(between: Change, problem: str) -> None:
    model, left = stepped()
    left.clip([0, 1])
    assert not left.problem(every)
    left.stepped(every, True)
    left.forget(every)
    between(model)
    assert left.problem(every) == problem


@pytest.mark.parametrize(("between", "problem"), [(backward, LOST), (lambda _: None, LOST), (anew, ""), (zeroed, "")])
def test_a_gradient_that_no_record_holds_is_cleared_before_it_is_used(between: Change, problem: str) -> None:
    _, before = stepped()
    before.stepped(every, False)
    model = torch.nn.Linear(3, 1)
    left = LeftGradients(list(model.parameters()), [0, 1])
    left.load_state_dict(before.state_dict())
    between(model)
    assert left.problem(every) == problem


def restarted() -> tuple[LeftGradients, torch.Tensor, torch.Tensor]:
    """A generator and a discriminator, in a script that stands behind the step of the second."""
    made, judged = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    left = LeftGradients([made, judged], [0, 1])
    left.load_state_dict({"rows": [1], "cleared": False})
    return left, made, judged


def test_gradients_that_another_step_adds_to_are_no_matter_of_that_step() -> None:
    """As in a GAN: the generator's backward goes through the discriminator, which clears its own before it uses them."""
    left, made, judged = restarted()
    (made * judged).sum().backward()
    assert not left.problem(lambda row: row == 0)
    judged.grad = None
    (made * judged).sum().backward()
    assert not left.problem(lambda row: row == 1)


def test_a_step_of_gradients_that_were_added_to_is_refused() -> None:
    left, made, judged = restarted()
    (made * judged).sum().backward()
    assert left.problem(lambda row: row == 1) == LOST


def test_what_is_put_back_within_a_step_leaves_its_graph_as_it_is() -> None:
    """The generator has run before the discriminator's step, at which a restarted script stands; its backward comes after that."""
    generator = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Tanh())
    made = generator(torch.randn(4, 2))
    kept = made.detach() + 0.5
    record.put_buffers(generator, {name: value + 1 for name, value in generator.state_dict().items() if name.startswith("1.running")})
    assert renewed(made, kept) is made and made.grad_fn is not None
    assert made.equal(kept) and float(generator[1].running_mean.sum()) > 2
    made.sum().backward()
    assert generator[0].weight.grad is not None
