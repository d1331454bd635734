"""Workers that shard 0 names as hung: without a step for longer than `workers.stepTimeoutSeconds` while others wait for it.

They are ended and started again, counted. What shard 0 tells is a pod's word: it is believed of processes that run with the very start
that it names, and only where the job asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from psjob_operator.plan.restart import Fate

GRACE_SECONDS: Final = 1
"""From SIGTERM to SIGKILL: who has not ended by itself when it was told that it hangs will not do so now."""


def named(coordinator: Mapping[str, Any], limit: int | None) -> dict[int, tuple[int, float]]:
    """(start, seconds) by rank, of what shard 0 tells; empty without a `limit`."""
    told = coordinator.get("hung") if limit is not None else None
    found = {}
    for entry in told if isinstance(told, list) else ():
        if isinstance(entry, Mapping):
            rank, start, seconds = entry.get("rank"), entry.get("start"), entry.get("seconds")
            if type(rank) is int and type(start) is int and isinstance(seconds, int | float) and not isinstance(seconds, bool):
                found[rank] = (start, float(seconds))
    return found


def fate(seconds: float) -> Fate:
    """What becomes of a worker that is named."""
    return Fate("lost", "Hung", counted=True, message=f"it has made no step for {seconds:.0f} s while others wait for it")
