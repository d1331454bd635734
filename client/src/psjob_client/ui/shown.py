"""What the page shows, as JSON: jobs, curves with as many points as are seen, runs over one another, comparisons. Pure.

A curve has its smoothed values and where on its axis each lies; it is thinned such that it looks the same. Hyperparameters come from the
manifest: by path, with those that the script is given as flags.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from psjob_client.compare.outcome import STEPS, Comparison, SideOutcome, smooth, verdict_sentences
from psjob_client.compare.report import best, explained, report_rows
from psjob_client.jobs.view import CheckpointView, EventView, HistoryView, JobView, SpanView
from psjob_client.text import yaml_text

Point = tuple[float, float, float]
"""(time, step, value)"""
STEP, TIME = "step", "time"
AXES = (STEP, TIME)
FEW = 10
"""A curve of fewer points, such as one an epoch, is not smoothed: its mean would be far behind what was reported."""
MOST, LEAST, ALL = 600, 100, 12_000
"""Points of one curve: at most and at least; and of all that are drawn over one another together."""


def points_each(curves: int) -> int:
    """Points of each of so many curves."""
    return min(MOST, max(LEAST, ALL // max(1, curves)))


def curve_data(points: Sequence[Point], axis: str, smoothing: float, most: int = MOST) -> dict[str, Any]:
    """{"x", "y"} and, if `smoothing` is above 0, "smooth": the exponential mean with this weight of what came before.

    All points are smoothed, and then at most `most` are kept.
    """
    ordered = unwound(points) if axis == STEP else list(points)
    kept = thin([value for _, _, value in ordered], most)
    place = 1 if axis == STEP else 0
    found = {"x": [ordered[at][place] for at in kept], "y": [ordered[at][2] for at in kept]}
    if smoothing > 0 and len(ordered) >= FEW:
        smoothed = smooth(ordered, 1 - smoothing)
        found["smooth"] = [smoothed[at][2] for at in kept]
    return found


def unwound(points: Iterable[Point]) -> list[Point]:
    """In order of steps: a restart goes back some steps, and reports of those that it undid are left out."""
    found: list[Point] = []
    for point in points:
        while found and found[-1][1] >= point[1]:
            found.pop()
        found.append(point)
    return found


def thin(values: Sequence[float], most: int) -> list[int]:
    """Rising indexes of at most `most` (4 or more) values: the first, the last, and of each equal stretch the least and the largest.

    A spike of one point is kept, which a mean or every n-th point would lose. Source: the min-max reduction of M4 (Jugel et al. 2014).
    """
    count = len(values)
    if count <= most:
        return list(range(count))
    stretches = (most - 2) // 2
    kept = {0, count - 1}
    for place in range(stretches):
        begin, end = 1 + place * (count - 2) // stretches, 1 + (place + 1) * (count - 2) // stretches
        stretch = [at for at in range(begin, end) if math.isfinite(values[at])] or [begin]
        kept.add(min(stretch, key=values.__getitem__))
        kept.add(max(stretch, key=values.__getitem__))
    return sorted(kept)


LONGEST = 200
"""Characters of a value."""


def job_settings(manifest: Mapping[str, Any] | None) -> dict[str, str]:
    """`training.mode`: async, `workers.replicas`: 4, `--lr`: 0.1, `env.SEED`: 3; the script and its flags first."""
    spec = (manifest or {}).get("spec")
    if not isinstance(spec, Mapping):
        return {}
    workers = spec.get("workers")
    found: dict[str, str] = {}
    for container in _containers(workers)[:1]:
        found |= _given(container)
    plain = {key: value for key, value in spec.items() if key not in ("workers", "shards")}
    for part in ("shards", "workers"):
        if isinstance(spec.get(part), Mapping):
            plain[part] = {key: value for key, value in spec[part].items() if key != "template"}
    return found | {path: _text(value) for path, value in _flat(plain)}


def flags(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """What stands alone, and each `--name value`, `--name=value` or lone `--name` by its name; one that comes again holds both values."""
    alone: list[str] = []
    named: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            named[name] = ", ".join(filter(None, (named.get(name, ""), value)))
            name = "" if equals else name
        elif name:
            named[name] = ", ".join(filter(None, (named[name], word)))
            name = ""
        else:
            alone.append(word)
    return alone, {key: value or "yes" for key, value in named.items()}


def _given(container: Mapping[str, Any]) -> dict[str, str]:
    words = [str(word) for key in ("command", "args") for word in container.get(key) or () if isinstance(word, str | int | float)]
    alone, named = flags(words)
    found = {"script": _text(" ".join(alone))} if alone else {}
    found |= {name: _text(value) for name, value in named.items()}
    if container.get("image"):
        found["image"] = _text(container["image"])
    for entry in container.get("env") or ():
        if isinstance(entry, Mapping) and "value" in entry:
            found[f"env.{entry.get('name')}"] = _text(entry["value"])
    return found


def _containers(workers: Any) -> list[Mapping[str, Any]]:
    at = workers
    for key in ("template", "spec", "containers"):
        at = at.get(key) if isinstance(at, Mapping) else None
    return [one for one in at if isinstance(one, Mapping)] if isinstance(at, Sequence) and not isinstance(at, str) else []


def _flat(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, one in value.items():
        if isinstance(one, Mapping):
            yield from _flat(one, f"{path}{key}.")
        elif one is not None:
            yield f"{path}{key}", one


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    text = ", ".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


EVENTS = 200
"""The newest so many are shown."""
SPANS = 2000
"""The newest so many stretches of a timeline are shown."""


def row(job: JobView) -> dict[str, Any]:
    """A line of the list."""
    return {
        "id": job.id, "name": job.name, "phase": job.phase, "over": not job.active, "reason": job.reason, "mode": job.mode,
        "created": job.created, "ended": job.ended, "step": job.progress.step, "total": job.progress.total, "loss": job.progress.loss,
        "rate": job.progress.rate, "restarts": job.restarts, "warnings": len(job.warnings) + len(job.problems), "unit": job.unit,
        "metrics": job.progress.metrics,
    }  # fmt: skip


def detail(
    job: JobView, spans: Sequence[SpanView], events: Sequence[EventView], checkpoints: Sequence[CheckpointView], now: float
) -> dict[str, Any]:
    """A job without its curves and logs. `now` is the time of this machine's clock."""
    return {
        "until": now if job.active or job.ended is None else job.ended,
        "job": job.to_manifest() | {"seconds": job.seconds(now), "active": job.active, "manifest": None},
        "settings": job_settings(job.manifest),
        "manifest": yaml_text(job.manifest) if job.manifest else "",
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
        found.append({"name": one.name, "count": len(points), "last": one.last, **curve_data(points, axis, smoothing, most)})
    return {"complete": history.complete, "series": found}


def run_data(place: int, job: JobView, history: HistoryView, axis: str, smoothing: float, most: int) -> dict[str, Any]:
    """One of several that are drawn over one another."""
    return {"place": place, **row(job), "settings": job_settings(job.manifest), "problem": "", **curves(history, axis, smoothing, most)}


def comparison(found: Comparison, smoothing: float) -> dict[str, Any]:
    """What it comes to in a line, the table as words, its columns explained, the warnings, and a chart for each metric and axis."""
    table = report_rows(found)
    names = list(dict.fromkeys(name for one in found.sides for name, points in one.curves.items() if len(points) > 1))
    most = points_each(len(found.sides))
    charts = [
        {"name": name, "axis": axis, "label": label, "sides": [_side(one, name, axis, smoothing, most) for one in found.sides]}
        for name in names
        for axis, label in ((TIME, f"time ({found.unit})"), (STEP, STEPS))
    ]
    return {
        "name": found.name, "unit": found.unit, "about": dict(found.about), "manifest": found.manifest, "judged": verdict_sentences(found),
        "head": table[0], "rows": table[1:], "best": best(found), "explained": explained(found),
        "sides": [
            {"title": one.title, "verdict": one.verdict, "result": one.result, "warnings": list(one.warnings), "command": one.command}
            for one in found.sides
        ],
        "charts": charts,
    }  # fmt: skip


def _side(one: SideOutcome, name: str, axis: str, smoothing: float, most: int) -> Mapping[str, Any]:
    return {"title": one.title, **curve_data(one.curves.get(name, ()), axis, smoothing, most)}
