"""What commands print: tables that a terminal shows and a pipe can cut, and `-o json|yaml|name`.

`…_row` and `…_rows` are cells for the columns of those tables: jobs, and what belongs to them. They are pure.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Container, Iterable, Sequence
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from psjob_client.jobs.view import ENDED, CheckpointView, EventView, HistoryView, JobView, Series, View, step_words
from psjob_client.local.status import step_line
from psjob_client.text import amount, json_text, number, span, yaml_text
from psjob_operator.contract import GROUP, KIND
from psjob_operator.printable import LINE_ENDS, coloured, printable

SILENT = ("", "-")
STYLES = {
    "Running": "cyan", "Serving": "cyan", "Complete": "green", "Succeeded": "green", "Finished": "green", "Failed": "red", "Lost": "red",
    "Recovering": "yellow", "Suspended": "yellow", "Warning": "yellow",
}  # fmt: skip
JOB_COLUMNS = ("NAME", "PHASE", "MODE", "STEP", "LOSS", "SHARDS", "WORKERS", "RESTARTS", "AGE")
WATCHED_COLUMNS = ("NAME", "PHASE", "STEP", "LOSS", "RATE", "SHARDS", "WORKERS", "RESTARTS", "CHECKPOINT")
WIDE_COLUMNS = (*JOB_COLUMNS, "RATE", "CHECKPOINT", "WHERE", "MESSAGE")
PROCESS_COLUMNS = ("PROCESS", "STATE", "ATTEMPT", "RESTARTS", "STEPS", "BEHIND", "WAITING", "STALENESS", "MEMORY", "NODE", "PROBLEM")
STAGE_COLUMNS = ("STAGE", "WORKERS", "STEP", "STALENESS", "IDLE", "MEMORY", "PEAK", "DEVICE PEAK", "WAITS FOR")
CHECKPOINT_COLUMNS = ("STEP", "TERM", "AGE", "SIZE", "FINAL", "PATH")
EVENT_COLUMNS = ("TIME", "TYPE", "REASON", "ABOUT", "MESSAGE")
METRIC_COLUMNS = ("NAME", "LAST", "LEAST", "MOST", "POINTS", "STEP", "CURVE")
NONE = "-"
BARS = "▁▂▃▄▅▆▇█"
CURVE = 24


class Form(enum.StrEnum):
    """What `-o` takes."""

    table = "table"
    wide = "wide"
    json = "json"
    yaml = "yaml"
    name = "name"


class TextForm(enum.StrEnum):
    """What `-o` takes, where people read a text."""

    text = "text"
    json = "json"


Output = Annotated[Form, typer.Option("--output", "-o", help="table, wide, json, yaml or name.")]
TextOutput = Annotated[TextForm, typer.Option("--output", "-o", help="text, or json for programs.")]


def print_data(form: Form, views: Sequence[View] | View) -> bool:
    """Print as JSON or YAML, where that was asked for."""
    if form not in (Form.json, Form.yaml):
        return False
    plain = views.to_manifest() if isinstance(views, View) else [view.to_manifest() for view in views]
    text = json_text(plain) if form is Form.json else yaml_text(plain)
    emit(text)
    return True


def job_names(jobs: Iterable[JobView]) -> None:
    """A name a line, as kubectl and the verbs here take it."""
    for job in jobs:
        echo(job.id if job.where == "local" else f"{KIND.lower()}.{GROUP}/{job.id}")


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Columns with two blanks between them: coloured and cut to the width of a terminal, whole in a pipe."""
    cells = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        Console(highlight=False).print(grid(head, cells))
        return
    print_columns([list(head), *cells])


