"""A job that can never begin, though no process of it failed."""

from __future__ import annotations

from collections.abc import Mapping

from psjob_client.local.ground import Ground
from psjob_client.local.probe import numbers

PATIENCE = 3.0
"""Seconds by which the coordinator must have been heard after the worker ended, so that a late word of it counts."""


def never_attached(ground: Ground) -> str | None:
    """Names a worker that ended well without ever joining: the others, and the shards, would wait for it for ever."""
    watch = ground.watch
    if watch.step > 0 or watch.progress_at is None or any(shard.attempt > 1 for shard in (ground.status.shards if ground.status else ())):
        return None
    absent = {int(numbers(worker, "rank")) for worker in watch.coordinator.get("workers") or () if _absent(worker)}
    for child in ground.children:
        left = child.role == "worker" and child.code == 0 and child.ended is not None and child.index in absent
        if left and child.ended is not None and watch.progress_at > child.ended + PATIENCE:
            return (
                f"NeverAttached: worker {child.index} ended with exit code 0 and never joined the job; "
                "its script must call psjob.attach(model, optimizer) and train with what that gives back"
            )
    return None


def _absent(worker: object) -> bool:
    return isinstance(worker, Mapping) and worker.get("state") == "absent"
