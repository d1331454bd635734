"""Jobs of this machine: the runs in `FOLDER/.psjob`, read from their folders; nothing is asked of their processes.

Each is a `psjob run` of its own, which continues when the process that started it has ended. It is ended by signals, and asked for a
checkpoint by its config.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psjob_client.jobs import translate
from psjob_client.jobs.translate import RunFiles
from psjob_client.jobs.verbs import answers_request, checked_job, next_request
from psjob_client.jobs.view import CheckpointView, EventView, HistoryView, JobView, LogLine, SpanView
from psjob_client.local import run_folder
from psjob_client.local.manifest import STANDARD_INPUT
from psjob_client.local.run_folder import LARGEST_FILE, MANIFEST, RUNS_FOLDER, Folder, Follow, make_runs, manifests, new_run, read_file
from psjob_client.problems import BadInput, Conflict, DeadlinePassed, JobProblem, NoWeights, Step, no_such_job, verb_step
from psjob_operator.contract import FINAL_WEIGHTS

if TYPE_CHECKING:
    from psjob_client.jobs.verbs import Weights

LOOK_SECONDS = 0.2
"""Between two looks at logs that grow."""
LARGEST_MANIFEST = 8 << 20
"""Bytes of a checkpoint's manifest that is read for the size of its files."""
MOST_HISTORIES = 256
"""Shortened histories that are kept in memory."""
END_LOOK_SECONDS = 0.1
"""Between two looks at a run that begins or ends."""
START_SECONDS = 60.0
"""Until a run has made its folder: Python starts, the manifest is read."""
KILL_SECONDS = 20.0
"""From the second SIGINT on, which kills, to SIGKILL for psjob run itself."""
_started: list[subprocess.Popen[bytes]] = []
"""Kept, so that none is reported as left behind while it runs."""


