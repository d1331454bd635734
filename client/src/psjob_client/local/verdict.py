"""A job that can never begin, though no process of it failed."""

from __future__ import annotations

from psjob_client.local.backend import Backend
from psjob_operator.plan.job_state import PATIENCE_SECONDS
from psjob_operator.plan.terminal import never_joined


def never_attached(backend: Backend) -> str | None:
    """Names a worker that ended well without ever joining: the others, and the shards, would wait for it for ever."""
    watch = backend.watch
    if watch.step > 0 or watch.progress_at is None or any(shard.attempt > 1 for shard in (backend.status.shards if backend.status else ())):
        return None
    heard = watch.progress_at - PATIENCE_SECONDS
    left = {child.index for child in backend.children if child.role == "worker" and child.code == 0 and child.ended and child.ended < heard}
    ending = never_joined(watch.coordinator, left)
    return None if ending is None else f"{ending.reason}: {ending.message}"
