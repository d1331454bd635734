"""What shard 0 tells of training, and when it is asked. It comes from a pod, so nothing of it is believed unread."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from psjob_operator.api.status import LARGEST, CheckpointStatus, JobStatus, Progress
from psjob_operator.plan.facts import Facts
from psjob_operator.plan.text import stamp, unix

PROGRESS_SECONDS = 60.0
RUNNING_SECONDS = 10.0
"""After all came up: asked at once, shard 0 would tell of workers that just attach, and that would stand for a minute."""
SAME_SECONDS = 5.0
"""A checkpoint is not told anew because its age was rounded, or took a while to arrive."""
PENDING_SECONDS = 60.0
"""A job of which a part never comes up may train without it."""


def progress(facts: Facts) -> Progress | None:
    """How far training is; the stored numbers where shard 0 is out of reach."""
    step = whole(facts.coordinator, "step")
    if step is None:
        return facts.stored.progress
    told = facts.coordinator
    at = facts.snapshot.progress_at
    return Progress(
        step=step,
        mode=text(facts, "mode") or None,
        loss=amount(told, "loss"),
        rate=amount(told, "rate"),
        eta=amount(told, "eta"),
        codecs=text(facts, "codecs") or None,
        transport=text(facts, "transport") or None,
        time=stamp(facts.now if at is None else at),
    )


def checkpoint(facts: Facts) -> CheckpointStatus | None:
    """The last committed checkpoint; the stored one where shard 0 is out of reach."""
    told = facts.coordinator.get("checkpoint")
    if not isinstance(told, Mapping):
        return facts.stored.checkpoint
    step, time, path = whole(told, "step"), _made_at(facts, told), told.get("path")
    if step is None or time is None:
        return facts.stored.checkpoint
    kept = facts.stored.checkpoint
    before = unix(kept.time) if kept is not None and kept.step == step else None
    if before is not None and abs(before - time) < SAME_SECONDS:
        time = before
    return CheckpointStatus(
        step=step,
        time=stamp(time),
        bytes=whole(told, "bytes"),
        path=path[:1024] if isinstance(path, str) else None,
        observed_request=whole(told, "observedRequest"),
    )


def _made_at(facts: Facts, told: Mapping[str, Any]) -> float | None:
    """When a checkpoint was committed, by our clock: that of shard 0's node may be minutes ahead, and backoff counts from commits."""
    age, time = amount(told, "age"), amount(told, "time")
    if age is not None and 0 <= age < 1e11:
        first = facts.shards[0].process if facts.shards else None
        ended = first.exit.at if first is not None and first.exit is not None else facts.snapshot.progress_at
        return max(0.0, min(facts.now, facts.now if ended is None else ended) - age)
    return min(time, facts.now) if time is not None and 0 <= time < 1e11 else None


def unanswered(told: Mapping[str, Any] | None, request: int | None) -> bool:
    """Is a checkpoint asked for that shard 0's last answer does not tell of? False of a shard 0 that tells of no request at all."""
    job = (told or {}).get("coordinator")
    kept = job.get("checkpoint") if isinstance(job, Mapping) else None
    return request is not None and isinstance(kept, Mapping) and "observedRequest" in kept and kept["observedRequest"] != request


def checkpoint_known(facts: Facts) -> bool:
    """A checkpoint beyond the first step was seen: a shard that finds none must say so, never start anew."""
    return any(kept is not None and kept.step > 0 for kept in (facts.stored.checkpoint, checkpoint(facts)))


def last_commit(facts: Facts) -> float | None:
    """Unix time of the last commit."""
    kept = checkpoint(facts)
    return unix(kept.time) if kept else None


def text(facts: Facts, key: str) -> str:
    """A sentence of the coordinator, on one line; empty where it has none."""
    told = facts.coordinator.get(key)
    return " ".join(told.split())[:200] if isinstance(told, str) else ""


def amount(told: Mapping[str, Any], key: str) -> float | None:
    """A finite number of what was told; None where it is none."""
    value = told.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or abs(value) > 1e300:
        return None
    return float(value)


def whole(told: Mapping[str, Any], key: str) -> int | None:
    """A whole number of what was told; None where it is none."""
    value = told.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST else None


def pull_due(facts: Facts, status: JobStatus) -> bool:
    """Shard 0 is worth asking now; how often is the backend's choice."""
    since = _pull_from(facts, status)
    return since is not None and since <= facts.now


def pull_at(facts: Facts, status: JobStatus) -> float | None:
    """Unix time of the next question; None while shard 0 does not serve."""
    since = _pull_from(facts, status)
    if since is None or since > facts.now:
        return since
    pulled = (facts.snapshot.progress_at or 0.0) + PROGRESS_SECONDS
    return pulled if pulled > facts.now else facts.now + PROGRESS_SECONDS


def _pull_from(facts: Facts, status: JobStatus) -> float | None:
    first = facts.shards[0] if facts.shards else None
    if first is None or first.fate.kind != "running" or not first.up:
        return None
    if status.phase == "Recovering" or status.interruption is not None or facts.snapshot.spec.workers.step_timeout_seconds is not None:
        return 0.0  # with a limit for steps it is asked again soon anyway
    ready = status.condition("Ready")
    since = unix(ready.last_transition_time) if ready else None
    return (since or 0.0) + (RUNNING_SECONDS if status.phase == "Running" else PENDING_SECONDS)
