"""What was not given to `attach`: optimizers that make steps, whose parameters are each worker's own, and layers that nobody trains."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from psjob.api import advice
from psjob.api.pairs import AT_ONCE
from psjob.layout import members

if TYPE_CHECKING:
    from psjob.api.attached import AttachedJob

MOST = 64
"""Parameters of such optimizers that digests of weights hold."""


class Strangers:
    """Of an attached job, in the thread that trains. torch calls a hook after the step of any optimizer."""

    def __init__(self, job: AttachedJob) -> None:
        self._job = job
        self._known: set[int] = set()
        """Identities of optimizers that were looked at, which `_kept` keeps from being those of others."""
        self._kept: list[Any] = []
        self.kinds: list[str] = []
        """Classes of those that were found."""
        self.parameters: dict[int, tuple[str, torch.Tensor]] = {}
        """What they train, by identity: name and parameter."""

        self._built: dict[int, torch.Tensor] = {}
        """Parameters of the model as it was attached."""

    def watch(self) -> RemovableHandle:
        """Look at each step from now on, until the handle is removed."""
        self._built = {id(p): p for _, p in members.named_parameters(self._job.model)}
        self._known = {id(pair.optimizer) for pair in self._job.pairs}
        return register_optimizer_step_post_hook(self._stepped)

    def know(self, optimizer: torch.optim.Optimizer) -> None:
        """One more is attached."""
        self._known.add(id(optimizer))
        self._kept.append(optimizer)

    def look(self) -> None:
        """Say once which layers the script has put into the model since then, and no optimizer of the job trains."""
        known = self._built.keys() | self.parameters.keys()
        new = [name for name, p in members.named_parameters(self._job.model) if id(p) not in known and p.grad is not None]
        if new:
            more = f" and {len(new) - 3} more" if new[3:] else ""
            advice.tell(
                "replaced",
                f"{', '.join(new[:3])}{more} came into the model after attach. No optimizer of the job trains them, and "
                "final.safetensors has what the model had before. Build all layers before attach",
            )

    def _stepped(self, optimizer: torch.optim.Optimizer, _args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> None:
        if id(optimizer) in self._known or threading.get_ident() != self._job.stepper:
            return
        self._known.add(id(optimizer))
        self._kept.append(optimizer)
        attached = {id(p) for p in self._job.parameters}
        own = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in attached]
        if not own:
            if not self._job.in_step:  # else it is the inner optimizer of one that is attached
                self._tell_of_attached(optimizer)
            return
        names = {id(p): name for name, p in members.named_parameters(self._job.model)}
        kind = type(optimizer).__name__
        named = [names.get(id(p), f"of shape {tuple(p.shape)}") for p in own]
        self.kinds.append(kind)
        for name, p in list(zip(named, own, strict=True))[: MOST - len(self.parameters)]:
            self.parameters[id(p)] = (f"{name} of {kind}", p)
        several = self._job.place.config.workers > 1
        if several:
            more = f" and {len(named) - 3} more" if named[3:] else ""
            advice.tell(
                f"stranger {len(self.kinds)}",
                f"{kind} was not given to attach, and steps {len(own)} parameter{'s' if own[1:] else ''} ({', '.join(named[:3])}{more}). "
                "Each worker trains its own copy of them, and these come apart. Make one module of both, such as torch.nn.ModuleDict, and "
                "one optimizer with a parameter group for each, and attach those",
            )

    def _tell_of_attached(self, optimizer: torch.optim.Optimizer) -> None:
        """It steps what another one trains, as that of a second phase that nobody attached."""
        names = {id(p): name for name, p in members.named_parameters(self._job.model)}
        given = [p for group in optimizer.param_groups for p in group["params"]]
        first = names.get(id(given[0]), f"of shape {tuple(given[0].shape)}") if given else "none"
        kind, attached = type(optimizer).__name__, self._job.pairs[0].plain.__name__
        advice.tell(
            f"stranger to {kind}",
            f"{kind} was not given to attach, and steps parameters that the attached {attached} trains ({first} …). These steps are this "
            f"worker's own, and not the job's. Attach it too. {AT_ONCE}",
        )
