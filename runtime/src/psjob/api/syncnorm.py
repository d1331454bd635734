"""`torch.nn.SyncBatchNorm` in a job: without a process group it takes the statistics of its worker's own batch, as BatchNorm does."""

from __future__ import annotations

from typing import Final

import torch

from psjob.api import advice

INSTEAD: Final = (
    "each worker normalises by the statistics of its own batch, and keeps its own running ones. Take larger batches, or GroupNorm, whose "
    "result does not depend on the batch"
)


def tell(model: torch.nn.Module, workers: int) -> None:
    """Say once which layers of the model are BatchNorm in a job of several workers."""
    names = [name or "the model" for name, module in model.named_modules() if isinstance(module, torch.nn.SyncBatchNorm)]
    if names and workers > 1:
        more = f" and {len(names) - 1} more" if names[1:] else ""
        advice.tell("SyncBatchNorm", f"SyncBatchNorm ({names[0]}{more}) is BatchNorm in a job, which has no process group: {INSTEAD}")


def tell_asked(argument: str, workers: int) -> None:
    """Say once that `argument` of a framework changes no layer in a job of several workers."""
    if workers > 1:
        advice.tell("SyncBatchNorm", f"{argument} makes no SyncBatchNorm in a job, which has no process group: {INSTEAD}")
