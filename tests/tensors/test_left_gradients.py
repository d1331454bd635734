"""A script that stands within an iteration after a restart: gradients that a step has left, and graphs that wait for their backward."""

from __future__ import annotations

import torch

from psjob.api.leftgradients import LOST, LeftGradients
from psjob.api.state import renewed
from psjob.resume import buffers


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
    buffers.put(generator, {name: value + 1 for name, value in generator.state_dict().items() if name.startswith("1.running")})
    assert renewed(made, kept) is made and made.grad_fn is not None
    assert made.equal(kept) and float(generator[1].running_mean.sum()) > 2
    made.sum().backward()
    assert generator[0].weight.grad is not None
