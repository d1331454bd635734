"""Gradients of a stage, added up over micro-batches where the shards read them: no second copy is made for the push."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from psjob.pipeline.microbatch import accumulate

if TYPE_CHECKING:
    from psjob.api.attached import AttachedJob


class StageGrads:
    """Of one step. `parameters` by name; `scale` by name, what their gradients are multiplied by."""

    def __init__(self, job: AttachedJob, parameters: Mapping[str, nn.Parameter], scale: Mapping[str, float]) -> None:
        self._parameters, self._scale = parameters, scale
        self._sharing = job.session.exchange.sharing if job.half is None else None  # a rule's half makes other gradients of them
        self._rows = {spec.name: row for row, spec in enumerate(job.session.layout.table)}

    def add(self, name: str, grad: torch.Tensor) -> None:
        """A micro-batch's gradient of a parameter that this worker pushes."""
        p, scale = self._parameters[name], self._scale[name]
        grad = grad if scale == 1.0 else grad * scale
        row = self._rows.get(name)
        if p.grad is None and self._sharing is not None and row is not None and grad.layout is torch.strided:
            p.grad = self._sharing.lay(row, grad)  # None: it does not lie there
            if p.grad is not None:
                return
        accumulate(p, grad)
