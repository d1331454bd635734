"""A job as people see it. Times are unix seconds; every model is frozen, and `to_manifest()` is its JSON in camelCase.

In a notebook it is a table, and the loss as a small picture (`job_html`): a line of SVG made here, since a notebook may have no plotting
library. Every text of it is escaped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from psjob_client.text import amount, number, span
from psjob_operator.api.base import Model
from psjob_operator.api.status import Phase, Terminal
from psjob_operator.printable import LINE_ENDS, printable

if TYPE_CHECKING:
    import pandas


Where = Literal["local", "cluster"]
DIVERGED = "Diverged"
"""Reason of a job that is Complete, and whose loss is NaN or inf."""
DIFFER = "WorkersDiffer"
"""Reason of a job that is Complete, and whose workers had different weights where they should be equal."""
ENDED = {DIVERGED: "diverged", DIFFER: "workers differ"}
"""What is said beside the phase of such a job."""
WIDTH, HEIGHT = 480, 120
MOST_ROWS = 32
COLOURS = {"Complete": "#1a7f37", "Failed": "#c11", "Recovering": "#b35900"}
_shown: tuple[object, int] | None = None
"""The view that the running cell of a notebook has shown already, and the number of the cell: it is not shown again as the cell's value."""


class View(Model):
    """What is read of a job. A field of a newer version is passed over."""

    model_config = ConfigDict(extra="ignore", strict=False)

    @field_validator("*", mode="before")
    @classmethod
    def _printable(cls, value: Any) -> Any:
        """Scripts, pods, nodes and API servers wrote these texts."""
        if isinstance(value, str):
            return printable(value, LINE_ENDS)
        if isinstance(value, tuple | list) and value and isinstance(value[0], str):
            return tuple(printable(one, LINE_ENDS) if isinstance(one, str) else one for one in value)
        if isinstance(value, dict):
            return {key: printable(one, LINE_ENDS) if isinstance(one, str) else one for key, one in value.items()}
        return value


class Distribution(View):
    """Staleness or gap of pushes: a number for each push that counted, over all shards."""

    count: int = 0
    """Pushes."""
    mean: float = 0.0
    """Their mean."""
    max: float = 0.0
    """The largest."""
    buckets: tuple[tuple[float, float], ...] = ()
    """(edge, pushes of at most that), rising."""


class TransferView(View):
    """Bytes of a checkpoint on their way."""

    doing: str
    """reading or writing."""
    done: int = 0
    """Bytes so far."""
    total: int = 0
    """Bytes in all."""


class ProcessView(View):
    """One shard or worker."""

    index: int
    """Number of the shard, rank of the worker; from 0."""
    state: str = "Pending"
    """Shards: Pending, Starting, Serving, Lost, Finished. Workers: Pending, Running, Waiting, Succeeded, Failed, Lost."""
    attempt: int = 0
    """Number of the present start, as the name of its process has it; 0: not started."""
    restarts: int = 0
    """Starts beyond the first, as far as they are still seen."""
    name: str | None = None
    """Its process or pod."""
    node: str | None = None
    """Node of its pod."""
    started: float | None = None
    """When its present process began."""
    problem: str | None = None
    """Why it does not run, as one sentence."""


class ShardView(ProcessView):
    """One shard. The numbers are of its present attempt, and absent where it could not be asked."""

    pushes: int | None = None
    """Pushes seen."""
    applied: int | None = None
    """Pushes that counted."""
    dropped: int | None = None
    """Pushes that the mode has dropped."""
    updates_lost: int | None = None
    """Updates that a restart has undone."""
    crashes: int | None = None
    """Its processes that were killed or hung, after which another continued from their memory: no restart."""
    memory_bytes: int | None = None
    """Memory of its process."""
    transfer: TransferView | None = None
    """The checkpoint that it reads or writes now."""
    staleness: Distribution | None = None
    """Updates between the weights of a gradient and those that it is applied to; absent in mode sync."""
    gap: Distribution | None = None
    """How far the weights have moved meanwhile."""


class WorkerView(ProcessView):
    """One worker."""

    clock: int | None = None
    """Steps that it has made."""
    behind: int | None = None
    """Steps that it is behind the first of them."""
    idle: float | None = None
    """The part of its time in which the script waited, for other workers, shards and the network, 0..1."""
    rewinds: int = 0
    """How often it went back to a checkpoint in place."""
    passes_again: int = 0
    """Passes over its data that its script ran through again after restarts, since shard 0's process began."""


