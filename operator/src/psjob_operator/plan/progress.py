"""What shard 0 tells of training, folded into status: parsed with suspicion, since it comes from a pod."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from psjob_operator.api.status import CheckpointStatus, Progress
from psjob_operator.plan.facts import Facts
from psjob_operator.plan.times import stamp, unix

LARGEST = 2**53


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
        loss=_number(told, "loss"),
        rate=_number(told, "rate"),
        eta=_number(told, "eta"),
        codecs=text(facts, "codecs") or None,
        transport=text(facts, "transport") or None,
        time=stamp(facts.now if at is None else at),
    )


def checkpoint(facts: Facts) -> CheckpointStatus | None:
    """The last committed checkpoint; the stored one where shard 0 is out of reach."""
    told = facts.coordinator.get("checkpoint")
    if not isinstance(told, Mapping):
        return facts.stored.checkpoint
    step, time, path = whole(told, "step"), _number(told, "time"), told.get("path")
    if step is None or time is None or not 0 <= time < 1e11:
        return facts.stored.checkpoint
    return CheckpointStatus(step=step, time=stamp(time), bytes=whole(told, "bytes"), path=path[:1024] if isinstance(path, str) else None)


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


def _number(told: Mapping[str, Any], key: str) -> float | None:
    value = told.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or abs(value) > 1e300:
        return None
    return float(value)


def whole(told: Mapping[str, Any], key: str) -> int | None:
    """A whole number of what was told; None where it is none."""
    value = told.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST else None
