"""What a mode decides: when a push counts, and who may go on. Pure; one object serves shard, simulator and reference."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Protocol


class Mode(Protocol):
    """A way to synchronise. Clocks are step numbers from 0; `expected` are the ranks that have not left at that clock."""

    name: str
    rewinds_together: bool
    """A lost shard sends every worker back to the checkpoint (else only that shard's blocks go back)."""
    steady: bool
    """No block moves on before every worker that was sent its version has pushed again."""
    worker_update: bool
    """The workers may step by themselves on the reduced gradient."""

    def takes(self, arrived: Sequence[int], expected: Set[int]) -> Sequence[int]:
        """Of the ranks whose pushes arrived at this block (in order of arrival): those that make the next update now; none: wait."""
        ...

    def version_for(self, clock: int) -> int:
        """Lowest version of a block that answers a push of `clock`."""
        ...

    def marks(self) -> bool:
        """Does a cut need each worker's mark, rather than a step that all pass?"""
        ...
