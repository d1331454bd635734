"""Gradients that were left, or changed after they were clipped: a step of them is refused, and one of others is not.

- What a script does beside what it attached is told once, and nothing is told of what it did not do.
- Groups that come after attach: what is refused, and that a restarted script has added the same.
- Which changes of weights are seen, and what is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

from psjob.api import advice, script_changes
from psjob.api.attachable import AddedGroups, Pair, joined_pairs, later_groups, next_added
from psjob.api.consistency import Stepping, Unattached
from psjob.api.script_changes import CHANGED, LOST, UNCLIPPED, LeftGradients, OwnGradients
from psjob.api.script_changes import WeightChangeDetector as Detector
from psjob.api.training_job import TrainingJob
from psjob.api.values import renewed
from psjob.process.errors import Refused
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
        made = TrainingJob.carry_out(cast(Any, None), lambda: torch.zeros(1))
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


def told_of_gradients(model: nn.Module, step: Any, capsys: pytest.CaptureFixture[str]) -> str:
    parameters = list(model.parameters())
    looks = OwnGradients(parameters, [name for name, _ in model.named_parameters()])
    for _ in range(3):
        step()
        looks.step(range(len(parameters)), False)
        for p in parameters:
            p.grad = None
    return capsys.readouterr().err


def test_gradients_that_share_memory_are_no_change(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 1)
    flat = torch.zeros(3)

    def backward() -> None:
        for p, part in zip(model.parameters(), (flat[:2], flat[2:]), strict=True):
            p.grad = part.view_as(p)
        model(torch.ones(1, 2)).sum().backward()

    assert not told_of_gradients(model, backward, capsys)


def test_a_gradient_that_is_changed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 1)

    def backward() -> None:
        model(torch.ones(1, 2)).sum().backward()
        model.bias.grad.mul_(2)  # type: ignore[union-attr]

    assert told_of_gradients(model, backward, capsys).count("the gradient of bias was changed by hand") == 1


def test_a_layer_that_came_after_attach_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(advice, "tell_once", lambda _kind, sentence: told.append(sentence))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    unattached = Unattached(model, list(model.parameters()), [], False, Stepping())
    unattached.watch().remove()
    model(torch.ones(1, 2)).sum().backward()
    unattached.look()
    assert not told
    model[1] = nn.Linear(2, 1)
    unattached.look()
    assert not told, "it was made for an evaluation, so far"
    model(torch.ones(1, 2)).sum().backward()
    unattached.look()
    assert told == [told[0]] and told[0].startswith("1.weight, 1.bias came into the model after attach")


BODY, HEAD, LAST = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)


def pair() -> Pair:
    optimizer = torch.optim.Adam(HEAD.parameters(), lr=0.5)
    return Pair("", nn.Sequential(BODY, HEAD, LAST), optimizer, later_groups([BODY, LAST.parameters()], [optimizer]))


def test_groups_have_the_defaults_of_the_optimizer() -> None:
    first, second = pair().later
    assert (first["lr"], second["betas"]) == (0.5, (0.9, 0.999))
    assert [tuple(p.shape) for p in first["params"] + second["params"]] == [(4, 3), (4,), (2, 2), (2,)]


def test_rows_of_groups_that_are_not_added_are_the_jobs_and_not_the_optimizers() -> None:
    one = pair()
    _, whole = joined_pairs([one])
    assert one.rows == list(range(6)) and [one.has(row) for row in range(6)] == [True] * 2 + [False] * 4
    assert [len(group["params"]) for group in whole.param_groups] == [2, 2, 2] and len(one.optimizer.param_groups) == 1


def test_parameters_that_are_given_once_can_be_read_again() -> None:
    added = next_added(pair().later, {"params": BODY.parameters(), "lr": 3})
    assert added == {"params": list(BODY.parameters()), "lr": 3}


@pytest.mark.parametrize(
    ("expected", "given", "words"),
    [
        (0, LAST, r"2 parameters of shapes \(2, 2\), \(2,\); the group that comes next .* has 2 of shapes \(4, 3\), \(4,\)"),
        (1, BODY, r"has 2 of shapes \(2, 2\), \(2,\)"),
        (2, BODY, "attach was given no such group"),
    ],
)
def test_another_group_than_the_next_is_refused(expected: int, given: nn.Module, words: str) -> None:
    with pytest.raises(Refused, match=words):
        next_added(pair().later[expected:], {"params": given.parameters()})


def test_groups_that_a_script_has_not_added_again_are_added() -> None:
    one, again = pair(), pair()
    one.added = 2
    AddedGroups([again]).load_state_dict(AddedGroups([one]).state_dict())
    assert [len(group["params"]) for group in again.optimizer.param_groups] == [2, 2, 2]


def test_a_script_that_has_added_more_is_refused() -> None:
    one, ahead = pair(), pair()
    ahead.added = 2
    with pytest.raises(Refused, match=r"had added 0 parameter groups .* and now 2\. Add a group by the number of the epoch"):
        AddedGroups([ahead]).load_state_dict(AddedGroups([one]).state_dict())


def test_a_record_that_is_made_within_a_step_has_the_rows_of_one_that_is_made_without() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(4)]
    for row in (0, 2, 3):
        parameters[row].grad = torch.ones(2)
    left = LeftGradients(parameters, range(4))
    assert left.problem(lambda row: row != 3) == ""
    without = left.state_dict()
    left.pushed([parameters[0].grad, None, parameters[2].grad, None])
    assert left.state_dict() == without == {"rows": [0, 2, 3], "cleared": False}
    parameters[0].grad = None
    left.forget(every)
    assert left.state_dict()["rows"] == [2, 3], "after the step the parameters are asked"


class LentMemory:
    """Of shards that hold `values`, by row; what the process has `written` to is its own."""

    def __init__(self, *values: torch.Tensor, shown: bool = False) -> None:
        self.values, self.shown = [value.clone() for value in values], shown
        self.written = not values

    def shows(self, _row: int) -> bool:
        return self.shown

    def untouched(self) -> bool:
        return not self.written

    def held(self, row: int) -> torch.Tensor:
        return self.values[row].reshape(-1).clone()


def watched(*tensors: torch.Tensor, lent: LentMemory | None = None) -> tuple[Detector, list[torch.nn.Parameter]]:
    parameters = [torch.nn.Parameter(t, requires_grad=t.is_floating_point() or t.is_complex()) for t in tensors]
    by_hand = Detector(parameters, LentMemory() if lent is None else lent)
    by_hand.remember()
    return by_hand, parameters


@pytest.mark.parametrize("tensor", [
    torch.randn(300, 200),
    torch.randn(()),
    torch.randn(64, 8, 3, 3).to(memory_format=torch.channels_last),
    torch.randn(64, 32).t(),
    torch.randn(64, 32)[:, ::2],
    torch.randn(40, dtype=torch.bfloat16),
    torch.randn(40, dtype=torch.complex64),
    torch.randn(40, dtype=torch.float64),
    torch.arange(40),
], ids=lambda t: f"{str(t.dtype).removeprefix('torch.')}-{'x'.join(map(str, t.shape))}")  # fmt: skip
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
    by_hand, (p,) = watched(torch.zeros(script_changes.VALUES * 10))
    with torch.no_grad():
        p[1] = 5.0
    assert by_hand.change() is None
    by_hand.remember()
    with torch.no_grad():
        p[1] = 6.0
    found = by_hand.change()
    assert found is not None and found.seen == "a value was 5 and is 6"


def test_lent_weights_are_compared_with_what_the_shards_hold_once_their_pages_were_written_to() -> None:
    values = [torch.zeros(8), torch.randn(6, 5)]
    lent = LentMemory(*values)
    by_hand, (_, p) = watched(*(value.clone() for value in values), lent=lent)
    assert by_hand.change() is None
    own = p.data
    p.data = p.data.clone()
    assert by_hand.change() is None, "other memory of the same values"
    p.data = p.data + 1
    found = by_hand.change()
    assert found is not None and found.row == 1, "other memory of other values, and no page was written to"
    p.data = own
    p.data.add_(1)
    lent.written = True
    found = by_hand.change()
    assert found is not None and found.row == 1
    p.data.copy_(values[1])
    assert by_hand.change() is None, "put back"
    by_hand.remember()
    p.data.add_(1)
    assert by_hand.change() is not None, "pages were its own before, so that values are remembered"


def test_of_many_parameters_the_looks_take_turns() -> None:
    by_hand, parameters = watched(*[torch.zeros(3) for _ in range(script_changes.ROWS * 2)])
    parameters[script_changes.ROWS + 5].data.fill_(1.0)
    assert by_hand.change() is None
    by_hand.remember()
    parameters[script_changes.ROWS + 5].data.fill_(2.0)
    found = by_hand.change()
    assert found is not None and found.row == script_changes.ROWS + 5


def test_the_shards_own_change_and_an_unfinished_step_are_none() -> None:
    by_hand, (p,) = watched(torch.zeros(4), lent=LentMemory(shown=True))
    p.data.fill_(1.0)
    assert by_hand.change() is None
    by_hand, (p,) = watched(torch.zeros(4))
    by_hand.forget()
    p.data.fill_(1.0)
    assert by_hand.change() is None


def test_nothing_to_look_at() -> None:
    by_hand, _ = watched(torch.zeros(0, 3))
    assert by_hand.change() is None
