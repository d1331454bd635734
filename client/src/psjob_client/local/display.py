"""What the user sees: a live table on a terminal, a plain line each few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from psjob_client.local.probe import numbers, part, passes_again
from psjob_client.local.watch import Watch
from psjob_client.local.words import span
from psjob_operator.api.status import JobStatus

PLAIN_EVERY = 5.0
LIVE_EVERY = 0.25


class Display:
    """One way out for everything: the script's own lines go to standard output, psjob's to standard error (a terminal shows both)."""

    def __init__(self, job: str, *, progress: bool, unit: str = "step") -> None:
        self._job = job
        self.unit = unit
        """What the job counts: step, or round in mode local."""
        self._progress = progress
        self._shown = 0.0
        self._said = ""
        self._console = Console(stderr=False, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        if progress and self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
            self._live.start()

    def say(self, text: str, style: str = "") -> None:
        """A line of psjob's own."""
        if self._live is not None:
            self._console.print(Text(text, style))
        else:
            print(text, file=sys.stderr, flush=True)

    def output(self, line: str) -> None:
        """A line of the script's, or a result."""
        if self._live is not None:
            self._console.print(Text.from_ansi(line))
        else:
            print(line, flush=True)

    def refresh(self, status: JobStatus | None, watch: Watch) -> None:
        """Show where the job stands, if it is time to."""
        now = time.time()
        if self._live is not None:
            if now - self._shown >= LIVE_EVERY:
                self._shown = now
                self._live.update(_table(self._job, status, watch, now, self.unit), refresh=True)
        elif self._progress and now - self._shown >= PLAIN_EVERY:
            self._shown = now
            line = plain(status, watch, now, self.unit)
            if line != self._said:
                self._said = line
                self.say(line)

    def close(self) -> None:
        """Take the live part off the terminal; what is printed stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def plain(status: JobStatus | None, watch: Watch, now: float, unit: str = "step") -> str:
    """The job in one line: `Running  step 120/368  loss 0.21  45.2 steps/s  eta 6 s  shards 0:e1 serving 1:e1 serving  checkpoint …`."""
    told = watch.coordinator
    shards = " ".join(f"{shard.index}:a{shard.attempt} {shard.state.lower()}" for shard in (status.shards if status else ())[:8])
    words = [
        (status and status.phase) or "Pending",
        *_numbers(told, unit),
        f"shards {shards}" if shards else "",
        _checkpoint(told, now, unit),
    ]
    restarts = status.restarts.total if status else 0
    words.append(f"restarts {restarts}" if restarts else "")
    words += [_crashes(watch), _passes_again(told)]
    words.append(str(told.get("waiting") or ""))
    return "  ".join(word for word in words if word)


def _numbers(told: Mapping[str, Any], unit: str) -> list[str]:
    if not told:
        return []
    total = int(numbers(told, "totalSteps"))
    words = [f"{unit} {int(numbers(told, 'step'))}" + (f"/{total}" if total else "")]
    if isinstance(told.get("loss"), int | float):
        words.append(f"loss {numbers(told, 'loss'):.4g}")
    if numbers(told, "rate") > 0:
        words.append(f"{numbers(told, 'rate'):.3g} {unit}s/s")
    if isinstance(told.get("eta"), int | float):
        words.append(f"eta {span(numbers(told, 'eta'))}")
    return words


def _crashes(watch: Watch) -> str:
    found = watch.total("crashes")
    return f"crashes {found}, gone on from memory" if found else ""


def _passes_again(told: Mapping[str, Any]) -> str:
    found = passes_again(told)
    return f"passes run again {found}" if found else ""


def _checkpoint(told: Mapping[str, Any], now: float, unit: str) -> str:
    kept = part(told, "checkpoint")
    if told.get("checkpointProblem"):
        return f"checkpoint problem: {told['checkpointProblem']}"
    if not kept:
        return ""
    return f"checkpoint {unit} {int(numbers(kept, 'step'))}, {span(max(0.0, now - numbers(kept, 'time')))} ago"


def _table(job: str, status: JobStatus | None, watch: Watch, now: float, unit: str) -> Group:
    told = watch.coordinator
    head = Text.assemble((job, "bold"), "  ", ((status and status.phase) or "Pending", "cyan"), "  ", "  ".join(_numbers(told, unit)))
    total, step = numbers(told, "totalSteps"), numbers(told, "step")
    bar = ProgressBar(total=total or None, completed=step, width=60, pulse=not total)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("process", "attempt", "state", "clock"):
        table.add_column(name)
    for shard in (status.shards if status else ())[:16]:
        table.add_row(f"shard {shard.index}", str(shard.attempt), shard.state.lower(), "")
    for worker in list(told.get("workers") or ())[:16]:
        table.add_row(
            f"worker {worker.get('rank')}", str(worker.get("start", "")), str(worker.get("state", "")), str(worker.get("clock", ""))
        )
    restarts = status.restarts if status else None
    words = [
        _checkpoint(told, now, unit),
        f"restarts {restarts.total}" if restarts and restarts.total else "",
        _crashes(watch),
        _passes_again(told),
        str(told.get("waiting") or ""),
    ]
    return Group(head, bar, table, Text("  ".join(word for word in words if word), "dim"))
