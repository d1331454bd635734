"""Async: each push is an update of its own, and only its sender waits for it (ASGD), or with a delay nobody does."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from psjob.modes.base import BaseMode, Batch, Push, check_delay


@dataclass(frozen=True)
class Async(BaseMode):
    """See `Served`."""

    delay: int = 0

    name: ClassVar[str] = "async"
    rewinds_together: ClassVar[bool] = False
    ahead: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        check_delay(self.name, self.delay)

    def takes(self, arrived: Sequence[Push], expected: Set[int], version: int, now: float = 0.0) -> Batch | None:
        return Batch((arrived[0],)) if arrived else None

    def version_for(self, clock: int) -> int:
        return 0

    def marks(self) -> bool:
        return True
