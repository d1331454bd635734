"""What a run leaves in its folder for `psjob list`, `get`, `logs` and the page, while it runs and afterwards.

Nothing here may end a job: a file that cannot be written is left out, and tried again with the next news. `Samples` bounds the file of
numbers over time: where it grows too long, every second line goes. `keep_history` is `--history`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from psjob_client.local.backend import Backend
from psjob_client.local.manifest import as_written
from psjob_client.local.monitor import RunWatch
from psjob_client.local.process import ChildProcess
from psjob_client.local.run_folder import HISTORY, JOB, LIVE, LOCK, RUN, STORY, SUMMARY, Folder
from psjob_client.local.status import histograms, numbers, part, reports, step_parts
from psjob_operator.api.spec import PSTrainingJob
from psjob_operator.plan.actions import Event

LIVE_SECONDS = 1.0
"""Between two writings of what the shards said last."""
MOST_LINES = 10_000
SAMPLE_SECONDS = 0.25
"""Between two lines, at first."""
NEWS_SECONDS = 0.1
"""Seconds between two looks at the coordinator."""


class Record:
    """Writes the files of one run. A lock on one of them is held for as long as this process lives, so that readers know."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._phase = ""
        self._serving: set[str] = set()
        self._started: set[str] = set()
        self._checkpoints: set[tuple[int, int]] = set()
        self._live_at = 0.0
        self._live: Any = None
        self._samples = Samples(folder.path / HISTORY)
        self._story: TextIO | None = None
        self._lock: TextIO | None = None
        self._about: dict[str, Any] = {}

    def open(self, job: PSTrainingJob, work_folder: Path, again: list[str]) -> None:
        """The run begins; its workers start in `work_folder`. `again`: the words that would start it once more."""
        self._about = {
            "job": job.metadata.name, "run": self._folder.run, "pid": os.getpid(), "created": time.time(), "command": again,
            "folder": os.getcwd(), "workFolder": str(work_folder),
        }  # fmt: skip
        with contextlib.suppress(OSError):
            self._lock = (self._folder.path / LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._write(JOB, as_written(job))
        self._write(RUN, self._about)
        with contextlib.suppress(OSError):
            self._story = (self._folder.path / STORY).open("a", encoding="utf-8")

    def event(self, event: Event) -> None:
        """Something that the plan did."""
        self.note("event", type=event.type, reason=event.reason, message=event.message)

    def note(self, what: str, **facts: Any) -> None:
        """A line of the story: {"time": unix seconds, "what": event|phase|start|serving|end|checkpoint, …}."""
        if self._story is None:
            return
        with contextlib.suppress(OSError, ValueError):
            self._story.write(json.dumps({"time": time.time(), "what": what, **facts}) + "\n")
            self._story.flush()

    def look(self, backend: Backend) -> None:
        """Take note of what is new."""
        for child in backend.children:
            self._look_at(child, backend)
        if backend.phase != self._phase:
            self._phase = backend.phase
            self.note("phase", phase=backend.phase)
        kept = part(backend.watch.coordinator, "checkpoint")
        if kept and (which := (int(numbers(kept, "term")), int(numbers(kept, "step")))) not in self._checkpoints:
            self._checkpoints.add(which)
            self.note("checkpoint", step=which[1], term=which[0], bytes=kept.get("bytes"), message=f"a checkpoint of step {which[1]}")
        self._samples.take(backend.watch.coordinator, time.time())
        self._write_live(backend, least=LIVE_SECONDS)

    def ended(self, child: ChildProcess) -> None:
        """A process has ended."""
        self._start(child)
        asked = child.deleting is not None
        self.note("end", name=child.name, code=child.code, signal=child.signal, problem=child.problem, asked=asked)

    def close(self, backend: Backend, result: str, summary: Mapping[str, Any]) -> None:
        """The run is over, in phase `result`."""
        self._samples.take(backend.watch.coordinator, time.time(), last=True)
        self._write_live(backend, least=0.0)
        if result != self._phase:
            self.note("phase", phase=result)
        self._write(SUMMARY, summary)
        self._write(RUN, {**self._about, "ended": time.time(), "result": result, "failure": summary.get("failure")})
        for file in (self._story, self._lock):
            if file is not None:
                file.close()

    def _look_at(self, child: ChildProcess, backend: Backend) -> None:
        self._start(child)
        if child.role == "shard" and child.name not in self._serving and child.running and backend.watch.ready(child):
            self._serving.add(child.name)
            self.note("serving", name=child.name)

    def _start(self, child: ChildProcess) -> None:
        if child.name not in self._started:
            self._started.add(child.name)
            self.note("start", name=child.name, role=child.role, index=child.index, number=child.number, at=child.created)

    def _write_live(self, backend: Backend, least: float) -> None:
        now = time.time()
        if now - self._live_at < least:
            return
        newest: dict[int, Mapping[str, Any]] = {}
        for (index, _), told in sorted(backend.watch.told.items()):
            newest[index] = told
        live = {"coordinator": dict(backend.watch.coordinator), "shards": [newest[index] for index in sorted(newest)]}
        if live != self._live:
            self._live, self._live_at = live, now
            self._write(LIVE, {"time": now, **live})

    def _write(self, name: str, value: Any) -> None:
        with contextlib.suppress(OSError):
            self._folder.write(name, value)


class Samples:
    """Lines {"time": unix s, "step": int, "rate": steps/s or null, "metrics": {name: number}, "reported": [step of each],
    "stepParts": [seconds, in the order of contract.STEP_PARTS]}; the last two where they were told.
    """

    def __init__(self, path: Path, most: int = MOST_LINES, least: float = SAMPLE_SECONDS) -> None:
        self._path, self._most, self._least = path, most, least
        self._at = 0.0
        self._said: tuple[int, Mapping[str, Any]] | None = None
        self._lines = 0

    def take(self, coordinator: Mapping[str, Any], now: float, *, last: bool = False) -> None:
        """Note what the coordinator said last, where it is news; the `last` time however soon after the one before."""
        if not coordinator or (now - self._at < self._least and not last):
            return
        said = int(numbers(coordinator, "step")), dict(part(coordinator, "metrics"))
        if said == self._said:
            return
        rate = coordinator.get("rate")
        metrics = {name: value for name, value in said[1].items() if isinstance(value, int | float) and math.isfinite(value)}
        given = reports(coordinator)
        line: dict[str, Any] = {
            "time": round(now, 3),
            "step": said[0],
            "rate": rate if isinstance(rate, int | float) else None,
            "metrics": metrics,
        }
        line |= {"reported": [given[name] for name in metrics]} if given else {}
        line |= {"stepParts": [round(seconds, 6) for seconds in parts.values()]} if (parts := step_parts(coordinator)) else {}
        with contextlib.suppress(OSError):
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self._at, self._said, self._lines = now, said, self._lines + 1
            if self._lines >= self._most:
                self._halve()

    def _halve(self) -> None:
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        thinned = self._path.with_name(f".{self._path.name}.part")
        thinned.write_text("".join(lines[1::2]), encoding="utf-8")
        os.replace(thinned, self._path)
        self._lines, self._least = len(lines) // 2, self._least * 2


async def keep_history(backend: Backend, path: Path) -> None:
    """Write to `path` what the coordinator says whenever it is news, until cancelled; then its last words, with `waste`.

    Raises OSError if it cannot be written.
    """
    news = News()
    with path.open("w", encoding="utf-8") as file:

        def note(line: Mapping[str, Any] | None) -> None:
            if line:
                file.write(json.dumps(line) + "\n")
                file.flush()

        try:
            while True:
                coordinator = backend.current("shard", 0)
                told = coordinator and await backend.watch.look(coordinator, backend.sites.shards[0])
                note(news.of(told, time.time()) if told else None)
                await asyncio.sleep(NEWS_SECONDS)
        finally:
            note(news.line(backend.watch.coordinator, time.time()) | waste(backend.watch))


def waste(watch: RunWatch) -> dict[str, Any]:
    """{"staleness": histogram, "gap": histogram, "idle": [number or null, …]}.

    The histograms are of the pushes, over all shards, as contract.STATUS_KEYS has them. `idle` is by rank the part of the time in which the
    script waited.
    """
    workers = watch.coordinator.get("workers") or ()
    return {**histograms(watch.told.values()), "idle": [part({"worker": one}, "worker").get("idle") for one in workers]}


class News:
    """Leaves out what was said before. A line: {"time": unix s, "began": unix s or null, "step": int, "metrics": {name: number},

    "passed": [[step, unix s], …], "stepParts": {part: seconds}}: when a worker was first seen in training, the lowest complete clock, the
    numbers that the script reported last, the steps passed since the line before, and where a step's time goes, once that is known.
    """

    def __init__(self) -> None:
        self._last: tuple[int, Mapping[str, Any]] = (-1, {})
        self._passed = 0.0
        self._began: float | None = None

    def of(self, told: Mapping[str, Any], now: float) -> dict[str, Any] | None:
        """The line for an answer of shard 0's status port; None: nothing new."""
        coordinator = part(told, "coordinator")
        if self._began is None and any(
            part({"worker": one}, "worker").get("state") == "joined" for one in coordinator.get("workers") or ()
        ):
            self._began = now
        said = int(numbers(coordinator, "step")), part(coordinator, "metrics")
        if not coordinator or said == self._last:
            return None
        self._last = said
        return self.line(coordinator, now)

    def line(self, coordinator: Mapping[str, Any], now: float) -> dict[str, Any]:
        """Of what the coordinator says, news or not."""
        passed = [entry for entry in coordinator.get("passed") or () if entry[1] > self._passed]
        self._passed = passed[-1][1] if passed else self._passed
        metrics = dict(part(coordinator, "metrics"))
        told = {"time": now, "began": self._began, "step": int(numbers(coordinator, "step")), "metrics": metrics, "passed": passed}
        return told | ({"stepParts": parts} if (parts := step_parts(coordinator)) else {})
