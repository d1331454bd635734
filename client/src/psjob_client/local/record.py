"""What a run leaves in its folder for `psjob list`, `get`, `logs` and the page, while it runs and afterwards.

Nothing here may end a job: a file that cannot be written is left out, and tried again with the next news.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from psjob_client.local import regular
from psjob_client.local.backend import Backend
from psjob_client.local.children import ChildProcess
from psjob_client.local.folder import Folder
from psjob_client.local.manifest import as_written
from psjob_client.local.probe import numbers, part
from psjob_client.local.sampling import Samples
from psjob_operator.api.spec import PSTrainingJob
from psjob_operator.plan.actions import Event

RUN, JOB, LIVE, STORY, HISTORY, SUMMARY, LOCK = (
    "run.json", "job.json", "live.json", "story.jsonl", "history.jsonl", "summary.json", "lock",
)  # fmt: skip
LOCKS = Path("/proc/locks")
"""Who holds which lock, on Linux."""
LIVE_SECONDS = 1.0
"""Between two writings of what the shards said last."""


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
        if kept and (which := (int(numbers(kept, "view")), int(numbers(kept, "step")))) not in self._checkpoints:
            self._checkpoints.add(which)
            self.note("checkpoint", step=which[1], view=which[0], bytes=kept.get("bytes"), message=f"a checkpoint of step {which[1]}")
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


def alive(folder: Path) -> bool:
    """Does the process live that runs the job of this folder?"""
    try:
        with regular.opened(folder / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def holder(folder: Path) -> int | None:
    """The process that runs the job of this folder; None where none does, or where that process does not hold the lock itself.

    What stands in the folder may come from elsewhere: a lock that another program holds, or the number of another process.
    """
    if not alive(folder):
        return None
    try:
        told = json.loads(regular.content(folder / RUN))
        facts = (folder / LOCK).lstat()
    except (OSError, ValueError, RecursionError):
        return None
    pid = told.get("pid") if isinstance(told, dict) else None
    if type(pid) is not int or pid <= 1 or facts.st_nlink != 1:
        return None
    try:
        locks = LOCKS.read_text()
    except OSError:  # this system does not say who holds a lock
        return pid
    return pid if _holds(locks, pid, facts.st_ino) else None


def _holds(locks: str, pid: int, inode: int) -> bool:
    """Whether a line such as `1: FLOCK  ADVISORY  WRITE 3620 fe:00:6736467 0 EOF` is of these."""
    words = [line.split() for line in locks.splitlines()]
    return any(len(line) > 5 and line[1] == "FLOCK" and line[4] == str(pid) and line[5].endswith(f":{inode}") for line in words)
