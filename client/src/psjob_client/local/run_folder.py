"""The folder of one run: `./.psjob/<run>` holds config, keys, logs, status and, written by the shards, the checkpoints.

Who runs the job holds a lock on a file of it (`alive`, `holder`). Somebody else may have put files there: only regular ones are read,
opened without following a link, with a limit. `resumed` judges a run to continue from before anything is started: it reads the newest
manifest lightly, and the runtime judges the rest.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from psjob_client.problems import BadInput
from psjob_operator import keys
from psjob_operator.api.spec import JobSpec
from psjob_operator.contract import ASYNC_OUTER_RULE, FINAL_WEIGHTS, GOES_ON
from psjob_operator.plan import pods

RUNS_FOLDER = ".psjob"
RUN, JOB, LIVE, STORY, HISTORY, SUMMARY, LOCK = (
    "run.json", "job.json", "live.json", "story.jsonl", "history.jsonl", "summary.json", "lock",
)  # fmt: skip
LOCKS = Path("/proc/locks")
"""Who holds which lock, on Linux."""
LONGEST_MESSAGE = 2048
LEAST_ROOM = 16 << 20
"""Bytes that a run needs before its model: config, logs, a checkpoint's manifest."""
LARGEST_OBJECT = 64 << 20
"""Bytes of a JSON file of a run."""
ONE_HOST = "none"
"""What `training.encryption: auto` means where nothing leaves this machine's memory."""
LARGEST_FILE = 256 << 20
"""Bytes of a file that is read whole."""
LARGEST_PART = 256 * 1024
"""Bytes taken at once, so that a script that prints without end leaves the display alive."""
MANIFEST = re.compile(r"manifest-v(\d{6,18})-s(\d{12,18})\.json")
LARGEST = 128 * 1024 * 1024
"""Bytes of a manifest; as large as the runtime reads them."""
MOST_NAMED = 5


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
    path = (under / RUNS_FOLDER / run).absolute()
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
        with open_file(path) as file:
            return file.read(LONGEST_MESSAGE).decode(errors="replace").strip()
    except OSError:
        return ""


def tail_of(path: Path, most: int = 2000, lines: int = 12) -> str:
    """The last lines of a log; empty where there is none."""
    try:
        with open_file(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def alive(folder: Path) -> bool:
    """Does the process live that runs the job of this folder?"""
    try:
        with open_file(folder / LOCK) as file:
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
        told = json.loads(read_file(folder / RUN))
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


def runs_in(runs: Path) -> Sequence[Path]:
    """Folders of runs, by name; none where `runs` cannot be read."""
    try:
        return [path for path in sorted(runs.iterdir()) if is_run(path)]
    except OSError:
        return []


def newest_of(paths: Sequence[Path], job: str) -> Path | None:
    """The run of this job that was made last; None if there is none."""
    return max((path for path in paths if job_name_of(path) == job), key=_created, default=None)


def is_run(path: Path) -> bool:
    """Is this the folder of a run?"""
    return (path / "config.json").is_file() or (path / RUN).is_file()


def job_name_of(path: Path) -> str:
    """Name of the job of which this is a run."""
    told = json_object(path / RUN) or json_object(path / "config.json")
    return str(told.get("job") or path.name)


def modified(path: Path) -> float:
    """Unix time of its last change; 0 where that is not known."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def json_object(path: Path, most: int = LARGEST_OBJECT) -> Mapping[str, Any]:
    """The object that this file of at most `most` bytes holds; empty where it holds none."""
    try:
        read = json.loads(read_file(path, most))
    except (OSError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _created(path: Path) -> float:
    created = json_object(path / RUN).get("created")
    return float(created) if isinstance(created, int | float) else modified(path)


@dataclass(frozen=True, repr=False)
class RunKeys:
    """`folder` holds the file of each seat."""

    folder: Path
    named: Mapping[str, bytes]

    @property
    def questions(self) -> bytes:
        """What a question to a status port is proven with."""
        return self.named["questions"]

    def hand(self, role: str, index: int, number: int) -> Path:
        """The file of the process that sits there from now on. Raises OSError if it cannot be written."""
        path = self.folder / f"{role}-{index}"
        # In place, where the file before has as many bytes: a full disk keeps no process from being started again.
        _write_key(path, keys.process_key_file(self.named, role, index, number))
        return path


def local_encryption(spec: JobSpec) -> str:
    """Which streams of a run on this machine are encrypted, one of contract.ENCRYPTION."""
    return pods.encryption(spec, ONE_HOST)


def make_keys(folder: Path, shards: int, workers: int, encrypted: bool = False, listening: int = 0) -> RunKeys:
    """Fresh keys of a run, and the files of all its seats: its own is `folder`/run. `encrypted`: with certificates, also of `listening`
    workers.

    Raises OSError if they cannot be made.
    """
    made = RunKeys(folder, keys.fresh())
    folder.mkdir(mode=0o700)
    _write_key(folder / "run", keys.format_keys(made.named))
    for role, count in (("shard", shards), ("worker", workers)):
        for index in range(count):
            made.hand(role, index, 1)
    if encrypted:
        from psjob_operator.certificates import certificates  # most runs on one machine need none

        for name, text in certificates(shards, listening).items():
            _write_key(folder / name, text.decode())
    return made


def _write_key(path: Path, text: str) -> None:
    """A file that only its owner may read, with room of its own on the disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, len(text))
        os.pwrite(handle, text.encode(), 0)
    finally:
        os.close(handle)


