"""Parameter groups that a script adds after attach: known from the beginning, without a gradient until they are added."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from psjob.layout import members
from psjob.process.errors import Refused

Later = Sequence["torch.nn.Module | Iterable[torch.Tensor]"]
"""What `attach(…, later=…)` takes: for each group a module or its parameters, in the order in which they are added."""


def groups(later: Later, optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """A parameter group for each, with the first optimizer's defaults. Raises Refused for what is none."""
    optimizer = next(iter(optimizers), None)
    if not later or not isinstance(optimizer, torch.optim.Optimizer):
        return []
    if isinstance(later, torch.nn.Module | torch.Tensor) or not isinstance(later, Sequence):
        raise Refused(f"attach(…, later=…) takes a list with a module or parameters for each group, got {type(later).__name__}")
    made = []
    seen = {p for group in optimizer.param_groups for p in group["params"]}
    for number, part in enumerate(later):
        given = [*(part.parameters() if isinstance(part, torch.nn.Module) else part if isinstance(part, Iterable) else ())]
        if not given or not all(isinstance(p, torch.Tensor) for p in given):
            raise Refused(
                f"attach(…, later=…): entry {number} is {type(part).__name__} without parameters; give a module or its parameters"
            )
        twice = next((p for p in given if p in seen), None)
        if twice is not None:
            raise Refused(f"attach(…, later=…): entry {number} has a parameter of shape {tuple(twice.shape)} that is in a group already")
        seen.update(given)
        made.append({**optimizer.defaults, "params": given})
    return made


def next_added(expected: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` as a group whose parameters can be read several times. Raises Refused where it is not the first of `expected`."""
    params = given["params"]
    added = [params] if isinstance(params, torch.Tensor) else list(params)
    if not expected:
        raise Refused(
            "add_param_group after attach: attach was given no such group. Name its parameters there: attach(…, later=[model.backbone])"
        )
    wanted = expected[0]["params"]
    if [id(p) for p in added] != [id(p) for p in wanted]:
        raise Refused(
            f"add_param_group after attach has {len(added)} parameters of shapes {_shapes(added)}; the group that comes next of attach(…, "
            f"later=…) has {len(wanted)} of shapes {_shapes(wanted)}. Add the groups in that order, each with the same parameters"
        )
    return {**given, "params": added}


def _shapes(params: Sequence[torch.Tensor]) -> str:
    told = [str(tuple(p.shape)) for p in params[:3]]
    return ", ".join(told) + (", …" if len(params) > len(told) else "")


class AddedGroups:
    """How many such groups a script has added, for its resume record."""

    counts_again = True
    """A loop without `ps.epochs` adds them again on the way to its place."""

    def __init__(self, pairs: Sequence[Any]) -> None:
        self._pairs = pairs

    def state_dict(self) -> dict[str, Any]:
        """The number for each pair."""
        return {"added": [pair.added for pair in self._pairs]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add what is missing. Raises Refused where the script has added more than when its record was taken."""
        for pair, wanted in zip(self._pairs, state["added"], strict=True):
            if pair.added > wanted:
                raise Refused(
                    f"the script had added {wanted} parameter groups after attach when its record was taken, and now {pair.added}. "
                    "Add a group by the number of the epoch, before the loop over its batches"
                )
            for group in pair.later[pair.added : wanted]:
                pair.optimizer.add_param_group(dict(group))


class Trained:
    """Which parameters are trained: those whose `requires_grad` a script has changed since attach, for its resume record."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._first = [(name, p, p.requires_grad) for name, p in members.named_parameters(model)]

    def state_dict(self) -> dict[str, bool]:
        """By name of the parameter."""
        return {name: p.requires_grad for name, p, first in self._first if p.requires_grad != first}

    def load_state_dict(self, state: Mapping[str, bool]) -> None:
        """Put them back; all others are as they were at attach."""
        for name, p, first in self._first:
            wanted = state.get(name, first)
            if p.requires_grad != wanted:
                p.requires_grad_(wanted)