class StageView(View):
    """One stage of a model that is cut in stages. Numbers are what its workers measured."""

    name: str
    """As the manifest names it."""
    workers_ready: str = ""
    """Its workers that are there or through, of those declared, such as 2/2."""
    step: int | None = None
    """Lowest complete step of its workers."""
    staleness: float | None = None
    """Updates between the weights that a gradient was computed on and those it is applied to; 0 where each step is a flush."""
    idle_fraction: float | None = None
    """Part of the time of the last 32 steps in which its workers waited, 0..1: their mean."""
    memory_bytes: int | None = None
    """RAM that the worker held that held most."""
    peak_memory_bytes: int | None = None
    """The most RAM that one worker has held since its process began."""
    peak_device_bytes: int | None = None
    """The most that tensors of one worker have held on its CUDA device."""
    waiting: str | None = None
    """What one of its workers waits for."""


class CheckpointView(View):
    """A committed checkpoint."""

    step: int
    """Step that it was taken at."""
    time: float | None = None
    """When it was committed."""
    bytes: int | None = None
    """Size of its files together."""
    term: int | None = None
    """Term that it was taken in: of two checkpoints, the one with the higher (term, step) is newer."""
    path: str | None = None
    """Its manifest or folder."""
    final: bool = False
    """It holds the weights of a job that is complete."""
    observed_request: int | None = None
    """The newest spec.checkpoint.request that the job had read when this checkpoint was begun."""

    def age(self, now: float) -> float | None:
        """Seconds since it was committed."""
        return None if self.time is None else max(0.0, now - self.time)


class ProgressView(View):
    """How far training is."""

    step: int = 0
    """Lowest complete step of all workers."""
    total: int | None = None
    """Steps in all, where the script told."""
    rate: float | None = None
    """Steps a second."""
    eta: float | None = None
    """Seconds until the last step."""
    loss: float | None = None
    """The loss that the script reported last; absent where it is not a finite number."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Every number that the script reported last, by name."""
    step_parts: dict[str, float] = Field(default_factory=dict)
    """Seconds of a worker's step by part, the mean over the workers: compute, copyOut, wire, others, update, copyBack, psjob."""
    step_advice: str | None = None
    """Workers compute for less than half of their time: where most of it goes, and what helps."""
    waiting: str | None = None
    """Who is waited for, and since when."""
    time: float | None = None
    """When this was read."""