def open_file(path: Path) -> BinaryIO:
    """The file, for reading. Raises OSError for a link, a folder, a pipe, a socket or a device."""
    # Without O_NONBLOCK a pipe would be waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: Path, most: int = LARGEST_FILE) -> bytes:
    """What it holds. Raises OSError as `opened` does, and for more than `most` bytes."""
    with open_file(path) as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise OSError(errno.EFBIG, f"has more than {most} bytes", str(path))
    return found


class Follow:
    """Reads one growing file, line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def lines(self, *, whole: bool = False) -> Iterator[str]:
        """What was written since the last call, without line ends; with `whole`, all of it, and a last line that has no end."""
        while True:
            part = self._read()
            self._rest += self._decoder.decode(part)
            *lines, self._rest = self._rest.split("\n")
            yield from map(_last_drawn, lines)
            if not whole or not part:
                break
        if whole and self._rest:
            yield _last_drawn(self._rest)
            self._rest = ""

    @property
    def drawn(self) -> str:
        """A line that the script draws again and again, such as tqdm's, in its newest form; empty if there is none."""
        return _last_drawn(self._rest) if "\r" in self._rest else ""

    def _read(self) -> bytes:
        try:
            with open_file(self.path) as file:
                file.seek(self._at)
                part = file.read(LARGEST_PART)
        except OSError:
            return b""
        self._at += len(part)
        return part


def _last_drawn(line: str) -> str:
    """What a terminal would show of a line with carriage returns."""
    return next((part for part in reversed(line.split("\r")) if part), "")


def parse_logs(text: str, workers: int) -> frozenset[int]:
    """The workers whose lines are shown: of `all`, `none`, or their numbers such as `0,2`. Raises BadInput."""
    if text in ("all", "none"):
        return frozenset(range(workers) if text == "all" else ())
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise BadInput(f"--logs {text}: must be all, none, or numbers of workers such as 0,2")
    if above := [word for word in words if int(word) >= workers]:
        raise BadInput(f"--logs {text}: there is no worker {above[0]}; this job has {workers}, numbered from 0")
    return frozenset(map(int, words))


@dataclass(frozen=True)
class ResumedRun:
    """A run to continue from, as the user named it."""

    said: str
    """The option or field with its value; every refusal begins with it."""
    path: Path
    instead: str
    """How to start anew."""


def resumed_folder(option: Path | None, spec: JobSpec) -> tuple[Path, int] | None:
    """Absolute path of the run's folder that `--resume` or else `spec` names, and the step of its checkpoint; None where neither does.

    Raises:
        BadInput: the job cannot continue from there, and that can be seen now.
    """
    source = _named(option, spec)
    if source is None:
        return None
    try:
        if not (source.path / "config.json").is_file():
            raise BadInput(f"{source.said}: {source.path} is not the folder of a run of psjob; {_near(source)}")
        found = manifests(source.path)
    except OSError as error:
        raise BadInput(f"{source.said}: {source.path} cannot be read: {error.strerror or error}; {_near(source)}") from None
    if not found:
        raise BadInput(
            f"{source.said}: that run has no checkpoint (no manifest in {source.path}): it ended before its first, or kept none; "
            f"name a run that has one, or {source.instead}"
        )
    newest = next((manifest for path in found if (manifest := _whole(path)) is not None), None)
    if newest is None:
        raise BadInput(
            f"{source.said}: that run has no whole checkpoint: {_list([path.name for path in found])} or a file listed there is damaged; "
            f"put the files of {source.path} back from a copy, name another run, or {source.instead}"
        )
    _must_fit(source, newest, spec)
    return source.path.absolute(), int(newest["step"])