class LocalJobs:
    """The runs below one folder, which is also where the workers of what is submitted here start."""

    once = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.runs = self.folder / RUNS_FOLDER

    @property
    def title(self) -> str:
        """Where it reads."""
        return str(self.runs)

    async def list(self) -> Sequence[JobView]:
        """All runs, the newest first; without their processes."""
        found = [translate.run_view(read_run(path, story=False)) for path in self._paths()]
        return sorted(found, key=lambda job: job.created or 0.0, reverse=True)

    async def get(self, name: str) -> JobView:
        """A run by its name, or the newest of a job."""
        job = translate.run_view(read_run(self.path(name)))
        if job.checkpoint is None:
            kept = await self.checkpoints(job.id)
            job = job.model_copy(update={"checkpoint": kept[0] if kept else None})
        return job

    async def history(self, name: str, most: int | None = None) -> HistoryView:
        """From the run's beginning on."""
        path = self.path(name) / run_folder.HISTORY
        if most is None:
            return translate.history_view(_lines(path))
        try:
            stat = path.stat()
        except OSError:
            return HistoryView()
        return _some_history(path, stat.st_mtime_ns, stat.st_size, most)

    async def events(self, name: str) -> Sequence[EventView]:
        """What its story says."""
        return translate.run_events(_lines(self.path(name) / run_folder.STORY))

    async def timeline(self, name: str) -> Sequence[SpanView]:
        """Its phases and processes."""
        files = read_run(self.path(name))
        job = translate.run_view(files)
        return translate.run_timeline(files.story, None if files.alive else job.ended)

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
            known = dict.fromkeys([*(run_folder.job_name_of(path) for path in paths), *by_run])
            raise no_such_job(name, str(self.runs), known, Step("`client.list()`", "`psjob list --local`"))
        return newest

    def knows(self, name: str) -> bool:
        """Is there a run, or a job with runs, of that name?"""
        return any(name in (path.name, run_folder.job_name_of(path)) for path in self._paths())

    def _paths(self) -> Sequence[Path]:
        return run_folder.runs_in(self.runs)

    async def submit(self, manifest: Mapping[str, Any], *, work_folder: Path | None = None, resume: Path | None = None) -> str:
        """Start `psjob run`; the name of the run. Workers start in `work_folder`, else in this place's folder."""
        run = new_run(checked_job(manifest).metadata.name)
        words = ["--run", run, "--no-progress", "--work-folder", str(work_folder or self.folder)]
        words += ["--resume", str(resume)] if resume is not None else []
        said = self._said(run)
        with said.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "psjob_client.cli.main", "run", STANDARD_INPUT, *words],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,
            )
        _started[:] = [one for one in _started if one.poll() is None] + [process]
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(json.dumps(dict(manifest)).encode())
        path = self.runs / run
        if not await _until(lambda: (path / run_folder.RUN).exists() or process.poll() is not None, START_SECONDS):
            process.kill()
            raise DeadlinePassed(f"psjob run did not start in {START_SECONDS:.0f} s; try again when the machine is less busy")
        if not (path / run_folder.RUN).exists():
            words = said.read_text(errors="replace").strip().replace("psjob: ", "").splitlines()
            said.unlink(missing_ok=True)
            raise JobProblem("\n".join(words[-8:]) or f"psjob run ended with exit code {process.returncode} and said nothing")
        with contextlib.suppress(OSError):
            said.replace(path / "psjob.out")
        return run

    async def at_risk(self, name: str) -> str:
        """Never: a run's folder stays."""
        return ""

    async def suspend(self, name: str, seconds: float | None) -> None:
        """As Ctrl-C does: a last checkpoint, and the run ends."""
        path = self._running(name)
        _signal(path, signal.SIGINT)
        if seconds is not None and not await _until(lambda: not run_folder.alive(path), seconds):
            said = f"{path.name} still writes its last checkpoint after {seconds:g} s; "
            raise DeadlinePassed(said, verb_step("get", path.name), " shows how far it is")

    async def resume(self, name: str) -> str:
        """A new run that begins with the last checkpoint of this one."""
        path = self.path(name)
        job = await self.get(name)
        if run_folder.alive(path):
            raise Conflict(f"{path.name} runs; ", verb_step("get", path.name), " shows it")
        if job.end == "Complete":
            raise Conflict(f"{path.name} is complete; submit it anew to train again")
        if job.manifest is None:
            raise Conflict(f"{path.name} kept no manifest; continue in a terminal: `psjob run JOB.yaml --resume {path}`")
        told = _object(path / run_folder.RUN)
        folder = Path(str(told.get("workFolder") or self.folder))
        return await self.submit(job.manifest, work_folder=folder, resume=path)

    async def checkpoint(self, name: str, seconds: float) -> CheckpointView:
        """Asked for in the run's config, which shard 0 reads every two seconds."""
        path = self._running(name)
        before = await self.checkpoints(path.name)
        config = _object(path / "config.json")
        saved = dict(config.get("checkpoint") or {})
        if saved.get("disabled"):
            raise Conflict(f"{path.name} has spec.checkpoint.disabled: true, so that none is taken; start it without")
        newest = before[0] if before else None
        number = next_request(saved, newest)
        Folder(path.name, path).write("config.json", {**config, "checkpoint": {**saved, "request": number}})
        found: list[CheckpointView] = []

        async def answered() -> bool:
            alive, made = run_folder.alive(path), await self._newest(path)
            if made is None:
                return not alive
            now = _object(path / "config.json").get("checkpoint") or {}
            last = not alive and (newest is None or (made.term or 0, made.step) > (newest.term or 0, newest.step))
            if last or answers_request(made, number, now):
                found[:] = [made]
            return bool(found) or not alive

        if not await _until_async(answered, seconds):
            raise DeadlinePassed(
                f"no new checkpoint of {path.name} in {seconds:g} s; it is taken at a step: does ",
                verb_step("get", path.name),
                " show any?",
            )
        if not found:
            raise Conflict(f"{path.name} has ended meanwhile; ", verb_step("get", path.name), " says how")
        return found[0]

    async def _newest(self, path: Path) -> CheckpointView | None:
        """As its manifest says; one that is too long to be read here, as psjob run has last heard of it."""
        kept = await self.checkpoints(path.name)
        return kept[0] if kept and kept[0].bytes is not None else (await self.get(path.name)).checkpoint

    async def weights(self, name: str) -> Weights:
        """From the run's folder."""
        path = self.path(name)
        return await asyncio.to_thread(_read_weights, path, path.name)

    async def delete(self, name: str, seconds: float) -> None:
        """End the run at once, without a last checkpoint, and remove its folder."""
        path = self.path(name)
        if run_folder.alive(path):
            _signal(path, signal.SIGINT)
            await asyncio.sleep(END_LOOK_SECONDS)
            _signal(path, signal.SIGINT)
            if not await _until(lambda: not run_folder.alive(path), min(seconds, KILL_SECONDS)):
                _signal(path, signal.SIGKILL)
                if not await _until(lambda: not run_folder.alive(path), KILL_SECONDS):
                    raise DeadlinePassed(f"{path.name} does not end; look at process {_object(path / run_folder.RUN).get('pid')}")
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise JobProblem(f"{path}: cannot be removed: {error.strerror or error}; remove it by hand") from None

    def _running(self, name: str) -> Path:
        path = self.path(name)
        if not run_folder.alive(path):
            further = () if (path / FINAL_WEIGHTS).exists() else (", ", verb_step("resume", path.name), " continues from there")
            raise Conflict(f"{path.name} does not run; ", verb_step("get", path.name), " says how it ended", *further)
        return path

    def _said(self, run: str) -> Path:
        """A file for what psjob run says, until the run has a folder."""
        try:
            make_runs(self.runs)
            path = self.runs / f".{run}.out"
            path.touch()
        except BadInput as error:
            raise JobProblem(str(error)) from None
        except OSError as error:
            raise JobProblem(f"{self.runs}: cannot be made: {error.strerror or error}; name a folder that you may write to") from None
        return path


