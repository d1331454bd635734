"""`DistributedSampler(dataset)`, as DDP scripts have it: in a job its rank and number of replicas are the job's.

Torch asks a process group for them, which a job has not. Where there is one, or the script names both, nothing changes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from psjob.process import config


def know_the_job() -> None:
    """Let samplers that are made from now on know it."""
    from torch.utils.data import DistributedSampler

    made = DistributedSampler.__init__
    if not hasattr(made, "__wrapped__"):  # a fork of a process that has
        DistributedSampler.__init__ = _knowing(made)  # type: ignore[method-assign]


def _knowing(made: Any) -> Any:
    @functools.wraps(made)
    def init(self: Any, dataset: Any, num_replicas: int | None = None, rank: int | None = None, *given: Any, **named: Any) -> None:
        if (num_replicas is None or rank is None) and not _has_group() and (place := config.place()) is not None:
            # All workers of a job of stages work on each batch.
            world, own = (1, 0) if place.config.stages else (place.world, place.rank)
            num_replicas, rank = world if num_replicas is None else num_replicas, own if rank is None else rank
        made(self, dataset, num_replicas, rank, *given, **named)

    return init


def _has_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
