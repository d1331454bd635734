"""How far a shard is from serving, and what it has counted since it began."""

from __future__ import annotations

from dataclasses import dataclass

from psjob.protocol.shard.phase import Phase

__all__ = ["Counters", "Phase"]


@dataclass
class Counters:
    """What the status port tells. `applied`, `dropped` and `lost` count worker-clocks of this shard."""

    pushes: int = 0
    bytes: int = 0
    """Payload of pushes as it travelled, that of early ones included."""
    applied: int = 0
    dropped: int = 0
    duplicates: int = 0
    differing: int = 0
    fenced: int = 0
    lost: int = 0
    first_applied: float | None = None
    crashes: int = 0
    """Processes of this attempt that ended, so that another went on from their memory."""
