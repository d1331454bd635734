"""Weights of a job as tensors: the one verb that needs torch, and the library that wrote them, in the process that asks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from psjob_client.problems import NoWeights, call

if TYPE_CHECKING:
    import torch

    Weights: TypeAlias = dict[str, torch.Tensor]


async def weights_in(folder: Path, name: str) -> Weights:
    """Those of the job `name`, whose checkpoints lie in this folder: the final ones, or the newest that were committed.

    Raises:
        NoWeights: The job has made no checkpoint yet, or it cannot be read.
    """
    return await asyncio.to_thread(_read, folder, name)


def _read(folder: Path, name: str) -> Weights:
    # Here: no other verb and no command waits for the import of torch.
    from psjob.checkpoint.final import read_weights
    from psjob.checkpoint.problems import CheckpointProblem

    try:
        found = read_weights(folder)
    except CheckpointProblem as problem:
        raise NoWeights(f"weights of {name}: {problem}") from None
    if not found:
        raise NoWeights(f"{name} has no checkpoint yet; while it runs, ", call("checkpoint", name), " makes one")
    return found