def wanted(name: str, job: str, process: str | None) -> bool:
    """Is process `name` of `job` the one that was asked for: `worker-0`, `shard-1`, or its whole name?"""
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
    return translate.history_view(_lines(path, most))


def _checkpoint(path: Path) -> CheckpointView | None:
    named = MANIFEST.fullmatch(path.name)
    try:
        stat = path.stat()
    except OSError:
        return None
    assert named is not None
    made = run_folder.json_object(path) if stat.st_size <= LARGEST_MANIFEST else {}
    if not made and stat.st_size <= LARGEST_MANIFEST:
        return None  # it is damaged, and nothing continues from it
    return translate.checkpoint_of(path.name, made, int(named[1]), int(named[2]), stat.st_mtime, str(path))


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


def _signal(path: Path, number: int) -> None:
    """To the process that runs the job of this folder. Raises Conflict if the lock is not that process' own."""
    pid = run_folder.holder(path)
    if pid is None:
        if run_folder.alive(path):
            raise Conflict(f"{path}: who runs it is not known: the process of {run_folder.RUN} does not hold its lock; end it by hand")
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


async def _until(check: Callable[[], bool], seconds: float) -> bool:
    async def asked() -> bool:
        return check()

    return await _until_async(asked, seconds)


async def _until_async(check: Callable[[], Any], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not await check():
        if time.monotonic() > until:
            return False
        await asyncio.sleep(END_LOOK_SECONDS)
    return True


def _object(path: Path) -> Mapping[str, Any]:
    return run_folder.json_object(path, LARGEST_FILE)


def _read_weights(folder: Path, name: str) -> Weights:
    # Here: no other verb and no command waits for the import of torch.
    from psjob.checkpoint.disk import CheckpointProblem
    from psjob.checkpoint.final import read_weights

    try:
        found = read_weights(folder)
    except CheckpointProblem as problem:
        raise NoWeights(f"weights of {name}: {problem}") from None
    if not found:
        raise NoWeights(f"{name} has no checkpoint yet; while it runs, ", verb_step("checkpoint", name), " makes one")
    return found
