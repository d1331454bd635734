"""The base of modes in which the coordinator decides which pushes count, once for all blocks of all shards."""

from __future__ import annotations

from typing import ClassVar


class DecidedMode:
    """See `Served`. A shard answers a push when the coordinator says that its worker may go."""

    inner_steps: int = 0
    decided: ClassVar[bool] = True
    rewinds_together: ClassVar[bool] = True
    steady: ClassVar[bool] = False
    worker_update: ClassVar[bool] = False
    ahead: ClassVar[int | None] = 0

    def version_for(self, clock: int) -> int:
        """Here it counts the worker's own clocks that were answered, not updates."""
        return clock + 1

    def marks(self) -> bool:
        return False
