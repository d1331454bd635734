"""Outside a job: what `attach` refuses in one it refuses here, so that a script that trains alone is one that a job takes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from psjob.api import phases
from psjob.api.attachable import check, table_of
from psjob.api.later import Later, groups
from psjob.api.pairs import Pair, check_name, check_overlap, joined, pairs_of, refuse_more
from psjob.api.rulechoice import check_kind

_attached: list[Pair] = []
"""Those of this process, in their order."""


def check_alone(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], name: str | None, overlap: bool, later: Later,
    stateful: dict[str, Any],
) -> None:  # fmt: skip
    """Raise Refused for what a job would refuse, whatever its manifest says. Nothing of the model changes."""
    if interactive():
        forget()
    if name is not None:
        check_name(name, _attached)
    if phases.is_next(_attached, model, optimizers, name):
        check(model, optimizers, stateful)
        check_kind(optimizers[0])
        phases.check_parameters(_attached[0].parameters, model, optimizers[0])
        return
    if _attached and (name is None or not _attached[0].name or any(_used(pair) for pair in _attached)):
        refuse_more(_attached)
    added = groups(later, optimizers)
    check(model, optimizers, stateful, added)
    made = pairs_of(name, model, optimizers, added)
    check_overlap(overlap, [*_attached, *made])
    for optimizer in optimizers:
        check_kind(optimizer)
    table_of(*joined([*_attached, *made]))
    _attached.extend(made)


def interactive() -> bool:
    """Somebody types here, as in a notebook, and runs a line again: `attach` begins anew each time."""
    return hasattr(sys, "ps1")


def forget() -> None:
    """Nothing is attached here any more."""
    _attached.clear()


def _used(pair: Pair) -> bool:
    """Was it trained since it was attached?"""
    return bool(pair.optimizer.state) or any(p.grad is not None for group in pair.optimizer.param_groups for p in group["params"])
