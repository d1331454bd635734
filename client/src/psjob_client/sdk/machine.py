"""This machine as a place for jobs: each is a `psjob run` of its own, which goes on when the process that started it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psjob_client.jobs.runs import RunSource
from psjob_client.jobs.view import CheckpointView
from psjob_client.local import run_folder
from psjob_client.local.manifest import STANDARD_INPUT
from psjob_client.local.run_folder import LARGEST_FILE, Folder, make_runs, new_run
from psjob_client.problems import BadInput, Conflict, DeadlinePassed, JobProblem, call
from psjob_client.sdk.building import job_of
from psjob_client.sdk.requests import answers, next_request
from psjob_client.sdk.weights import weights_in
from psjob_operator.contract import FINAL_WEIGHTS

if TYPE_CHECKING:
    from psjob_client.sdk.weights import Weights

LOOK_SECONDS = 0.1
START_SECONDS = 60.0
"""Until a run has made its folder: Python starts, the manifest is read."""
KILL_SECONDS = 20.0
"""From the second SIGINT on, which kills, to SIGKILL for psjob run itself."""
_started: list[subprocess.Popen[bytes]] = []
"""Kept, so that none is reported as left behind while it runs."""


class Machine(RunSource):
    """The runs below one folder, which is also where the workers of what is submitted here start."""

    once = False

    async def submit(self, manifest: Mapping[str, Any], *, work_folder: Path | None = None, resume: Path | None = None) -> str:
        """Start `psjob run`; the name of the run. Workers start in `work_folder`, else in this place's folder."""
        run = new_run(job_of(manifest).metadata.name)
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
            raise DeadlinePassed(said, call("get", path.name), " shows how far it is")

    async def resume(self, name: str) -> str:
        """A new run that begins with the last checkpoint of this one."""
        path = self.path(name)
        job = await self.get(name)
        if run_folder.alive(path):
            raise Conflict(f"{path.name} runs; ", call("get", path.name), " shows it")
        if job.phase == "Complete":
            raise Conflict(f"{path.name} is complete; submit it anew to train again")
        if job.manifest is None:
            raise Conflict(f"{path.name} kept no manifest; go on in a terminal: `psjob run JOB.yaml --resume {path}`")
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
            last = not alive and (newest is None or (made.view or 0, made.step) > (newest.view or 0, newest.step))
            if last or answers(made, number, now):
                found[:] = [made]
            return bool(found) or not alive

        if not await _until_async(answered, seconds):
            raise DeadlinePassed(
                f"no new checkpoint of {path.name} in {seconds:g} s; it is taken at a step: does ", call("get", path.name), " show any?"
            )
        if not found:
            raise Conflict(f"{path.name} has ended meanwhile; ", call("get", path.name), " says how")
        return found[0]

    async def _newest(self, path: Path) -> CheckpointView | None:
        """As its manifest says; one that is too long to be read here, as psjob run has last heard of it."""
        kept = await self.checkpoints(path.name)
        return kept[0] if kept and kept[0].bytes is not None else (await self.get(path.name)).checkpoint

    async def weights(self, name: str) -> Weights:
        """From the run's folder."""
        path = self.path(name)
        return await weights_in(path, path.name)

    async def delete(self, name: str, seconds: float) -> None:
        """End the run at once, without a last checkpoint, and remove its folder."""
        path = self.path(name)
        if run_folder.alive(path):
            _signal(path, signal.SIGINT)
            await asyncio.sleep(LOOK_SECONDS)
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
            further = () if (path / FINAL_WEIGHTS).exists() else (", ", call("resume", path.name), " goes on from there")
            raise Conflict(f"{path.name} does not run; ", call("get", path.name), " says how it ended", *further)
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


def _signal(path: Path, number: int) -> None:
    """To the process that runs the job of this folder. Raises Conflict where the lock is not that process' own."""
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
        await asyncio.sleep(LOOK_SECONDS)
    return True


def _object(path: Path) -> Mapping[str, Any]:
    return run_folder.json_object(path, LARGEST_FILE)
