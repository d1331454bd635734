"""Which parameters a Lightning callback will add to the optimizer later, such as a backbone's: the job has to know them from the beginning.

A callback of BaseFinetuning says so by what it does at each epoch. It is let do that once before training, with an optimizer that is
thrown away, and everything that it changed is put back.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator
from typing import Any, Final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning

MOST_EPOCHS: Final = 1000
"""In which a group is looked for, where the Trainer names no number of epochs."""


def later(trainer: Trainer, module: LightningModule, optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
    """For each group that will be added, its parameters, in their order."""
    callbacks = [one for one in trainer.callbacks if isinstance(one, BaseFinetuning)]
    if not callbacks:
        return []
    recorder = _copied(optimizer)
    known = len(recorder.param_groups)
    epochs = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else MOST_EPOCHS
    with _put_back(module, callbacks), contextlib.redirect_stdout(io.StringIO()):
        for epoch in range(epochs):
            for one in callbacks:
                one.finetune_function(module, epoch, recorder)
    return [list(group["params"]) for group in recorder.param_groups[known:]]


def _copied(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Another one of its class, of the same parameters."""
    made = copy.copy(optimizer)
    made.param_groups = [dict(group) for group in optimizer.param_groups]
    return made


@contextlib.contextmanager
def _put_back(module: LightningModule, callbacks: list[Any]) -> Iterator[None]:
    trained = [(p, p.requires_grad) for p in module.parameters()]
    tracked = norms(module)
    states = [(one, copy.copy(vars(one))) for one in callbacks]
    try:
        yield
    finally:
        for p, requires_grad in trained:
            p.requires_grad_(requires_grad)
        put_back_norms(module, tracked)
        for one, state in states:
            vars(one).clear()
            vars(one).update(state)


def norms(module: torch.nn.Module) -> dict[str, bool]:
    """Of each BatchNorm of the module, whether it takes statistics."""
    batch_norms = torch.nn.modules.batchnorm._BatchNorm
    return {name: one.track_running_stats for name, one in module.named_modules() if isinstance(one, batch_norms)}


def put_back_norms(module: torch.nn.Module, tracked: dict[str, bool]) -> None:
    """As `norms` gave it."""
    for name, one in module.named_modules():
        if name in tracked:
            one.track_running_stats = tracked[name]


def restored(callbacks: list[Any]) -> None:
    """After a restart psjob puts the groups back by itself: these callbacks shall not make others of their own."""
    for one in callbacks:
        if isinstance(one, BaseFinetuning):
            one._restarting = False
