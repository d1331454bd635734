"""`torch.nn.SyncBatchNorm` in a job: without a process group it takes the statistics of its worker's own batch, as BatchNorm does."""

from __future__ import annotations

import torch

from psjob.api import advice


def tell(model: torch.nn.Module, workers: int) -> None:
    """Say once which layers of the model are none in a job of several workers."""
    names = [name or "the model" for name, module in model.named_modules() if isinstance(module, torch.nn.SyncBatchNorm)]
    if names and workers > 1:
        more = f" and {len(names) - 1} more" if names[1:] else ""
        advice.tell(
            "SyncBatchNorm",
            f"SyncBatchNorm ({names[0]}{more}) works as BatchNorm in a job, which has no process group: each worker normalises by the "
            "statistics of its own batch, and keeps its own running ones. Take larger batches, or GroupNorm, whose result does not depend "
            "on the batch",
        )
