"""What the page is told, as JSON: jobs, curves with as many points as are seen, comparisons. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psjob_client.compare.outcome import Comparison
from psjob_client.compare.report import EXPLAINED, columns, rows
from psjob_client.jobs.view import CheckpointView, EventView, HistoryView, JobView, SpanView
from psjob_client.ui.thin import thin

EVENTS = 200
"""The newest so many are shown."""
SPANS = 2000
"""The newest so many stretches of a timeline are shown."""


def row(job: JobView) -> dict[str, Any]:
    """A line of the list."""
    return {
        "id": job.id, "name": job.name, "phase": job.phase, "reason": job.reason, "mode": job.mode, "created": job.created,
        "ended": job.ended, "step": job.progress.step, "total": job.progress.total, "loss": job.progress.loss, "rate": job.progress.rate,
        "restarts": job.restarts, "warnings": len(job.warnings) + len(job.problems), "unit": job.unit,
    }  # fmt: skip


def detail(
    job: JobView, spans: Sequence[SpanView], events: Sequence[EventView], checkpoints: Sequence[CheckpointView], now: float
) -> dict[str, Any]:
    """A job with everything but its curves and logs. `now` is the time of this machine's clock."""
    return {
        "until": now if job.active or job.ended is None else job.ended,
        "job": job.to_manifest() | {"seconds": job.seconds(now), "active": job.active},
        "timeline": [span.to_manifest() for span in spans[-SPANS:]],
        "events": [event.to_manifest() for event in events[-EVENTS:]],
        "moreEvents": max(0, len(events) - EVENTS),
        "checkpoints": [one.to_manifest() | {"age": one.age(now)} for one in checkpoints[:20]],
    }


def curves(history: HistoryView, points: int) -> dict[str, Any]:
    """Each series with at most so many points; `count` tells how many there are."""
    found = []
    for one in history.series:
        kept = thin(one.values, points)
        found.append(
            {
                "name": one.name,
                "count": len(one.values),
                "last": one.last,
                "times": [one.times[at] for at in kept],
                "steps": [one.steps[at] for at in kept],
                "values": [one.values[at] for at in kept],
            }
        )
    return {"complete": history.complete, "series": found}


def comparison(found: Comparison, points: int) -> dict[str, Any]:
    """The table as words, its columns explained, the warnings, and each metric's curves by side."""
    table = rows(found)
    names = list(dict.fromkeys(name for one in found.sides for name, curve in one.curves.items() if len(curve) > 1))
    return {
        "name": found.name, "unit": found.unit, "about": dict(found.about), "manifest": found.manifest,
        "head": table[0], "rows": table[1:],
        "explained": [{"name": name, "words": EXPLAINED[name]} for name in ("verdict", *(column.key for column in columns(found)))],
        "sides": [
            {"title": one.title, "verdict": one.verdict, "result": one.result, "warnings": list(one.warnings), "command": one.command}
            for one in found.sides
        ],
        "curves": [{"name": name, "sides": [_curve(one.title, one.curves.get(name, ()), points) for one in found.sides]} for name in names],
    }  # fmt: skip


def _curve(title: str, curve: Sequence[tuple[float, float, float]], points: int) -> Mapping[str, Any]:
    kept = thin([value for _, _, value in curve], points)
    chosen = [curve[at] for at in kept]
    return {
        "title": title,
        "times": [at for at, _, _ in chosen],
        "steps": [at for _, at, _ in chosen],
        "values": [at for _, _, at in chosen],
    }
