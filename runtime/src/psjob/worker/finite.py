"""A worker's look at its own gradient before it pushes, where a step with NaN or inf is to be skipped or to end the job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from psjob.worker.ending import SessionEnd

if TYPE_CHECKING:
    from psjob.worker.rows import RowGrads
    from psjob.worker.session import WorkerSession


class FiniteCheck:
    """Of one worker: all blocks of all shards then skip the same step, as they do for a GradScaler."""

    def __init__(self, session: WorkerSession) -> None:
        self._session, self._what = session, session.place.config.non_finite
        self.may_skip = self._what == "skip"
        self.found: int | None = None
        """In the step in hand: the place of the first tensor with such a number in the model, or after its tensors that of the table."""

    def skips(self, grads: Sequence[torch.Tensor | None] | None, rows: Sequence[RowGrads | None], skip: bool) -> bool:
        """Is this step to be skipped? `skip`: it is, whatever is found. Raises SessionEnd (refused) with the step and the tensor."""
        self.found = None
        if self._what == "pass" or grads is None or skip:
            return skip
        self.found = _first_bad([*grads, *(None if part is None else part.grads for part in rows)])
        if self.found is None:
            return False
        if self._what == "refuse":
            session, rank = self._session, self._session.place.index
            names = [*(spec.name for spec in session.layout.table), *(f"table {spec.name}" for spec in session.rows.specs)]
            raise SessionEnd(
                "refused",
                f"worker {rank}, step {session.clock}: the gradient of {names[self.found]} holds NaN or inf, and training.nonFinite "
                "is refuse (skip leaves such a step out, pass applies it)",
            )
        return True


def _first_bad(tensors: Sequence[torch.Tensor | None]) -> int | None:
    """The place of the first tensor that holds NaN or inf."""
    floats = [(place, tensor) for place, tensor in enumerate(tensors) if tensor is not None and tensor.is_floating_point()]
    with torch.no_grad():
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for _, tensor in floats:
            by_device.setdefault(tensor.device, []).append(tensor.sum(dtype=torch.float32))
        # A sum of all is finite only where each number is; one wait for a device, however many tensors.
        if all(bool(torch.isfinite(torch.stack(sums)).all()) for sums in by_device.values()):
            return None
        return next((place for place, tensor in floats if not bool(torch.isfinite(tensor).all())), None)
