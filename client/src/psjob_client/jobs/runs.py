"""Jobs of this machine: the runs in `FOLDER/.psjob`, read from their folders; nothing is asked of their processes."""

from __future__ import annotations

import asyncio
import functools
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from psjob_client.jobs import recorded, series
from psjob_client.jobs.recorded import RunFiles
from psjob_client.jobs.view import CheckpointView, EventView, HistoryView, JobView, LogLine, SpanView
from psjob_client.local import run_folder
from psjob_client.local.resume import MANIFEST, manifests
from psjob_client.local.run_folder import RUNS_FOLDER, Follow, read_file
from psjob_client.problems import Step, no_such_job

LOOK_SECONDS = 0.2
"""Between two looks at logs that grow."""
LARGEST_MANIFEST = 8 << 20
"""Bytes of a checkpoint's manifest that is read for the size of its files."""
MOST_HISTORIES = 256
"""Shortened histories that are kept in memory."""


class RunSource:
    """The runs below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.runs = self.folder / RUNS_FOLDER

    @property
    def title(self) -> str:
        """Where it reads."""
        return str(self.runs)

    async def list(self) -> Sequence[JobView]:
        """All runs, the newest first; without their processes."""
        found = [recorded.job_view(read_run(path, story=False)) for path in self._paths()]
        return sorted(found, key=lambda job: job.created or 0.0, reverse=True)

    async def get(self, name: str) -> JobView:
        """A run by its name, or the newest of a job."""
        job = recorded.job_view(read_run(self.path(name)))
        if job.checkpoint is None:
            kept = await self.checkpoints(job.id)
            job = job.model_copy(update={"checkpoint": kept[0] if kept else None})
        return job

    async def history(self, name: str, most: int | None = None) -> HistoryView:
        """From the run's beginning on."""
        path = self.path(name) / run_folder.HISTORY
        if most is None:
            return series.history(_lines(path))
        try:
            stat = path.stat()
        except OSError:
            return HistoryView()
        return _some_history(path, stat.st_mtime_ns, stat.st_size, most)

    async def events(self, name: str) -> Sequence[EventView]:
        """What its story says."""
        return recorded.events(_lines(self.path(name) / run_folder.STORY))

    async def timeline(self, name: str) -> Sequence[SpanView]:
        """Its phases and processes."""
        files = read_run(self.path(name))
        job = recorded.job_view(files)
        return recorded.timeline(files.story, None if files.alive else job.ended)

    async def checkpoints(self, name: str) -> Sequence[CheckpointView]:
        """Those that its folder holds."""
        return [found for path in manifests(self.path(name)) if (found := _checkpoint(path)) is not None]

    async def logs(self, name: str, process: str | None = None, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[LogLine]:
        """From the files of its processes."""
        path = self.path(name)
        job = str(run_folder.json_object(path / "config.json").get("job") or "")
        follows: dict[Path, Follow] = {}
        last = False
        while True:
            for file in sorted((path / "logs").glob("*.log"), key=run_folder.modified):
                if not wanted(file.stem, job, process):
                    continue
                fresh = file not in follows
                reader = follows.setdefault(file, Follow(file))
                lines = deque(reader.lines(whole=last or not follow), maxlen=tail if fresh and tail is not None else None)
                for line in lines:
                    yield LogLine(process=file.stem, text=line)
            if last or not follow:
                return
            await asyncio.sleep(LOOK_SECONDS)
            last = not run_folder.alive(path)

    async def close(self) -> None:
        """Nothing is held."""

    def path(self, name: str) -> Path:
        """The folder of a run, or of the newest run of a job. Raises NoSuchJob."""
        if name == Path(name).name and "\0" not in name and run_folder.is_run(self.runs / name):
            return self.runs / name
        paths = self._paths()
        by_run = {path.name: path for path in paths}
        if name in by_run:
            return by_run[name]
        newest = run_folder.newest_of(paths, name)
        if newest is None:
            known = dict.fromkeys([*(run_folder.job_of(path) for path in paths), *by_run])
            raise no_such_job(name, str(self.runs), known, Step("`client.list()`", "`psjob list --local`"))
        return newest

    def knows(self, name: str) -> bool:
        """Is there a run, or a job with runs, of that name?"""
        return any(name in (path.name, run_folder.job_of(path)) for path in self._paths())

    def _paths(self) -> Sequence[Path]:
        return run_folder.runs_in(self.runs)


def wanted(name: str, job: str, process: str | None) -> bool:
    """Is process `name` of `job` the one that was asked for: `worker-0`, `ps-1`, or its whole name?"""
    return process is None or name == process or name.startswith((f"{job}-{process}-a", f"{job}-{process}-r"))


def read_run(path: Path, *, story: bool = True) -> RunFiles:
    """What lies in a run's folder."""
    return RunFiles(
        id=path.name,
        place=str(path),
        alive=run_folder.alive(path),
        made=run_folder.modified(path),
        run=run_folder.json_object(path / run_folder.RUN),
        job=run_folder.json_object(path / run_folder.JOB),
        status=run_folder.json_object(path / "status.json"),
        live=run_folder.json_object(path / run_folder.LIVE),
        config=run_folder.json_object(path / "config.json"),
        story=_lines(path / run_folder.STORY) if story else (),
    )


@functools.lru_cache(maxsize=MOST_HISTORIES)
def _some_history(path: Path, changed: int, size: int, most: int) -> HistoryView:
    """Read once for each state of the file."""
    return series.history(_lines(path, most))


def _checkpoint(path: Path) -> CheckpointView | None:
    named = MANIFEST.fullmatch(path.name)
    try:
        stat = path.stat()
    except OSError:
        return None
    assert named is not None
    made = run_folder.json_object(path) if stat.st_size <= LARGEST_MANIFEST else {}
    return recorded.checkpoint_of(path.name, made, int(named[1]), int(named[2]), stat.st_mtime, str(path))


def _some(raw: bytes, most: int) -> list[bytes]:
    """At most so many whole lines, from evenly chosen places of the text; the last one is among them."""
    if raw.count(b"\n") <= most:
        return raw.splitlines()
    end = raw.rfind(b"\n")
    places = {raw.rfind(b"\n", 0, end * number // most) + 1 for number in range(1, most + 1)}
    return [raw[place : raw.find(b"\n", place)] for place in sorted(places)]


def _lines(path: Path, most: int | None = None) -> list[Mapping[str, Any]]:
    """The whole lines of a file that may still grow; with `most`, at most so many, evenly chosen, the last among them."""
    found: list[Mapping[str, Any]] = []
    try:
        raw = read_file(path)
    except OSError:
        return []
    for line in raw.splitlines() if most is None else _some(raw, most):
        try:
            one = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(one, dict) and isinstance(one.get("time"), int | float):
            found.append(one)
    return found
