"""What the user sees while a job runs: a live part at the foot of a terminal, a plain line each few seconds elsewhere.

`Story` says what is news, `Display` is the one way out, `screen` draws. Processes that do the same stand together, so that a job of any
size takes a line for its shards and one for its workers.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from psjob_client.local.backend import Backend
from psjob_client.local.manifest import Command, Request
from psjob_client.local.monitor import RunWatch, Standstill
from psjob_client.local.process import ChildProcess
from psjob_client.local.record import Record
from psjob_client.local.run_folder import Folder, Follow, newest_step, tail_of
from psjob_client.local.status import WARNINGS, numbers, part, passes_again, step_line, step_parts
from psjob_client.text import span
from psjob_operator.api.spec import PSTrainingJob
from psjob_operator.api.status import JobStatus
from psjob_operator.contract import EXIT_DONE, EXIT_FENCED, EXIT_REFUSED, EXIT_RETRY
from psjob_operator.plan.actions import Event
from psjob_operator.plan.process_outcome import FROM_OUTSIDE
from psjob_operator.printable import LINE_ENDS, coloured, printable

MANY = 16
"""Processes a core that are worth a word."""
REFUSED = "Refused"
"""The reason of an event, as of the condition that the job ends with."""
QUIET = frozenset({EXIT_DONE, EXIT_RETRY, EXIT_FENCED})
PLAIN_EVERY = 5.0
LIVE_EVERY = 0.25
COMMAND = "  "
"""A line that begins so is a command to copy, and is not broken."""
PENDING = "Pending"
STYLES = {PENDING: "cyan", "Recovering": "yellow", "Failed": "red"}
BAR = 60
APART = "  "
WORKER_STATES = {"joined": "training", "left": "done", "absent": "not here", "lost": "lost"}
MOST_STEPS = 16
"""Up to so many workers at steps of their own are listed one by one; of more, the first and the last step are."""
CLOSE = 1
"""Steps between the first and the last worker in sync, which are not worth a number."""


class Story:
    """Everything that is said between the first line and the last."""

    def __init__(self, display: Display, folder: Folder, shown: frozenset[int]) -> None:
        """`shown`: workers whose lines are passed on, with their numbers where those are several."""
        self.display = display
        self.record = Record(folder)
        self._folder, self._shown = folder, shown
        self._follows: dict[str, Follow] = {}
        self._last_tail = ""
        self._warned: object = None
        self.standing = Standstill(display.unit)

    def opening(self, job: PSTrainingJob, command: Command, again: list[str]) -> None:
        """The job in one line, and what of its manifest has no meaning here. `again`: the words that would start it once more."""
        spec = job.spec
        self.record.open(job, command.folder, again)
        self.display.say(
            f"{job.metadata.name}: {spec.training.mode}, {_count(spec.workers.replicas, 'worker')}"
            f" and {_count(spec.shards.replicas, 'shard')}"
            f" on this machine; run {self.near(self._folder.path)}"
        )
        if spec.workers.replicas > 1 and self._shown == {0}:
            self.display.say("the lines of worker 0 follow; --logs all shows those of every worker")
        processes, cores = spec.workers.replicas + spec.shards.replicas, os.cpu_count() or 1
        if processes > MANY * cores:
            self.display.say(
                f"{processes} processes share {cores} cores; fewer are faster: --set spec.workers.replicas={2 * cores}", "yellow"
            )
        if command.unused:
            self.display.say(f"not used on this machine: {', '.join(command.unused)}")

    def event(self, event: Event) -> None:
        """Something that the plan did."""
        self.record.event(event)
        if event.type == "Warning" and event.reason != REFUSED:  # the last line says it
            self.display.say(f"{event.reason}: {event.message}", "yellow")

    def ended(self, child: ChildProcess) -> None:
        """A process has ended: the end of its log, where that is news."""
        self._pass_on(child, whole=True)
        self.record.ended(child)
        if child.code in QUIET or child.deleting is not None or (child.signal in FROM_OUTSIDE and not child.problem):
            return
        how = f"was ended by signal {child.signal}" if child.signal else f"ended with exit code {child.code}"
        tail = child.problem or tail_of(self._folder.log(child.name))
        if child.code == EXIT_REFUSED:  # in a sentence, which is the last line of its log
            tail = tail.rpartition("\n")[2]
        news = "" if not tail or self._is_shown(child) else ", as another did" if tail == self._last_tail else ":\n" + tail
        self._last_tail = tail
        self.display.say(f"{child.name} {how}{news}", "yellow")

    def show(self, backend: Backend) -> None:
        """New output of the script, and where the job stands."""
        for child in backend.children:
            self._pass_on(child, whole=False)
        self.record.look(backend)
        told = backend.watch.coordinator
        warning = next((told[name] for name in WARNINGS if told.get(name)), None)
        if warning and warning != self._warned:
            self._warned = warning
            self.display.say(f"warning: {warning}", "yellow")
        if not backend.ended:
            for line in self.standing.see(backend.watch.step, told, time.time()):
                self.display.say(line, "yellow")
        drawn = next((self._follows[child.name].drawn for child in backend.children if child.running and child.name in self._follows), "")
        self.display.refresh(backend.status, backend.watch, drawn)

    def farewell(self, request: Request, backend: Backend) -> None:
        """After Ctrl-C: how to continue."""
        words = request.words()
        step = newest_step(backend.folder.path)  # shard 0 may have written a checkpoint since it was last asked
        if step is not None:
            unit = self.display.unit
            self.display.say(f"stopped at {unit} {backend.watch.step}, checkpoint at {unit} {step}. Continue with:")
            path = self.near(backend.folder.path)
            words = ["psjob", "resume", backend.folder.run] if request.from_input else request.words("--resume", path)
        else:
            self.display.say("stopped before a checkpoint was committed. Start again with:")
        self.display.say("  " + shlex.join(words))

    @staticmethod
    def near(path: Path) -> str:
        """A path as seen from here, where it lies below."""
        relative = os.path.relpath(path)
        return str(path) if relative.startswith("..") else relative

    def _is_shown(self, child: ChildProcess) -> bool:
        return child.role == "worker" and child.index in self._shown

    def _pass_on(self, child: ChildProcess, *, whole: bool) -> None:
        if not self._is_shown(child):
            return
        rank = f"{child.index}: " if len(self._shown) > 1 else ""
        follow = self._follows.setdefault(child.name, Follow(self._folder.log(child.name)))
        for line in follow.lines(whole=whole):
            self.display.output(rank + line)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


class Display:
    """One way out for everything: the script's own lines go to standard output, psjob's to standard error (a terminal shows both)."""

    def __init__(self, job: str, *, progress: bool, unit: str = "step") -> None:
        self._job = job
        self.unit = unit
        """What the job counts: step, or round in mode local."""
        self._progress = progress
        self._shown = 0.0
        self._said = ""
        self._console = Console(stderr=False, highlight=False)
        self._live: Live | None = None
        if progress and self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
            self._live.start()

    def say(self, text: str, style: str = "") -> None:
        """A line of psjob's own."""
        if self._live is not None:
            self._console.print(Text(printable(text, LINE_ENDS), style), soft_wrap=text.startswith(COMMAND))
        else:
            print(printable(text, LINE_ENDS), file=sys.stderr, flush=True)

    def output(self, line: str) -> None:
        """A line of the script's, or a result."""
        if self._live is not None:
            self._console.print(Text.from_ansi(coloured(line)), soft_wrap=True)
        else:
            print(line, flush=True)

    def refresh(self, status: JobStatus | None, watch: RunWatch, drawn: str = "") -> None:
        """Show where the job stands, if it is time to. `drawn`: a line that the script draws again and again, such as tqdm's."""
        now = time.time()
        if self._live is not None:
            if now - self._shown >= LIVE_EVERY:
                self._shown = now
                self._live.update(screen(self._job, status, watch, now, self.unit, drawn), refresh=True)
        elif self._progress and now - self._shown >= PLAIN_EVERY:
            self._shown = now
            line = status_line(status, watch, now, self.unit)
            if line != self._said:
                self._said = line
                self.say(line)

    def close(self) -> None:
        """Take the live part off the terminal; what is printed stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def status_line(status: JobStatus | None, watch: RunWatch, now: float, unit: str = "step") -> str:
    """The job in one line: `Running  step 120/368  loss 0.21  45.2 steps/s  eta 6 s  shards 0:a1 serving 1:a1 serving  checkpoint …`."""
    told = watch.coordinator
    shards = " ".join(f"{shard.index}:a{shard.attempt} {shard.state.lower()}" for shard in (status.shards if status else ())[:8])
    kept = checkpoint_words(told, now, unit)
    words = [
        (status and status.phase) or PENDING,
        *progress_words(told, unit),
        f"shards {shards}" if shards else "",
        f"checkpoint {kept}" if kept else "",
        *happened(status, watch),
        str(told.get("waiting") or ""),
    ]
    return "  ".join(word for word in words if word)


def screen(job: str, status: JobStatus | None, watch: RunWatch, now: float, unit: str, drawn: str = "") -> RenderableType:
    """The live part of the terminal; lines of the script scroll above it. `drawn`: a line that the script draws again and again."""
    told = watch.coordinator
    phase = (status and status.phase) or PENDING
    head = Text(printable(APART.join([job, phase, *progress_words(told, unit)])), overflow="fold")
    head.stylize("bold", 0, len(job))
    head.stylize(STYLES.get(phase, "green"), len(job) + len(APART), len(job) + len(APART) + len(phase))
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    if shards := _shards(status):
        rows.add_row("shards", Text(printable(shards)))
    if workers := _workers(list(told.get("workers") or ()), unit):
        rows.add_row("workers", Text(printable(workers)))
    if parts := step_parts(told):
        rows.add_row(f"a {unit}", Text(step_line(parts)))
    if kept := checkpoint_words(told, now, unit):
        rows.add_row("checkpoint", Text(printable(kept)))
    if events := APART.join(happened(status, watch)):
        rows.add_row("so far", Text(printable(events)))
    if drawn:
        rows.add_row("script", Text.from_ansi(coloured(drawn), no_wrap=True, overflow="ellipsis"))
    if told.get("waiting"):
        rows.add_row("waiting", Text(printable(told["waiting"]), "yellow"))
    if told.get("stepAdvice"):
        rows.add_row("advice", Text(printable(str(told["stepAdvice"])), "yellow"))
    total, step = numbers(told, "totalSteps"), numbers(told, "step")
    if not total:
        return Group(head, rows)
    bar = Table.grid()  # a bar that is in no table ends without a new line
    bar.add_row(ProgressBar(total=total, completed=min(step, total), width=BAR, complete_style="cyan", finished_style="green"))
    return Group(head, bar, rows)


def progress_words(told: Mapping[str, Any], unit: str) -> list[str]:
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


def checkpoint_words(told: Mapping[str, Any], now: float, unit: str) -> str:
    """`step 100, 2 s ago`, or what is wrong with it; empty before the first."""
    if told.get("checkpointProblem"):
        return f"problem: {told['checkpointProblem']}"
    kept = part(told, "checkpoint")
    if not kept:
        return ""
    return f"{unit} {int(numbers(kept, 'step'))}, {span(max(0.0, now - numbers(kept, 'time')))} ago"


def happened(status: JobStatus | None, watch: RunWatch) -> list[str]:
    """What faults have cost so far."""
    restarts, crashes, again = status.restarts.total if status else 0, watch.total("crashes"), passes_again(watch.coordinator)
    return [
        *([f"restarts {restarts}"] if restarts else []),
        *([f"crashes {crashes}, continued from memory"] if crashes else []),
        *([f"passes run again {again}"] if again else []),
    ]


def _shards(status: JobStatus | None) -> str:
    found = [] if status is None else status.shards
    return _together((one.index, one.state.lower() + (f" (attempt {one.attempt})" if one.attempt > 1 else "")) for one in found)


def _workers(found: Sequence[Mapping[str, Any]], unit: str) -> str:
    clocks = [int(numbers(one, "clock")) for one in found if one.get("state") == "joined"]
    apart = bool(clocks) and max(clocks) - min(clocks) > CLOSE
    each = apart and len(clocks) <= MOST_STEPS

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
