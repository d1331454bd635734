"""What Lightning's and Fabric's processes do together, for workers of a job: values that are reduced or gathered in training."""

from __future__ import annotations

from typing import Any, Final

import torch

from psjob.api import advice
from psjob.api import attach as attaching
from psjob.integrations import meetings
from psjob.process.errors import refuse

OPS: Final = ("mean", "avg", "sum", "max", "min")


def _stand_together(what: str) -> bool:
    """Do workers stand at the same step? Says so where they do not."""
    job = attaching.current
    if job is None or job.clips:
        return job is not None
    mode = job.place.config.mode
    advice.tell("gather", f"{what} in training takes each worker's own value: in mode {mode} they do not stand at the same step")
    return False


def reduced(value: Any, op: Any, what: str) -> Any:
    """The mean, sum, largest or smallest of what all workers have in training."""
    name = op.lower() if isinstance(op, str) else str(getattr(op, "name", "mean" if op is None else op)).lower()
    if name not in OPS:
        refuse(f"{what} with {name} in a job; take one of {', '.join(OPS)}")
    if not _stand_together(what):
        return value
    given = value if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")
    whole = torch.stack([one.to(given.device) for one in meetings.of_all(given, what)])
    if name in ("max", "min"):
        return whole.amax(0) if name == "max" else whole.amin(0)
    found = whole.sum(0, dtype=given.dtype)
    return found / len(whole) if name in ("mean", "avg") else found


def gathered(value: torch.Tensor, sync_grads: bool, what: str) -> torch.Tensor:
    """What all workers have in training, one after the other along a new first dimension."""
    if sync_grads:
        refuse(f"{what} with sync_grads=True in a job: gradients do not flow between workers. Compute the loss of this worker's batch")
    heard = meetings.of_all(value, what) if _stand_together(what) else [value]
    return torch.stack([one.to(value.device) for one in heard])
