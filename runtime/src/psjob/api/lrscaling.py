"""The learning rate of a job whose updates are the mean of several pushes: linear scaling, and warm-up (Goyal et al. 2017)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from psjob.process.config import Config
from psjob.process.errors import Refused


@dataclass(frozen=True)
class LrScaling:
    """`pushes` is how many make an update, k. With `linear` the rate is k times the script's.

    In the first `warmup` steps it rises, the same amount at each, from a k-th of what it is afterwards: with `linear` from the script's
    own. It follows from the step alone, so a worker that starts again has the same.
    """

    pushes: int = 1
    linear: bool = False
    warmup: int = 0

    @classmethod
    def of(cls, job: Config, optimizer: torch.optim.Optimizer) -> LrScaling:
        """What the manifest asks for. Raises Refused where the optimizer has no learning rate to scale."""
        made = cls((job.workers - job.backup_workers) * job.processes, job.lr_scaling == "linear", job.warmup_steps)
        if (made.linear or made.warmup) and not all("lr" in group for group in optimizer.param_groups):
            raise Refused(
                f"training.lrScaling and warmupSteps change lr, and {type(optimizer).__name__} has none in its parameter groups; "
                "leave both out"
            )
        return made

    def factor(self, clock: int) -> float:
        """What the script's learning rate is multiplied with at this step of a worker's."""
        whole = float(self.pushes if self.linear else 1)
        if clock >= self.warmup:
            return whole
        least = whole / self.pushes
        return least + (whole - least) * clock / self.warmup

    def hyperparameters(self, groups: Sequence[Mapping[str, Any]], clock: int) -> list[dict[str, Any]]:
        """Hyperparameters of parameter groups, or of tables, with that learning rate; those that have none stay."""
        factor = self.factor(clock)
        return [{**group, "lr": group["lr"] * factor} if "lr" in group else {**group} for group in groups]

    @contextmanager
    def on(self, optimizer: torch.optim.Optimizer, clock: int) -> Iterator[None]:
        """The optimizer steps with that learning rate inside; outside it has the script's."""
        factor, own = self.factor(clock), [group.get("lr") for group in optimizer.param_groups]
        try:
            for group, lr in zip(optimizer.param_groups, own, strict=True):
                if lr is not None and factor != 1:
                    group["lr"] = lr * factor
            yield
        finally:
            for group, lr in zip(optimizer.param_groups, own, strict=True):
                if lr is not None:
                    group["lr"] = lr