class JobView(View):
    """A job, whole but for what grows: see `Client` for history, events, timeline, logs and checkpoints."""

    id: str
    """What the verbs take: the name of a run's folder, or of the job on a cluster."""
    name: str
    """metadata.name."""
    where: Where
    """On this machine, or on a cluster."""
    place: str
    """The run's folder, or context and namespace."""
    namespace: str | None = None
    """Of a job on a cluster."""
    run: str | None = None
    """Identity of the training run, which names the folder of its checkpoints."""
    phase: Phase = "Pending"
    """One word for people: Pending, Running, Recovering, Suspended, Complete, Failed."""
    end: Terminal | None = None
    """Complete or Failed, if it has ended: the condition that holds then."""
    suspended: bool = False
    """It has no process, and continues if it is resumed."""
    reason: str = ""
    """Why it is in this phase, as one CamelCase word."""
    message: str = ""
    """The same as a sentence."""
    fresh: bool = False
    """The numbers come from the running job itself, a few seconds old at most; else from what it left or last told."""
    limited: str = ""
    """Why the numbers are not those of the running job itself, such as a right that is missing; empty where nothing keeps them."""
    mode: str = "sync"
    """The mode that runs, such as bounded:3."""
    unit: Literal["step", "round"] = "step"
    """What is counted."""
    created: float | None = None
    """When it was started or applied."""
    started: float | None = None
    """When its present run of processes began."""
    ended: float | None = None
    """When it became Complete or Failed, or was suspended on this machine."""
    progress: ProgressView = ProgressView()
    """How far training is."""
    shards: tuple[ShardView, ...] = ()
    """In index order."""
    workers: tuple[WorkerView, ...] = ()
    """In order of rank. At most those that are known: on a cluster whose pods cannot be listed, only those with a problem."""
    stages: tuple[StageView, ...] = ()
    """In order; none of a job without stages."""
    shards_ready: str = ""
    """Such as 2/2."""
    workers_ready: str = ""
    """Such as 4/4."""
    restarts: int = 0
    """Starts beyond the first, of all processes."""
    causes: dict[str, int] = Field(default_factory=dict)
    """The same by cause."""
    staleness: Distribution | None = None
    """Over all shards; absent in mode sync."""
    gap: Distribution | None = None
    """Over all shards."""
    checkpoint: CheckpointView | None = None
    """The newest committed one."""
    transfer: TransferView | None = None
    """The checkpoint that is read or written now, over all shards."""
    codecs: str | None = None
    """How numbers travel."""
    transport: str | None = None
    """shared, tcp or mixed."""
    warnings: tuple[str, ...] = ()
    """What may spoil the result: divergence, a learning rate too high for late gradients, duplicate batches."""
    problems: tuple[str, ...] = ()
    """What keeps it from continuing or from saving: failures, images, volumes, disks."""
    weights_sha256: str | None = None
    """Of the final weights."""
    manifest: dict[str, Any] | None = None
    """The PSTrainingJob as `kubectl apply` takes it; absent for a run of which it was not kept."""

    @property
    def over(self) -> bool:
        """It is Complete or Failed, and stays so."""
        return self.end is not None

    @property
    def active(self) -> bool:
        """It has or wants processes: neither over nor suspended."""
        return not self.over and not self.suspended

    def _repr_html_(self) -> str | None:
        """In a notebook: a table; None if `wait` has just shown it, so that it is shown once."""
        return None if is_shown(self) else job_html(self)

    def __repr__(self) -> str:
        """In a line: the manifest, which may hold a whole script, is not for reading here."""
        of = f" of {self.progress.total}" if self.progress.total else ""
        loss = "" if self.progress.loss is None else f", loss {self.progress.loss:.4g}"
        return f"<job {self.id}: {self.phase}, {self.unit} {self.progress.step}{of}{loss}>"

    __str__ = __repr__

    def seconds(self, now: float) -> float | None:
        """How long it has been there: from `created` to its end, or to `now`."""
        return None if self.created is None else max(0.0, (now if self.ended is None else self.ended) - self.created)


class EventView(View):
    """Something that happened to a job."""

    time: float
    """When, the last time."""
    type: Literal["Normal", "Warning"] = "Normal"
    """Warning: something went wrong."""
    reason: str = ""
    """One CamelCase word."""
    message: str = ""
    """The same as a sentence."""
    about: str = ""
    """Process, pod or other object that it is about; empty: the job."""
    count: int = 1
    """How often."""


class SpanView(View):
    """A stretch of a job's timeline."""

    lane: str
    """job, shard 0, worker 3."""
    state: str
    """job: its phase. Shards: Starting, Serving. Workers: Starting, Running."""
    number: int = 0
    """Attempt of a shard, start of a worker; 0 on the lane of the job."""
    begin: float
    """When it began."""
    end: float | None = None
    """When it ended; absent: it continues."""
    ending: str = ""
    """How its process ended: Succeeded, Failed, Stopped (it was asked to end); empty: the process continued."""
    note: str = ""
    """Why it ended so, or the name of the process."""


class LogLine(Model):
    """A line that a process has printed."""

    process: str
    """Name of the process or pod."""
    text: str
    """As it was printed, without its line end: it may hold escape codes of a terminal."""

    def __str__(self) -> str:
        """The line as it was printed."""
        return self.text


class Series(View):
    """One number over time. The three lists have one length."""

    name: str
    """loss, rate (steps a second), or the name that the script gave it."""
    times: tuple[float, ...] = ()
    """Unix seconds, rising."""
    steps: tuple[int, ...] = ()
    """The step that was complete then."""
    values: tuple[float, ...] = ()
    """Finite numbers."""

    @property
    def last(self) -> float | None:
        """The newest value."""
        return self.values[-1] if self.values else None

    def __repr__(self) -> str:
        """In a line."""
        return f"<{self.name}: {len(self.values)} values" + (f", {self.values[-1]:.4g} at {self.steps[-1]}>" if self.values else ">")

    __str__ = __repr__


