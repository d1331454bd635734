"""Lightning Fabric in a job. A script imports nothing of this: `ps.attach` stands before `fabric.setup`, and `ps.shard` takes what
`setup_dataloaders` gives.

model, optimizer = ps.attach(model, optimizer)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)
for batch in ps.shard(loader): ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from psjob.api import attach as attaching
from psjob.api.reporting import worker_place
from psjob.integrations import barriers, needs
from psjob.process import config
from psjob.process.errors import Refused

try:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies.single_device import SingleDeviceStrategy
    from lightning.fabric.utilities import move_data_to_device
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.fabric.wrappers import _FabricDataLoader, _FabricOptimizer
except ImportError as missing:
    raise needs("lightning", missing) from None


def begin() -> None:
    """Let Fabric know of the job, if this process is a worker of one."""
    place = worker_place()
    if place is not None:
        mark(place)


def mark(place: config.ProcessContext) -> None:
    """Let `is_global_zero` and `save` be those of rank 0 only, and let the workers reduce, gather and wait meetings."""
    rank_zero_only.rank = place.rank
    if getattr(SingleDeviceStrategy, "psjob", False):
        return
    SingleDeviceStrategy.psjob = True
    SingleDeviceStrategy.global_rank = property(lambda self: place.rank, lambda self, rank: None)
    SingleDeviceStrategy.is_global_zero = property(lambda self: place.rank == 0)
    SingleDeviceStrategy.all_reduce = _all_reduce
    SingleDeviceStrategy.all_gather = _all_gather
    SingleDeviceStrategy.barrier = _barrier
    made = Fabric.__init__

    def init(self: Any, *given: Any, **named: Any) -> None:
        made(self, *given, **named)
        _devices.append(self.device)

    Fabric.__init__ = init


_devices: list[torch.device] = []
"""To which `setup` of the Fabrics that there are moves models."""


def _in_training() -> bool:
    """Have workers different batches here?"""
    job = attaching.current
    return job is not None and job.places.under_way is not None and job.training


def _all_reduce(self: Any, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
    return barriers.reduced(tensor, reduce_op, "fabric.all_reduce") if _in_training() else tensor


def _all_gather(self: Any, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
    return barriers.gathered(tensor, sync_grads, "fabric.all_gather") if _in_training() else tensor


def _barrier(self: Any, *given: Any, **named: Any) -> None:
    """Only if the script itself asks: Fabric has barriers in `save` too, which scripts call on one rank."""
    asks = sys._getframe(2)
    if asks.f_code.co_name == "rank_zero_first" or not str(asks.f_globals.get("__name__", "")).startswith("lightning."):
        barriers.everyone("fabric.barrier")


def inner(optimizer: Any) -> Any:
    """The torch optimizer that makes the steps."""
    return optimizer.optimizer if isinstance(optimizer, _FabricOptimizer) else optimizer


def given(optimizer: Any) -> Any:
    """What `attach` trains with. Refuses what `fabric.setup` gives: its model has other names for the parameters."""
    if isinstance(optimizer, _FabricOptimizer):
        raise Refused("attach after fabric.setup: write model, optimizer = ps.attach(model, optimizer) in the line before fabric.setup")
    return optimizer


def attached(optimizer: torch.optim.Optimizer) -> None:
    """Nothing more: Fabric's wrappers are made later, and call the optimizer's `step` by its name."""


def moves(model: torch.nn.Module) -> bool:
    """Is `setup` still to move this model to a device?"""
    where = next((p.device for p in model.parameters()), None)
    return where is not None and any(device.type != where.type for device in _devices)


def plain(loader: Any) -> Any:
    """The DataLoader that `setup_dataloaders` was given."""
    return loader._dataloader if isinstance(loader, _FabricDataLoader) else loader


def hand(loader: Any) -> Callable[[Any], Any]:
    """What `loader` does to a batch before the script has it."""
    device = loader.device if isinstance(loader, _FabricDataLoader) else None
    return lambda batch: batch if device is None else move_data_to_device(batch, device)


Pass = None
"""Fabric need not know of passes."""
