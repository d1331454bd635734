"""Sync with backup workers: an update is the mean over the first of its clock; what comes later is dropped (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from psjob.modes.base import Batch, DecidedMode, Push


@dataclass(frozen=True)
class Backup(DecidedMode):
    """Of m workers the first m - `backup_workers` make the update. See `Served`.

    A worker that has left is one less to wait for, not one backup less: `backup_workers` are against slow steps, not against deaths.
    """

    backup_workers: int = 1

    name: ClassVar[str] = "backup"

    def __post_init__(self) -> None:
        if self.backup_workers < 0:
            raise ValueError(f"backup: backup_workers is {self.backup_workers}, must be 0 or more")

    def takes(self, arrived: Sequence[Push], expected: Set[int], version: int, now: float = 0.0) -> Batch | None:
        late = [push for push in arrived if push.base != version]
        if late:
            return Batch(dropped=tuple(late))
        enough = max(1, len(expected) - self.backup_workers)
        return Batch(tuple(sorted(arrived[:enough]))) if len(arrived) >= enough else None

    def stale(self, base: int | None, version: int) -> bool:
        return base != version
