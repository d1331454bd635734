"""What a script hears about its loop and its layers before it is hurt by them, once a process, on rank 0."""

from __future__ import annotations

import sys
from typing import Final

import torch

from psjob.process import config

AGAIN: Final = (
    "without ps.epochs this loop begins a second pass over its data. After a restart it begins at its first line, and what follows a pass "
    "runs again for each pass that was finished. Write `for epoch in ps.epochs(n)`, and keep in ps.state what the loop carries"
)
ELSE: Final = (
    "this loop over the data is left, and has an `else`. A worker that starts again is given nothing for a pass that was left, so the "
    "`else` runs for it. Set a variable before `break`, and ask for it behind the loop"
)
_told: set[str] = set()


def tell_once(kind: str, sentence: str) -> None:
    """Say it, if nothing of this kind was said."""
    place = config.place()
    if kind not in _told and place is not None and place.rank == 0:
        _told.add(kind)
        print(f"psjob: {sentence}", file=sys.stderr, flush=True)


INSTEAD: Final = (
    "each worker normalises by the statistics of its own batch, and keeps its own running ones. Take larger batches, or GroupNorm, whose "
    "result does not depend on the batch"
)


def tell_of_sync_norm(model: torch.nn.Module, workers: int) -> None:
    """Say once which layers of the model are BatchNorm in a job of several workers."""
    names = [name or "the model" for name, module in model.named_modules() if isinstance(module, torch.nn.SyncBatchNorm)]
    if names and workers > 1:
        more = f" and {len(names) - 1} more" if names[1:] else ""
        tell_once("SyncBatchNorm", f"SyncBatchNorm ({names[0]}{more}) is BatchNorm in a job, which has no process group: {INSTEAD}")


def tell_asked(argument: str, workers: int) -> None:
    """Say once that `argument` of a framework changes no layer in a job of several workers."""
    if workers > 1:
        tell_once("SyncBatchNorm", f"{argument} makes no SyncBatchNorm in a job, which has no process group: {INSTEAD}")
