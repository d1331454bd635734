"""Accelerate in a job. A script imports nothing of this: `ps.attach` and `ps.shard` take what `accelerator.prepare` gives.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model, optimizer = ps.attach(model, optimizer)        # or before prepare
for batch in ps.shard(loader): ...
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from psjob.api.reporting import worker_place
from psjob.integrations import needs
from psjob.process import config

try:
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import send_to_device

    from psjob.integrations import acceleratetogether, accelerateworld
    from psjob.integrations.accelerateworld import World
    from psjob.integrations.accelerateworld import plain as plain
    from psjob.integrations.accelerateworld import plain_sampler as plain_sampler
except ImportError as missing:
    raise needs("accelerate", missing) from None


def inner(optimizer: Any) -> Any:
    """The torch optimizer that makes the steps."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


given = inner
"""What `attach` trains with, of the optimizer that it is given."""


def attached(optimizer: torch.optim.Optimizer) -> None:
    """Let wrappers of this torch optimizer, which is attached now, call its new `step`; one with a GradScaler has kept the old one."""
    for thing in gc.get_objects():
        if type(thing) is AcceleratedOptimizer and thing.optimizer is optimizer and thing.scaler is not None:
            thing.__setstate__({})


def moves(model: torch.nn.Module) -> bool:
    """Is `prepare` still to move this model to a device?"""
    device = AcceleratorState._shared_state.get("device")
    where = next((p.device for p in model.parameters()), None)
    return device is not None and where is not None and device.type != where.type


def begin() -> None:
    """Let Accelerate know of the job, if this process is a worker of one, before the script asks it how many processes there are."""
    place = worker_place()
    if place is not None:
        mark(place)


def mark(place: config.Place) -> None:
    """Let Accelerate's states be those of this worker."""
    global _world
    if _world is None:
        _world = World(place)
        accelerateworld.install(_world)
        acceleratetogether.install(_world)
    _world.mark()


_world: World | None = None


def hand(loader: Any) -> Callable[[Any], Any]:
    """What `loader` does to a batch before the script has it."""
    device, non_blocking = getattr(loader, "device", None), bool(getattr(loader, "_non_blocking", False))
    return lambda batch: batch if device is None else send_to_device(batch, device, non_blocking=non_blocking)


class Pass:
    """A pass over data as Accelerate sees it: accumulated gradients are stepped with at its last batch."""

    sharded = True
    """Workers have different batches in it."""

    def __init__(self, place: config.Place) -> None:
        mark(place)
        self.end_of_dataloader = False
        self.remainder = -1
        self._state = GradientState()
        self._state._add_dataloader(self)

    def gives(self, last: bool) -> None:
        """A batch goes to the script."""
        self.end_of_dataloader = last

    def over(self) -> None:
        """Nothing more is given."""
        self._state._remove_dataloader(self)
