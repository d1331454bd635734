"""Models and their optimizers: one pair, or several by name that are trained as one table of parameters.

Each step of an optimizer is a step of the job, in which the parameters of all others have no gradient. So a step counts for its own
parameters alone, as in one process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from psjob.api.stagecuts import WHOLE, StageCuts
from psjob.process.errors import Refused
from psjob.worker.hooks import Hook, before_forward, before_state

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")


@dataclass(eq=False)
class Pair:
    """`name` is empty for the one pair of a script that names none."""

    name: str
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    later: Sequence[dict[str, Any]] = ()
    """Groups that the script adds after attach, in their order."""
    cuts: StageCuts = WHOLE
    """Which stages have what, where the model is cut in stages."""
    plain: type[torch.optim.Optimizer] = field(init=False)
    """The optimizer's class before attach: its own step and state."""
    begun: Mapping[torch.Tensor, Any] = field(default_factory=dict)
    """The optimizer's state as it was attached."""
    told: Any = None
    """What `state_dict` of the optimizer gave since its last step."""
    first: int = 0
    """Row of its first parameter in the table."""
    added: int = 0
    """So many of `later` are groups of the optimizer by now."""

    def __post_init__(self) -> None:
        self.plain = type(self.optimizer)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """All, those that are not added yet last."""
        return [*self.optimizer.param_groups, *self.later[self.added :]]

    @property
    def rows(self) -> int:
        """Parameters of all groups."""
        return _count(self.groups)

    def has(self, row: int) -> bool:
        """Is this row of the table a parameter of its optimizer by now?"""
        return self.first <= row < self.first + _count(self.optimizer.param_groups)


def _count(groups: Sequence[dict[str, Any]]) -> int:
    return sum(len(group["params"]) for group in groups)


class Models(torch.nn.Module):
    """Several models as one, whose names begin with theirs. A name may be a word of torch's modules too, such as `training`."""

    def __init__(self, models: Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        self._modules.update(models)

    @property
    def trains(self) -> bool:
        """Is one of them in training?"""
        return any(model.training for model in self.children())


def joined(pairs: Sequence[Pair]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """One model and one optimizer that stand for all. Raises Refused where they cannot.

    The optimizer makes no step; its groups are the others' own, so that a learning rate is what it is there.
    """
    if len(pairs) == 1 and not pairs[0].name and not pairs[0].later:
        return pairs[0].model, pairs[0].optimizer
    kinds = list(dict.fromkeys(pair.plain.__name__ for pair in pairs))
    if len({pair.plain for pair in pairs}) > 1:
        raise Refused(f"the optimizers of one job must be of one class, and these are {' and '.join(kinds)}; take one class for all")
    seen: dict[int, str] = {}
    row = 0
    for pair in pairs:
        for p in (p for group in pair.groups for p in group["params"]):
            if id(p) in seen:
                raise Refused(f"a parameter of shape {tuple(p.shape)} is in {seen[id(p)]} and in {pair.name}; one optimizer may train it")
            seen[id(p)] = pair.name
        pair.first, row = row, row + pair.rows
    first = pairs[0].optimizer
    one = object.__new__(pairs[0].plain)
    one.__dict__.update(first.__dict__)
    one.param_groups = [group for pair in pairs for group in pair.groups]
    model = Models({pair.name: pair.model for pair in pairs}) if pairs[0].name else pairs[0].model
    return model, one


def check_name(name: str, before: Sequence[Pair]) -> None:
    """Raise Refused for a name that is none, or is taken."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise Refused(f"attach(…, name={str(name)[:40]!r}): must be a word of letters, digits and _, such as 'generator'")
    if any(pair.name == name for pair in before):
        raise Refused(f"attach(…, name={name!r}) was called twice; each model has a name of its own")


def check_overlap(overlap: bool, pairs: Sequence[Pair]) -> None:
    """Raise Refused where overlap would have to know parameters that come later."""
    if overlap and any(pair.later for pair in pairs):
        raise Refused("attach(…, later=…): overlap=True knows only parameters that are trained from the beginning; leave overlap out")


def refuse_more(before: Sequence[Pair]) -> NoReturn:
    """Raise Refused: these are attached, and no more can be."""
    known = ", ".join(pair.name for pair in before if pair.name)
    raise Refused(
        f"attach after {known} were in use; attach all models, each with its name, before the first of them is run"
        if known
        else "attach was called twice; give each model a name, such as attach(model, optimizer, name='generator')"
    )


class FirstUse:
    """Calls `act` once, when one of the models is first used: run, copied, or asked for its state."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._handles: list[Any] = []

    def watch(self, pair: Pair) -> None:
        """One more."""
        used = Hook(lambda *_given: self._used())
        self._handles += [
            before_forward(pair.model, used, prepend=True),
            before_state(pair.model, used),
            pair.optimizer.register_step_pre_hook(lambda *_given: self._unused(pair)),
        ]

    def stop(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _used(self) -> None:
        if self._handles:
            self.stop()
            self._act()

    def _unused(self, pair: Pair) -> None:
        raise Refused(f"the optimizer of {pair.name} made a step before any attached model was run")
