"""What verbs print: tables that a terminal shows and a pipe can cut, and `-o json|yaml|name`."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from psjob_client.jobs.view import JobView, View
from psjob_client.text import as_json, as_yaml
from psjob_operator.contract import GROUP, KIND
from psjob_operator.printable import LINE_ENDS, coloured, printable


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
SILENT = ("", "-")
STYLES = {
    "Running": "cyan", "Serving": "cyan", "Complete": "green", "Succeeded": "green", "Finished": "green", "Failed": "red", "Lost": "red",
    "Recovering": "yellow", "Suspended": "yellow", "Warning": "yellow",
}  # fmt: skip


def data(form: Form, views: Sequence[View] | View) -> bool:
    """Print as JSON or YAML, where that was asked for."""
    if form not in (Form.json, Form.yaml):
        return False
    plain = views.to_manifest() if isinstance(views, View) else [view.to_manifest() for view in views]
    text = as_json(plain) if form is Form.json else as_yaml(plain)
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
    widths = [max(len(row[column]) for row in [list(head), *cells]) for column in range(len(head))]
    for row in [list(head), *cells]:
        echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def grid(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """The same for a terminal, whose width is dear: columns that say nothing are left out, and the first is never cut."""
    cells = [[printable(cell) for cell in row] for row in rows]
    telling = [number for number in range(len(head)) if any(row[number] not in SILENT for row in cells)] or [0]
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for number in telling:
        widest = max((len(row[number]) for row in cells), default=0)
        made.add_column(head[number], overflow="ellipsis", no_wrap=True, min_width=widest if number == 0 else None)
    for row in cells:
        made.add_row(*(Text(row[number], STYLES.get(row[number], "")) for number in telling))
    return made


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
