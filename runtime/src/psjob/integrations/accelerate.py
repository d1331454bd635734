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
from torch.utils import data as torch_data

from psjob.api.slices import options_of
from psjob.integrations import needs
from psjob.process import config

try:
    from accelerate.data_loader import SeedableRandomSampler
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import send_to_device
except ImportError as missing:
    raise needs("accelerate", missing) from None


def inner(optimizer: Any) -> Any:
    """The torch optimizer that makes the steps."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


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


def mark(place: config.Place) -> None:
    """Let `is_main_process`, saving and tracking be those of rank 0 alone. Each worker is a world of its own to Accelerate otherwise."""
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        if state.get("num_processes") == 1:
            state["process_index"] = place.index
    if not hasattr(AcceleratedScheduler.step, "moves"):
        AcceleratedScheduler.step = _moving(AcceleratedScheduler.step, place.config.workers)


def _moving(step: Callable[..., None], times: int) -> Callable[..., None]:
    """A prepared scheduler counts batches of all processes, so that it moves once for each of them at a step."""

    def moving(self: Any, *given: Any, **named: Any) -> None:
        as_one = not self.step_with_optimizer or self.split_batches or not self.gradient_state.sync_gradients
        for _ in range(1 if as_one else times):
            step(self, *given, **named)

    moving.moves = times  # type: ignore[attr-defined]
    return moving


def plain(loader: Any) -> Any:
    """The DataLoader of all batches that `prepare` was given."""
    base: Any = getattr(loader, "base_dataloader", loader)
    batches = base.batch_sampler
    if isinstance(base.dataset, torch_data.IterableDataset) or type(batches) is not torch_data.BatchSampler:
        return base
    return torch_data.DataLoader(
        base.dataset, batch_size=batches.batch_size, drop_last=batches.drop_last, sampler=plain_sampler(batches.sampler), **options_of(base)
    )


def plain_sampler(sampler: Any) -> Any:
    """Torch's own for one that `prepare` has put in its place: its seed may be this process's own."""
    if type(sampler) is not SeedableRandomSampler:
        return sampler
    return torch_data.RandomSampler(sampler.data_source, sampler.replacement, sampler.num_samples if sampler.replacement else None)


def hand(loader: Any) -> Callable[[Any], Any]:
    """What `loader` does to a batch before the script has it."""
    device, non_blocking = getattr(loader, "device", None), bool(getattr(loader, "_non_blocking", False))
    return lambda batch: batch if device is None else send_to_device(batch, device, non_blocking=non_blocking)


class Pass:
    """A pass over data as Accelerate sees it: accumulated gradients are stepped with at its last batch."""

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
