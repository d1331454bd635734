"""A job as a piece of HTML for a notebook: a table, and the loss as a small picture. Pure; every text is escaped.

The picture is a line of SVG made here, since a notebook may have no plotting library, and one that shows a line is ten lines long.
"""

from __future__ import annotations

import time
from html import escape

from psjob_client.jobs.view import HistoryView, JobView, Series
from psjob_client.text import amount, number, span

WIDTH, HEIGHT = 480, 120
MOST_ROWS = 32
COLOURS = {"Complete": "#1a7f37", "Failed": "#c11", "Recovering": "#b35900"}


def job_html(job: JobView, history: HistoryView | None = None, now: float | None = None) -> str:
    """What a notebook shows."""
    at = time.time() if now is None else now
    facts = [("step", _step(job)), ("loss", number(job.progress.loss)), ("rate", _rate(job)), ("checkpoint", _checkpoint(job, at))]
    facts += [("restarts", str(job.restarts))] if job.restarts else []
    facts += [(name, number(value)) for name, value in job.progress.metrics.items() if name != "loss"]
    colour = COLOURS.get(job.phase, "inherit")
    head = f'<b>{escape(job.id)}</b> <span style="color:{colour}">{escape(job.phase)}</span> {escape(job.mode)}, {escape(job.place)}'
    cells = "".join(f"<td><small>{escape(name)}</small><br>{escape(value)}</td>" for name, value in facts if value)
    notes = [job.message] if job.phase == "Failed" else []
    notes += [*job.warnings, *job.problems]
    said = "".join(f'<div style="color:#b35900">{escape(note)}</div>' for note in notes)
    return f"<div>{head}<table><tr>{cells}</tr></table>{said}{_curve(history)}{_processes(job)}</div>"


def _processes(job: JobView) -> str:
    rows = [(f"shard {one.index}", one.state, one.restarts, "", amount(one.memory_bytes)) for one in job.shards]
    rows += [
        (f"worker {one.index}", one.state, one.restarts, "" if one.clock is None else str(one.clock), _idle(one.idle))
        for one in job.workers
    ]
    if not rows:
        return ""
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows[:MOST_ROWS])
    more = f"<div>and {len(rows) - MOST_ROWS} more</div>" if len(rows) > MOST_ROWS else ""
    head = "".join(f"<th>{name}</th>" for name in ("process", "state", "restarts", "steps", "memory, waiting"))
    return f"<details><summary>{len(rows)} processes</summary><table><tr>{head}</tr>{body}</table>{more}</details>"


def _curve(history: HistoryView | None) -> str:
    series = history and next((one for name in ("loss",) if (one := history.of(name)) is not None and len(one.values) > 1), None)
    if not series:
        return ""
    low, high = min(series.values), max(series.values)
    label = f"{series.name} {number(series.values[0])} to {number(series.values[-1])}, steps {series.steps[0]} to {series.steps[-1]}"
    return (
        f'<svg role="img" aria-label="{escape(label)}" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">'
        f'<polyline fill="none" stroke="#36c" stroke-width="1.5" points="{_points(series, low, high)}"/>'
        f'<text x="2" y="12" font-size="11" fill="currentColor">{escape(number(high))}</text>'
        f'<text x="2" y="{HEIGHT - 2}" font-size="11" fill="currentColor">{escape(number(low))}</text></svg>'
        f"<div><small>{escape(label)}</small></div>"
    )


def _points(series: Series, low: float, high: float) -> str:
    first, last = series.steps[0], series.steps[-1]
    across, up = WIDTH / max(1, last - first), (HEIGHT - 4) / ((high - low) or 1.0)
    # No more points than the picture is wide.
    stride = max(1, len(series.values) // WIDTH)
    kept = [*zip(series.steps, series.values, strict=True)][::stride]
    return " ".join(f"{(step - first) * across:.1f},{HEIGHT - 2 - (value - low) * up:.1f}" for step, value in kept)


def _step(job: JobView) -> str:
    told = job.progress
    return f"{told.step}/{told.total}" if told.total else str(told.step)


def _rate(job: JobView) -> str:
    return f"{job.progress.rate:.3g} {job.unit}s/s" if job.progress.rate else ""


def _checkpoint(job: JobView, now: float) -> str:
    if job.checkpoint is None:
        return ""
    age = job.checkpoint.age(now)
    return f"{job.unit} {job.checkpoint.step}" + (f", {span(age)} ago" if age is not None and job.active else "")


def _idle(idle: float | None) -> str:
    return "" if idle is None else f"{idle:.0%} waiting"
