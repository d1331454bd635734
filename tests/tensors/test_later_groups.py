"""Groups that come after attach: what is refused, and that a restarted script has added the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from psjob.api.pairs import AddedGroups, Pair, joined, later_groups, next_added
from psjob.process.errors import Refused

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
    _, whole = joined([one])
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
