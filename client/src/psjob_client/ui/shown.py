"""What the page is told, as JSON: jobs, curves with as many points as are seen, runs over one another, comparisons. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psjob_client.compare.judged import judged
from psjob_client.compare.outcome import STEPS, Comparison, SideOutcome
from psjob_client.compare.report import best, explained, rows
from psjob_client.jobs.text import as_yaml
from psjob_client.jobs.view import CheckpointView, EventView, HistoryView, JobView, SpanView
from psjob_client.ui.curves import STEP, TIME, curve, points_each
from psjob_client.ui.settings import settings

EVENTS = 200
"""The newest so many are shown."""
SPANS = 2000
"""The newest so many stretches of a timeline are shown."""


def row(job: JobView) -> dict[str, Any]:
    """A line of the list."""
    return {
        "id": job.id, "name": job.name, "phase": job.phase, "reason": job.reason, "mode": job.mode, "created": job.created,
        "ended": job.ended, "step": job.progress.step, "total": job.progress.total, "loss": job.progress.loss, "rate": job.progress.rate,
        "restarts": job.restarts, "warnings": len(job.warnings) + len(job.problems), "unit": job.unit, "metrics": job.progress.metrics,
    }  # fmt: skip


def detail(
    job: JobView, spans: Sequence[SpanView], events: Sequence[EventView], checkpoints: Sequence[CheckpointView], now: float
) -> dict[str, Any]:
    """A job with everything but its curves and logs. `now` is the time of this machine's clock."""
    return {
        "until": now if job.active or job.ended is None else job.ended,
        "job": job.to_manifest() | {"seconds": job.seconds(now), "active": job.active, "manifest": None},
        "settings": settings(job.manifest),
        "manifest": as_yaml(job.manifest) if job.manifest else "",
        "timeline": [span.to_manifest() for span in spans[-SPANS:]],
        "events": [event.to_manifest() for event in events[-EVENTS:]],
        "moreEvents": max(0, len(events) - EVENTS),
        "checkpoints": [one.to_manifest() | {"age": one.age(now)} for one in checkpoints[:20]],
    }


def curves(history: HistoryView, axis: str, smoothing: float, most: int) -> dict[str, Any]:
    """Each series as a curve over steps, or over the seconds since the first report; `count` tells how many points there are."""
    begin = min((one.times[0] for one in history.series if one.times), default=0.0)
    found = []
    for one in history.series:
        points = [(at - begin, float(step), value) for at, step, value in zip(one.times, one.steps, one.values, strict=True)]
        found.append({"name": one.name, "count": len(points), "last": one.last, **curve(points, axis, smoothing, most)})
    return {"complete": history.complete, "series": found}


def run(place: int, job: JobView, history: HistoryView, axis: str, smoothing: float, most: int) -> dict[str, Any]:
    """One of several that are drawn over one another."""
    return {"place": place, **row(job), "settings": settings(job.manifest), "problem": "", **curves(history, axis, smoothing, most)}


def comparison(found: Comparison, smoothing: float) -> dict[str, Any]:
    """What it comes to in a line, the table as words, its columns explained, the warnings, and a chart for each metric and axis."""
    table = rows(found)
    names = list(dict.fromkeys(name for one in found.sides for name, points in one.curves.items() if len(points) > 1))
    most = points_each(len(found.sides))
    charts = [
        {"name": name, "axis": axis, "label": label, "sides": [_side(one, name, axis, smoothing, most) for one in found.sides]}
        for name in names
        for axis, label in ((TIME, f"time ({found.unit})"), (STEP, STEPS))
    ]
    return {
        "name": found.name, "unit": found.unit, "about": dict(found.about), "manifest": found.manifest, "judged": judged(found),
        "head": table[0], "rows": table[1:], "best": best(found), "explained": explained(found),
        "sides": [
            {"title": one.title, "verdict": one.verdict, "result": one.result, "warnings": list(one.warnings), "command": one.command}
            for one in found.sides
        ],
        "charts": charts,
    }  # fmt: skip


def _side(one: SideOutcome, name: str, axis: str, smoothing: float, most: int) -> Mapping[str, Any]:
    return {"title": one.title, **curve(one.curves.get(name, ()), axis, smoothing, most)}
