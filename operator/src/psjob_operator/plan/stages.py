"""How each stage of a model stands: its workers as their pods say it, and what these have measured, as shard 0 tells it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psjob_operator.api.status import StageStatus
from psjob_operator.plan.facts import Facts
from psjob_operator.plan.progress import amount, whole
from psjob_operator.plan.restarts import Raising
from psjob_operator.plan.text import short

WAITS, WAITING = 8, 160
"""The first stages that wait say for what, each in so many characters: a job has up to 64."""


def stages(facts: Facts, raising: Raising) -> tuple[StageStatus, ...] | None:
    """One entry a stage, None of a job without stages; of one that shard 0 does not tell now, the stored numbers, and no wait."""
    told, before = _told(facts), {stage.name: stage for stage in facts.stored.stages or ()}
    entries: list[StageStatus] = []
    first = 0
    for place, stage in enumerate(facts.snapshot.spec.stages or ()):
        seats = facts.workers[first : first + stage.replicas]
        first += stage.replicas
        ready = f"{sum(seat.up and not raising.is_raised(seat) for seat in seats)}/{stage.replicas}"
        said = told[place] if place < len(told) else None
        if said is not None and said.get("name") == stage.name:
            waits = sum(entry.waiting is not None for entry in entries) < WAITS
            entries.append(_measured(stage.name, ready, said, waits))
        else:
            kept = before.get(stage.name, StageStatus(name=stage.name))
            entries.append(kept.model_copy(update={"workers_ready": ready, "waiting": None}))
    return tuple(entries) or None


def stages_ready(parts: Sequence[StageStatus] | None) -> str | None:
    """How many of them have all their workers; None of a job without stages."""
    if not parts:
        return None
    whole = [ready for ready, _, wanted in (part.workers_ready.partition("/") for part in parts) if ready == wanted]
    return f"{len(whole)}/{len(parts)}"


def _told(facts: Facts) -> list[Mapping[str, Any] | None]:
    told = facts.coordinator.get("stages")
    return [one if isinstance(one, Mapping) else None for one in told] if isinstance(told, list) else []


def _measured(name: str, ready: str, said: Mapping[str, Any], waits: bool) -> StageStatus:
    """`waits`: what it waits for is told too. Nothing that a pod says is believed unread."""
    idle, delay, waiting = amount(said, "idle"), amount(said, "delay"), said.get("waiting")
    return StageStatus(
        name=name,
        workers_ready=ready,
        step=whole(said, "step"),
        delay=None if delay is None or delay < 0 else round(delay, 2),
        idle=None if idle is None else round(min(1.0, max(0.0, idle)), 3),
        memory_bytes=whole(said, "rssBytes"),
        peak_memory_bytes=whole(said, "peakBytes"),
        peak_device_bytes=whole(said, "devicePeakBytes"),
        waiting=short(waiting, WAITING) if waits and isinstance(waiting, str) and waiting.strip() else None,
    )
