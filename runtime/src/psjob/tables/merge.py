"""One gradient a row from the pushes of several workers: added in rank order, so that the same pushes give the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psjob.tables.rules.base import add_rows

Part = tuple[torch.Tensor, torch.Tensor]


def merge(parts: Sequence[Part], present: int, out: torch.Tensor | None = None) -> Part:
    """(ids, gradients) of the mean over `present` workers; a worker that did not name a row counts as zero there.

    `parts` are (ids int64 [n], each there once; gradients float32 [n, dim]) in rank order. A row's gradients are added from the
    lowest rank on, then multiplied once by 1/present. Ids come sorted, or in the order of a single part; its gradients are then its
    own tensor, changed in place where present is not 1. `out` (float32, [as many rows as all parts have, or more, dim]) is where several
    parts are added: memory that was used before saves most of the time. Raises ValueError without any part.
    """
    if not parts:
        raise ValueError("a merge needs the part of one worker at least")
    if len(parts) == 1:
        ids, grads = parts[0]
        return ids, grads if present == 1 else grads.mul_(1.0 / present)
    ids, inverse = torch.unique(torch.cat([part[0] for part in parts]), return_inverse=True)
    total = (torch.empty(len(ids), parts[0][1].shape[1], dtype=torch.float32, device="cpu") if out is None else out[: len(ids)]).zero_()
    start = 0
    for mine, grads in parts:
        add_rows(total, inverse[start : start + len(mine)], grads)
        start += len(mine)
    return ids, total if present == 1 else total.mul_(1.0 / present)
