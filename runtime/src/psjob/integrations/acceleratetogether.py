"""What Accelerate's workers do together in a job: they wait for one another, and gather, reduce and broadcast values.

A loader that is not given to `psjob.shard` is read whole by every worker. What was computed of it is gathered already, and so is what a
script gathers between its loops. In a pass of `psjob.shard` workers have different batches: there values go by shard 0 to all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from accelerate import Accelerator, data_loader
from accelerate.state import GradientState, PartialState
from accelerate.utils import operations
from accelerate.utils.operations import recursively_apply

from psjob.api import advice
from psjob.api import attach as attaching
from psjob.integrations import meetings
from psjob.integrations.accelerateworld import World, rebind
from psjob.process.errors import refuse


def install(world: World) -> None:
    """Let Accelerate's functions ask the other workers."""
    PartialState.wait_for_everyone = _wait(PartialState.wait_for_everyone, world)
    Accelerator.check_trigger = _trigger(Accelerator.check_trigger, world)
    own = operations
    makes = {own.gather: _gather, own.gather_object: _gather_object, own.reduce: _reduce, own.broadcast: _broadcast}
    makes[own.broadcast_object_list] = _broadcast_objects
    rebind({old: make(old, world) for old, make in makes.items()}, but=(data_loader.__name__,))  # every worker reads by itself


def _apart(world: World, what: str) -> bool:
    """Have workers different values at this place of the script? Refuses where some of them do not come to it."""
    if not world.of_script or not getattr(GradientState().active_dataloader, "sharded", False):
        return False
    job = attaching.current
    if job is None:
        return False
    under_way = job.places.under_way
    if not job.training:
        job.refuse(
            f"{what} in a pass over ps.shard that trains nothing: workers have different numbers of its batches. Take the loader as "
            "prepare gave it, which every worker reads whole"
        )
    if not job.clips or (under_way is not None and job.places.reads_ahead(under_way[0])):
        advice.tell(
            "gather",
            f"{what} in training gives each worker its own value for those of all: in mode {job.place.config.mode}, and where batches are "
            "read ahead, workers do not stand at the same step",
        )
        return False
    return True


def _in_training(world: World) -> bool:
    return world.of_script and bool(getattr(GradientState().active_dataloader, "sharded", False))


def _of_all(value: Any, what: str, world: World) -> list[Any]:
    """By rank, in training; a worker's own value for each where they cannot be had."""
    return meetings.of_all(value, what) if _apart(world, what) else [value] * world.workers


def _tensors(value: Any) -> list[torch.Tensor]:
    """Those of nested lists, tuples and dicts, in their order. Raises TypeError for what is none."""
    found: list[torch.Tensor] = []
    recursively_apply(found.append, value, error_on_other_type=True)
    return found


def _joined(value: Any, heard: list[list[torch.Tensor]], join: Callable[[list[torch.Tensor]], torch.Tensor]) -> Any:
    """`value` with each tensor replaced by what all workers have for it."""
    each = iter(range(len(heard[0])))

    def one(tensor: torch.Tensor) -> torch.Tensor:
        number = next(each)
        return join([theirs[number].to(tensor.device) for theirs in heard])

    return recursively_apply(one, value, error_on_other_type=True)


def _gather(gather: Callable[[Any], Any], world: World) -> Callable[[Any], Any]:
    @wraps(gather)
    def gathered(tensor: Any) -> Any:
        if not _in_training(world):
            return gather(tensor)
        heard = _of_all(_tensors(tensor), "gather", world)
        return _joined(tensor, heard, lambda parts: torch.cat([part[None] if part.ndim == 0 else part for part in parts]))

    return gathered


def _gather_object(gather: Callable[[Any], Any], world: World) -> Callable[[Any], Any]:
    @wraps(gather)
    def gathered(object: Any) -> Any:
        if not _in_training(world):
            return gather(object)
        return [one for theirs in _of_all(object, "gather_object", world) for one in theirs]

    return gathered


def _reduce(reduce: Callable[..., Any], world: World) -> Callable[..., Any]:
    @wraps(reduce)
    def reduced(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
        if not _in_training(world):
            return reduce(tensor, reduction, scale)
        return summed(tensor, _of_all(_tensors(tensor), "reduce", world), reduction)

    return reduced


def summed(tensor: Any, heard: list[list[torch.Tensor]], reduction: str) -> Any:
    """As torch's all_reduce: the sum, or the largest; `mean` divides the sum by how many there are."""

    def join(parts: list[torch.Tensor]) -> torch.Tensor:
        whole = torch.stack(parts)
        found = whole.amax(0) if reduction == "max" else whole.sum(0, dtype=parts[0].dtype)
        return found / len(parts) if reduction == "mean" else found

    return _joined(tensor, heard, join)


def _broadcast(broadcast: Callable[..., Any], world: World) -> Callable[..., Any]:
    @wraps(broadcast)
    def sent(tensor: Any, from_process: int = 0) -> Any:
        if not world.of_script:
            return broadcast(tensor, from_process)
        heard = meetings.of_all(_tensors(tensor) if world.rank == from_process else [], "broadcast")
        return _joined(tensor, [heard[from_process]], lambda parts: parts[0])

    return sent


def _broadcast_objects(broadcast: Callable[..., Any], world: World) -> Callable[..., Any]:
    @wraps(broadcast)
    def sent(object_list: list[Any], from_process: int = 0) -> list[Any]:
        if world.of_script:
            own = list(object_list) if world.rank == from_process else []
            object_list[:] = meetings.of_all(own, "broadcast_object_list")[from_process] or object_list
            return object_list
        return list(broadcast(object_list, from_process))

    return sent


def _wait(wait: Callable[[Any], None], world: World) -> Callable[[Any], None]:
    @wraps(wait)
    def waited(self: Any) -> None:
        if world.of_script:
            meetings.everyone("wait_for_everyone")
        else:
            wait(self)

    return waited


def _trigger(check: Callable[[Any], bool], world: World) -> Callable[[Any], bool]:
    """Any worker's trigger is all workers', at every place of a script."""

    @wraps(check)
    def checked(self: Any) -> bool:
        if not world.of_script:
            return check(self)
        if attaching.current is not None and not attaching.current.clips:
            refuse(
                f"Accelerator.check_trigger in mode {attaching.current.place.config.mode}: workers do not stand at the same step. Decide "
                "by what all workers have, such as a metric of an evaluation"
            )
        own = self.flag_tensor is not None and bool(self.flag_tensor >= 1)
        found = any(meetings.of_all(own, "check_trigger"))
        if found:
            self.flag_tensor = torch.tensor(0, device=self.device)
        return found

    return checked
