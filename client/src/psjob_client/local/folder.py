"""The folder of one run: `./.psjob/<run>` holds config, logs, status and, written by the shards, the checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psjob_client.local import regular
from psjob_client.local.errors import BadInput

RUNS = ".psjob"
LONGEST_MESSAGE = 2048
LEAST_ROOM = 16 << 20
"""Bytes that a run needs before its model: config, logs, a checkpoint's manifest."""


@dataclass(frozen=True)
class Folder:
    """Where the files of one run lie."""

    run: str
    path: Path
    """Absolute."""

    @property
    def config(self) -> Path:
        """The config file that every process is handed."""
        return self.path / "config.json"

    def log(self, process: str) -> Path:
        """What `process` prints, both streams."""
        return self.path / "logs" / f"{process}.log"

    def ending(self, process: str) -> Path:
        """The termination message of `process`."""
        return self.path / "logs" / f"{process}.end"

    def write(self, name: str, value: Any) -> None:
        """Put `value` as JSON into file `name`, whole or not at all. Raises OSError."""
        target = self.path / name
        temporary = target.with_name(f".{target.name}.part")
        temporary.write_text(json.dumps(value, indent=1) + "\n")
        temporary.replace(target)


def new_run(job: str) -> str:
    """A fresh name for a run of `job`."""
    return f"{job}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def make_runs(runs: Path) -> None:
    """Have the folder of all runs, which nobody else may write to. Raises OSError, and BadInput for a folder of somebody else."""
    runs.mkdir(mode=0o755, parents=True, exist_ok=True)
    if problem := _open_to_others(runs):
        raise BadInput(problem)
    # Nobody wants runs in a repository; a file that is there already is the user's.
    with contextlib.suppress(FileExistsError), (runs / ".gitignore").open("x") as ignore:
        ignore.write("*\n")


def _open_to_others(runs: Path) -> str | None:
    """Who else could put files there, which runs would then take for their own: a sentence; None: nobody. Raises OSError."""
    facts, link, me = runs.stat(), runs.lstat(), os.geteuid()
    owner = next((one.st_uid for one in (link, facts) if one.st_uid != me), me)
    if owner != me:
        return (
            f"{runs}: belongs to user {owner}, and this is user {me}: its owner could change the runs there; "
            "remove it, or start psjob run in a folder of your own"
        )
    private = facts.st_gid == facts.st_uid  # a group of that user alone, as most systems make it
    if facts.st_mode & (stat.S_IWOTH if private else stat.S_IWOTH | stat.S_IWGRP):
        return (
            f"{runs}: others may write to it (mode {stat.S_IMODE(facts.st_mode):o}) and change the runs there; "
            f"look at what is in it, then say chmod go-w {shlex.quote(str(runs))}"
        )
    return None


def new_folder(job: str, under: Path, run: str | None = None) -> Folder:
    """A fresh run's folder in `under`/.psjob; `run` is its name, if it was given one already.

    Raises:
        BadInput: the folder cannot be made, or others may write to it.
    """
    run = run or new_run(job)
    path = (under / RUNS / run).absolute()
    try:
        make_runs(path.parent)
        (path / "logs").mkdir(parents=True)
        free = shutil.disk_usage(path).free
    except OSError as error:
        raise BadInput(f"{path}: cannot be made: {error.strerror or error}; start psjob run in a folder that you may write to") from None
    if free < LEAST_ROOM:
        with contextlib.suppress(OSError):
            shutil.rmtree(path)
        raise BadInput(
            f"{path.parent}: {free} bytes are free there, and a run needs {LEAST_ROOM} before its model; "
            "make room, or start psjob run in a folder of another disk"
        )
    return Folder(run, path)


def message_of(path: Path) -> str:
    """The termination message in `path`, cut to 2,048 bytes; empty where there is none."""
    try:
        with regular.opened(path) as file:
            return file.read(LONGEST_MESSAGE).decode(errors="replace").strip()
    except OSError:
        return ""


def tail_of(path: Path, most: int = 2000, lines: int = 12) -> str:
    """The last lines of a log; empty where there is none."""
    try:
        with regular.opened(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])