class HistoryView(View):
    """What a job told over time."""

    series: tuple[Series, ...] = ()
    """loss and rate first, then the script's own in the order in which they first came."""
    complete: bool = True
    """From the job's beginning on; false: only since somebody looked, or since shard 0 last started."""

    def of(self, name: str) -> Series | None:
        """The series of that name."""
        return next((one for one in self.series if one.name == name), None)

    def __getitem__(self, name: str) -> Series:
        """The same; raises KeyError with the names that there are."""
        found = self.of(name)
        if found is None:
            known = ", ".join(one.name for one in self.series)
            raise KeyError(
                f"the job reported no {name}; it reported {known}" if known else f"the job reported no {name}, and nothing else yet"
            )
        return found

    def to_pandas(self) -> pandas.DataFrame:
        """The numbers as a table: a row for each time with a report, a column for each number.

        Returns:
            A DataFrame over `step`, with `time` (UTC) first. After a restart a step may be there again. NaN: not told then.

        Raises:
            ImportError: pandas is not installed.

        Example:
            >>> history = HistoryView(series=(Series(name="loss", times=(1.0, 2.0), steps=(10, 20), values=(0.5, 0.25)),))
            >>> history.to_pandas()["loss"].tolist()
            [0.5, 0.25]
        """
        try:
            import pandas
        except ImportError:
            raise ImportError("to_pandas needs the package pandas, which is not installed: pip install pandas") from None
        rows: dict[tuple[float, int], dict[str, float]] = {}
        for one in self.series:
            for at, step, value in zip(one.times, one.steps, one.values, strict=True):
                rows.setdefault((at, step), {})[one.name] = value
        index = sorted(rows)
        table = pandas.DataFrame([rows[key] for key in index], index=pandas.Index([step for _, step in index], name="step"))
        table = table.reindex(columns=[one.name for one in self.series])
        table.insert(0, "time", pandas.to_datetime([at for at, _ in index], unit="s", utc=True), allow_duplicates=True)
        return table

    def __repr__(self) -> str:
        """In a line."""
        return f"<history of {', '.join(one.name for one in self.series) or 'nothing yet'}>"

    __str__ = __repr__


def job_html(job: JobView, history: HistoryView | None = None, now: float | None = None) -> str:
    """What a notebook shows."""
    at = time.time() if now is None else now
    facts = [("step", step_words(job)), ("loss", number(job.progress.loss)), ("rate", _rate(job)), ("checkpoint", _checkpoint(job, at))]
    facts += [("restarts", str(job.restarts))] if job.restarts else []
    facts += [(name, number(value)) for name, value in job.progress.metrics.items() if name != "loss"]
    colour = COLOURS.get(job.phase, "inherit")
    head = f'<b>{escape(job.id)}</b> <span style="color:{colour}">{escape(job.phase)}</span> {escape(job.mode)}, {escape(job.place)}'
    cells = "".join(f"<td><small>{escape(name)}</small><br>{escape(value)}</td>" for name, value in facts if value)
    notes = [job.message] if job.end == "Failed" else []
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
    series = history.of("loss") if history is not None else None
    if series is None or len(series.values) < 2:
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


def step_words(job: JobView) -> str:
    """`120/368`, or `120` where the script told no last step."""
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


def notebook_shell() -> Any:
    """The notebook's shell; None: this is no notebook."""
    found = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return found if hasattr(found, "kernel") else None


def mark_shown(view: object) -> None:
    """This view has been shown by the cell that runs."""
    global _shown
    if (notebook := notebook_shell()) is not None:
        _shown = view, notebook.execution_count


def is_shown(view: object) -> bool:
    """Has the cell that runs shown this view?"""
    notebook = notebook_shell()
    return notebook is not None and _shown is not None and _shown[0] is view and _shown[1] == notebook.execution_count


def notebook_board() -> Callable[[JobView, HistoryView], None] | None:
    """Shows a job, in place of what it showed before; None: this is no notebook."""
    if notebook_shell() is None:
        return None
    from IPython.display import HTML, display

    handle = display(HTML(""), display_id=True)

    def show(job: JobView, history: HistoryView) -> None:
        handle.update(HTML(job_html(job, history)))
        mark_shown(job)

    return show