def print_columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> None:
    """Columns as wide as their widest cell; those of these numbers have their cells at the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (f"{cell:{'>' if column in right else '<'}{width}}" for column, (cell, width) in enumerate(zip(row, widths, strict=True)))
        echo("  ".join(cells).rstrip())


def grid(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """The same for a terminal, whose width is dear: columns that say nothing are left out, and the first is never cut."""
    cells = [[printable(cell) for cell in row] for row in rows]
    telling = [column for column in range(len(head)) if any(row[column] not in SILENT for row in cells)] or [0]
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in telling:
        widest = max((len(row[column]) for row in cells), default=0)
        made.add_column(head[column], overflow="ellipsis", no_wrap=True, min_width=widest if column == 0 else None)
    for row in cells:
        made.add_row(*(Text(row[column], STYLES.get(row[column], "")) for column in telling))
    return made


def ruled_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], right: Container[int], *, title: str = "", whole: Container[int] = (),
    best: int | None = None,
) -> None:  # fmt: skip
    """A table with lines on a terminal, and columns in a pipe.

    Cells of the columns `right` stand at the right, those of the columns `whole` are not broken, and the row `best` stands out.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        if title:
            echo(title)
        print_columns([head, *rows], right=right)
        return
    made = Table(title=printable(title) if title else None, title_justify="left")
    for column, name in enumerate(head):
        made.add_column(name, justify="right" if column in right else "left", no_wrap=column in whole, overflow="fold")
    for place, row in enumerate(rows):
        made.add_row(*(Text(printable(cell)) for cell in row), style="bold green" if place == best else "")
    console.print(made)


def say(text: object) -> None:
    """A word to people, beside what is printed for programs."""
    print(printable(text, LINE_ENDS), file=sys.stderr, flush=True)


def echo(text: str) -> None:
    """Lines to people. What others wrote in them is shown without what acts on a terminal."""
    typer.echo(printable(text, LINE_ENDS))


def log_line(text: str) -> None:
    """A line that a process printed, with its colours."""
    typer.echo(coloured(text))


def emit(text: str) -> None:
    """JSON, YAML or CSV as it is, for programs."""
    typer.echo(text, nl=False)


def job_rows(views: Sequence[JobView], now: float, head: Sequence[str]) -> list[Sequence[str]]:
    """A row a job with these columns of WIDE."""
    return [job_row(view, now, head) for view in views]


def job_row(view: JobView, now: float, head: Sequence[str]) -> Sequence[str]:
    """A row of a table of jobs with these columns of WIDE."""
    told, kept = view.progress, view.checkpoint
    cells = {
        "NAME": view.id,
        "PHASE": f"{view.phase}, {ENDED[view.reason]}" if view.reason in ENDED else view.phase,
        "MODE": view.mode,
        "STEP": step_words(view),
        "LOSS": number(told.loss) or NONE,
        "RATE": f"{told.rate:.3g}/s" if told.rate and view.active else NONE,
        "SHARDS": view.shards_ready or _count(len(view.shards) or None),
        "WORKERS": view.workers_ready or _count(len(view.workers) or None),
        "RESTARTS": str(view.restarts),
        "CHECKPOINT": f"{kept.step} ({span(kept.age(now)) or NONE})" if kept else NONE,
        "AGE": _age(view, now) or NONE,
        "WHERE": view.place,
        "MESSAGE": view.message,
    }
    return [cells[name] for name in head]


def process_rows(view: JobView) -> list[Sequence[str]]:
    """A row a shard and worker."""
    shards = [
        (
            f"shard {one.index}", one.state, str(one.attempt), str(one.restarts), NONE, NONE, NONE,
            f"{one.staleness.mean:.2g}" if one.staleness else NONE, amount(one.memory_bytes) or NONE, one.node or NONE, one.problem or "",
        )
        for one in view.shards
    ]  # fmt: skip
    workers = [
        (
            f"worker {one.index}", one.state, str(one.attempt), str(one.restarts), _count(one.clock), _count(one.behind),
            NONE if one.idle is None else f"{one.idle:.0%}", NONE, NONE, one.node or NONE, one.problem or "",
        )
        for one in view.workers
    ]  # fmt: skip
    return [*shards, *workers]


def stage_rows(view: JobView) -> list[Sequence[str]]:
    """A row a stage."""
    return [
        (
            one.name, one.workers_ready or NONE, _count(one.step), NONE if one.staleness is None else f"{one.staleness:g}",
            NONE if one.idle_fraction is None else f"{one.idle_fraction:.0%}", amount(one.memory_bytes) or NONE,
            amount(one.peak_memory_bytes) or NONE, amount(one.peak_device_bytes) or NONE, one.waiting or "",
        )
        for one in view.stages
    ]  # fmt: skip


