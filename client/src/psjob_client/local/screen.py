"""What a terminal shows while a job runs: how far it is, what each shard and worker does, and what is waited for. Pure.

Processes that do the same stand together, so that a job of any size takes a line for its shards and one for its workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from psjob_client.local.probe import numbers, part, passes_again
from psjob_client.local.watch import Watch
from psjob_client.local.words import span
from psjob_operator.api.status import JobStatus
from psjob_operator.printable import coloured, printable

PENDING = "Pending"
STYLES = {PENDING: "cyan", "Recovering": "yellow", "Failed": "red"}
BAR = 60
APART = "  "
WORKER_STATES = {"joined": "training", "left": "done", "absent": "not here", "lost": "lost"}
CLOSE = 1
"""Steps between the first and the last worker in sync, which are not worth a number."""
MANY = 16
"""Workers at steps of their own, of which each is told; of more the first and the last step."""


def screen(job: str, status: JobStatus | None, watch: Watch, now: float, unit: str, drawn: str = "") -> RenderableType:
    """The live part of the terminal; lines of the script scroll above it. `drawn`: a line that the script draws again and again."""
    told = watch.coordinator
    phase = (status and status.phase) or PENDING
    head = Text(printable(APART.join([job, phase, *progress(told, unit)])), overflow="fold")
    head.stylize("bold", 0, len(job))
    head.stylize(STYLES.get(phase, "green"), len(job) + len(APART), len(job) + len(APART) + len(phase))
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    if shards := _shards(status):
        rows.add_row("shards", Text(printable(shards)))
    if workers := _workers(list(told.get("workers") or ()), unit):
        rows.add_row("workers", Text(printable(workers)))
    if kept := checkpoint(told, now, unit):
        rows.add_row("checkpoint", Text(printable(kept)))
    if events := APART.join(happened(status, watch)):
        rows.add_row("so far", Text(printable(events)))
    if drawn:
        rows.add_row("script", Text.from_ansi(coloured(drawn), no_wrap=True, overflow="ellipsis"))
    if told.get("waiting"):
        rows.add_row("waiting", Text(printable(told["waiting"]), "yellow"))
    total, step = numbers(told, "totalSteps"), numbers(told, "step")
    if not total:
        return Group(head, rows)
    bar = Table.grid()  # a bar that is in no table ends without a new line
    bar.add_row(ProgressBar(total=total, completed=min(step, total), width=BAR, complete_style="cyan", finished_style="green"))
    return Group(head, bar, rows)


def progress(told: Mapping[str, Any], unit: str) -> list[str]:
    """`step 120/368`, `loss 0.21`, `45.2 steps/s`, `eta 6 s`: those that are known."""
    if not told:
        return []
    total = int(numbers(told, "totalSteps"))
    words = [f"{unit} {int(numbers(told, 'step'))}" + (f"/{total}" if total else "")]
    if isinstance(told.get("loss"), int | float):
        words.append(f"loss {numbers(told, 'loss'):.4g}")
    if part(told, "checkpoint").get("final"):
        return [*words, "trained and saved; its processes are ending"]
    if numbers(told, "rate") > 0:
        words.append(f"{numbers(told, 'rate'):.3g} {unit}s/s")
    if isinstance(told.get("eta"), int | float):
        words.append(f"eta {span(numbers(told, 'eta'))}")
    return words


def checkpoint(told: Mapping[str, Any], now: float, unit: str) -> str:
    """`step 100, 2 s ago`, or what is wrong with it; empty before the first."""
    if told.get("checkpointProblem"):
        return f"problem: {told['checkpointProblem']}"
    kept = part(told, "checkpoint")
    if not kept:
        return ""
    return f"{unit} {int(numbers(kept, 'step'))}, {span(max(0.0, now - numbers(kept, 'time')))} ago"


def happened(status: JobStatus | None, watch: Watch) -> list[str]:
    """What faults have cost so far."""
    restarts, crashes, again = status.restarts.total if status else 0, watch.total("crashes"), passes_again(watch.coordinator)
    return [
        *([f"restarts {restarts}"] if restarts else []),
        *([f"crashes {crashes}, gone on from memory"] if crashes else []),
        *([f"passes run again {again}"] if again else []),
    ]


def _shards(status: JobStatus | None) -> str:
    found = [] if status is None else status.shards
    return _together((one.index, one.state.lower() + (f" (attempt {one.attempt})" if one.attempt > 1 else "")) for one in found)


def _workers(found: Sequence[Mapping[str, Any]], unit: str) -> str:
    clocks = [int(numbers(one, "clock")) for one in found if one.get("state") == "joined"]
    apart = bool(clocks) and max(clocks) - min(clocks) > CLOSE
    each = apart and len(clocks) <= MANY

    def does(one: Mapping[str, Any]) -> str:
        state = str(one.get("state", ""))
        if each and state == "joined":
            return f"at {unit} {int(numbers(one, 'clock'))}"
        return WORKER_STATES.get(state, state) + (f" (start {one['start']})" if int(numbers(one, "start")) > 1 else "")

    told = _together((int(numbers(one, "rank")), does(one)) for one in found)
    return f"{told}{APART}at {unit}s {min(clocks)} to {max(clocks)}" if apart and not each else told


def _together(each: Iterable[tuple[int, str]]) -> str:
    """`0-3 serving  4 restoring (attempt 2)`."""
    said = []
    for words, group in groupby(sorted(each), key=lambda one: one[1]):
        numbered = [number for number, _ in group]
        first, last = numbered[0], numbered[-1]
        said.append(f"{first if first == last else f'{first}-{last}'} {words}")
    return APART.join(said)
