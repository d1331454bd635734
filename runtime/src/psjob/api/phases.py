"""A model that is attached again with another optimizer: the next phase of its training, such as fine-tuning.

Where the workers step, the new optimizer takes the place of the one before, and its state begins. The shards cannot change their rule, so
where they step this is refused. Both optimizers may be given at once, and each is stepped in its phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from psjob.api.later import Later
from psjob.api.pairs import AT_ONCE, Pair
from psjob.api.recording import PlainState
from psjob.api.takeover import take_over
from psjob.layout import members
from psjob.process.errors import Refused

if TYPE_CHECKING:
    from psjob.api.attached import AttachedJob


def is_next(pairs: Sequence[Pair], model: torch.nn.Module, optimizers: Sequence[object], name: str | None) -> bool:
    """Is the model attached already, with one optimizer and no name, and is this another one for it?"""
    return (
        len(pairs) == 1 == len(optimizers)
        and name is None
        and not pairs[0].name
        and pairs[0].model is model
        and pairs[0].optimizer is not optimizers[0]
    )


def check_parameters(known: Sequence[torch.Tensor], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise Refused for a parameter that the first optimizer did not have."""
    had, names = {id(p) for p in known}, {id(p): name for name, p in members.named_parameters(model)}
    new = next((p for group in optimizer.param_groups for p in group["params"] if id(p) not in had), None)
    if new is not None:
        told = names.get(id(new), f"of shape {tuple(new.shape)}")
        raise Refused(f"attach was called again with a parameter that the first optimizer does not have: {told}. {AT_ONCE}")


def check(job: AttachedJob, optimizer: torch.optim.Optimizer, overlap: bool, later: Later) -> None:
    """Raise Refused where this job cannot go on with another optimizer."""
    old, new = job.pairs[0].plain.__name__, type(optimizer).__name__
    if job.session.reduces:
        check_parameters(job.parameters, job.model, optimizer)
        if overlap or later:
            what = "overlap" if overlap else "later"
            raise Refused(f"attach was called again, with {what}=…, which only the first call takes; leave it out")
        return
    if job.session.mode.name == "sync" and not job.place.config.stages:
        raise Refused(
            f"attach was called again with {new}, and the shards step by the rule and with the state of {old}. {AT_ONCE}. Or set "
            "training.updateAt: worker"
        )
    raise Refused(
        f"attach was called again with {new}, and training.mode {job.place.config.mode} goes on with {old}. Change the numbers of its "
        "param_groups, or train the second phase in a job of its own, whose script loads final.safetensors of the first before attach"
    )


def begin(job: AttachedJob, optimizer: torch.optim.Optimizer, stateful: dict[str, Any]) -> Pair:
    """Go on with `optimizer`. What it was given with takes the place of what has the same name."""
    old = job.pairs[0]
    pair = Pair("", old.model, optimizer, cuts=old.cuts)
    rows = {id(p): row for row, p in enumerate(job.parameters)}
    pair.rows = [rows[id(p)] for p in pair.parameters]
    job.go_on_with(pair, stateful)
    take_over(job, pair)
    return pair


class PhaseState(PlainState):
    """The state of the optimizer that steps now, in a resume record."""

    def state_dict(self) -> dict[str, Any]:
        """With its class, by which another one is known."""
        return {**super().state_dict(), "class": self.kind}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises Refused for the state of an optimizer of another phase."""
        state = dict(state)
        kind = state.pop("class", self.kind)
        sizes = [[len(group["params"]) for group in groups] for groups in (state["param_groups"], self.groups)]
        if kind != self.kind or sizes[0] != sizes[1]:
            raise Refused(
                f"{kind} of {sum(sizes[0])} parameters was attached when the record was taken, and {self.kind} of {sum(sizes[1])} is now. "
                "After a restart the lines of a phase that is over do not run again. Write a loop over ps.epochs(n) for each phase, and "
                "attach between them"
            )
        super().load_state_dict(state)
