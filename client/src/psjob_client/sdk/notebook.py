"""A job in a notebook: an output that is replaced while the job goes on. Needs only IPython's display, no widgets."""

from __future__ import annotations

from collections.abc import Callable

from psjob_client.jobs import cells
from psjob_client.jobs.html import job_html
from psjob_client.jobs.view import HistoryView, JobView

EVERY = 1.0
"""Seconds between two pictures."""


def html(job: JobView, history: HistoryView) -> str:
    """The table and the curve."""
    return job_html(job, history)


def board() -> Callable[[JobView, HistoryView], None] | None:
    """Shows a job, in place of what it showed before; None: this is no notebook."""
    if cells.shell() is None:
        return None
    from IPython.display import HTML, display

    handle = display(HTML(""), display_id=True)

    def show(job: JobView, history: HistoryView) -> None:
        handle.update(HTML(html(job, history)))
        cells.mark(job)

    return show