def job_facts(view: JobView, now: float) -> list[tuple[str, str]]:
    """What is known of a job, a line each: (name, text). Lines that would be empty are left out."""
    told, kept = view.progress, view.checkpoint
    crashes = sum(one.crashes or 0 for one in view.shards)
    again = sum(one.passes_again for one in view.workers)
    causes = ", ".join(f"{count} by {cause}" for cause, count in view.causes.items())
    rate = f", {told.rate:.3g} {view.unit}s/s" if told.rate else ""
    pace = rate + (f", eta {span(told.eta)}" if told.eta else "") if view.active else ""
    found = [
        ("name", view.id),
        ("where", view.place),
        ("phase", view.phase if not view.reason or view.reason.startswith(view.phase) else f"{view.phase}  {view.reason}"),
        ("message", view.message),
        ("mode", view.mode),
        (view.unit, f"{step_words(view)}{pace}"),
        ("loss", number(told.loss)),
        *((name, number(value)) for name, value in told.metrics.items() if name != "loss"),
        (f"a {view.unit}", step_line(told.step_parts) if told.step_parts else ""),
        ("advice", told.step_advice or ""),
        ("waiting", told.waiting or ""),
        ("staleness", f"mean {view.staleness.mean:.2g}, most {view.staleness.max:g}" if view.staleness else ""),
        ("gap", f"mean {view.gap.mean:.2g}, most {view.gap.max:.2g}" if view.gap else ""),
        ("checkpoint", f"{view.unit} {kept.step}, {span(kept.age(now))} ago, {amount(kept.bytes) or 'size unknown'}" if kept else ""),
        ("writing", f"{view.transfer.doing} {amount(view.transfer.done)} of {amount(view.transfer.total)}" if view.transfer else ""),
        ("restarts", f"{view.restarts} ({causes})" if causes else f"{view.restarts}"),
        ("crashes", f"{crashes}, continued from memory" if crashes else ""),
        ("run again", f"{again} passes over data" if again else ""),
        ("age", _age(view, now)),
        ("took", span(view.seconds(now)) if view.ended is not None else ""),
        ("weights", f"sha256 {view.weights_sha256}" if view.weights_sha256 else ""),
        ("numbers", view.limited),
        *(("warning", text) for text in view.warnings),
        *(("problem", text) for text in view.problems),
    ]
    return [(name, text) for name, text in found if text]


def event_row(one: EventView) -> Sequence[str]:
    """A row of the table of events."""
    message = one.message + (f" (x{one.count})" if one.count > 1 else "")
    return when(one.time), one.type, one.reason, one.about or "job", message


def checkpoint_row(one: CheckpointView, now: float) -> Sequence[str]:
    """A row of the table of checkpoints."""
    return (
        str(one.step), _count(one.term), span(one.age(now)) or NONE, amount(one.bytes) or NONE, "yes" if one.final else NONE,
        one.path or NONE,
    )  # fmt: skip


def metric_row(one: Series) -> Sequence[str]:
    """A row of the table of numbers, with a curve of blocks."""
    return (
        one.name, number(one.last), number(min(one.values)), number(max(one.values)), str(len(one.values)), str(one.steps[-1]),
        sparkline(one.values),
    )  # fmt: skip


def point_rows(history: HistoryView) -> list[Sequence[str]]:
    """time, step, name, value: a row a point, for a spreadsheet."""
    return [
        (f"{at:.3f}", str(step), one.name, repr(value))
        for one in history.series
        for at, step, value in zip(one.times, one.steps, one.values, strict=True)
    ]


def sparkline(values: Sequence[float]) -> str:
    """At most 24 blocks, the highest for the largest value."""
    stride = max(1, -(-len(values) // CURVE))
    kept = values[::-1][::stride][::-1]
    low, high = min(kept), max(kept)
    return "".join(BARS[round((value - low) / ((high - low) or 1.0) * (len(BARS) - 1))] for value in kept)


def when(time: float) -> str:
    """In the local time of who looks."""
    return datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M:%S")


def short_name(process: str, job_row: str) -> str:
    """`worker-0` of `digits-worker-0-r1`."""
    cut = process.removeprefix(f"{job_row}-")
    return cut.rpartition("-")[0] or process


def _age(view: JobView, now: float) -> str:
    return span(None if view.created is None else now - view.created)


def _count(value: int | None) -> str:
    return NONE if value is None else str(value)