def _named(option: Path | None, spec: JobSpec) -> ResumedRun | None:
    if option is not None:
        return ResumedRun(f"--resume {option}", option, "start anew without --resume")
    asked, anew = spec.checkpoint.resume_from, "start anew with --set spec.checkpoint.resumeFrom=null"
    if asked is None:
        return None
    if asked.run:
        return ResumedRun(f"spec.checkpoint.resumeFrom.run: {asked.run}", Path(RUNS_FOLDER) / asked.run, anew)
    said = f"spec.checkpoint.resumeFrom.job: {asked.job}"
    there = runs_in(Path(RUNS_FOLDER))
    newest = newest_of(there, asked.job or "")
    if newest is None:
        jobs = _list(sorted({job_name_of(path) for path in there})) or "none"
        raise BadInput(
            f"{said}: no run of that job is in {Path(RUNS_FOLDER).absolute()} (jobs with runs there: {jobs}); "
            f"run it first, start in the folder that it was run in, or {anew}"
        )
    return ResumedRun(said, newest, anew)


def _near(source: ResumedRun) -> str:
    runs = [path for path in Path(RUNS_FOLDER).glob("*") if (path / "config.json").is_file()]
    if not runs:
        return f"there is no run in {Path(RUNS_FOLDER).absolute()}; start in the folder that the run was started in, or {source.instead}"
    return f"name one of the runs here ({_list([path.name for path in sorted(runs, key=modified)])} in {RUNS_FOLDER}), or {source.instead}"


def _list(names: list[str]) -> str:
    return ", ".join(names[-MOST_NAMED:]) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")


def manifests(folder: Path) -> list[Path]:
    """The newest first."""
    matches = [match for path in folder.iterdir() if (match := MANIFEST.fullmatch(path.name))]
    return [folder / match[0] for match in sorted(matches, key=lambda match: (int(match[1]), int(match[2])), reverse=True)]


def newest_step(folder: Path) -> int | None:
    """The step of the newest checkpoint that is whole; None without one."""
    manifest = next((found for path in manifests(folder) if (found := _whole(path)) is not None), None)
    return None if manifest is None else int(manifest["step"])


def _whole(path: Path) -> Mapping[str, Any] | None:
    """The manifest, if it has its own hash and the files that it lists have their sizes; what lies in them the runtime reads."""
    try:
        body = json.loads(read_file(path, LARGEST))
        said = body.pop("sha256")
        raw = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
        listed = [*body["files"], *body["tables"].values(), *(body[name] for name in ("records", "buffers") if body[name] is not None)]
        missing = any((path.parent / str(file["name"])).stat().st_size != file["bytes"] for file in listed)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return None if missing or said != hashlib.sha256(raw.encode()).hexdigest() else body


def _must_fit(source: ResumedRun, manifest: Mapping[str, Any], spec: JobSpec) -> None:
    if manifest.get("final") is True:
        raise BadInput(
            f"{source.said}: that run is complete (step {manifest.get('step')}); load {source.path / FINAL_WEIGHTS} in the script "
            f"to train on from its weights, or {source.instead}"
        )
    workers, mode = manifest.get("workers"), manifest.get("mode")
    clocks = workers.get("clock") if isinstance(workers, dict) else None
    if isinstance(clocks, list) and len(clocks) != spec.workers.replicas:
        raise BadInput(
            f"{source.said}: that run had {len(clocks)} workers, spec.workers.replicas is {spec.workers.replicas}; "
            f"continue with --set spec.workers.replicas={len(clocks)} (another number of shards is fine), or {source.instead}"
        )
    training = spec.training
    ours: str = "backup" if training.sync is not None and training.sync.backup_workers else training.mode
    if training.mode == "local":
        quorum = training.local is not None and training.local.quorum > 0
        ours = "local-async" if training.update_rule else "local-quorum" if quorum else "local"
    if isinstance(mode, str) and ours not in (modes := GOES_ON.get(mode, (mode,))):
        also = {"backup": " with backupWorkers", "local-quorum": " with a quorum", "local-async": f" with {ASYNC_OUTER_RULE}"}.get(ours, "")
        raise BadInput(
            f"{source.said}: that run was {mode[:64]}, spec.training.mode is {training.mode}{also}; "
            f"continue with --set spec.training.{_field_of(modes[0], ours)}, or {source.instead}"
        )


def _field_of(mode: str, ours: str) -> str:
    """What makes a job that is of kind `ours` one of a manifest's mode."""
    if mode == "local" and ours in ("local-quorum", "local-async"):
        return "local.quorum=0" if ours == "local-quorum" else "updateRule=null"
    kinds = {"backup": "sync.backupWorkers=1", "local-quorum": "local.quorum=1", "local-async": f"updateRule={ASYNC_OUTER_RULE}"}
    return kinds.get(mode, f"mode={mode[:64]}")
