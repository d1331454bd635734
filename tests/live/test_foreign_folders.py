"""A folder of runs that came from elsewhere: it hangs nobody, and nothing in it has another process signalled."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from psjob_client.jobs.runs import LocalJobs
from psjob_client.local import run_folder
from psjob_client.local.run_folder import manifests, read_file
from psjob_client.problems import JobProblem

HOLDS = "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, 2); print('held', flush=True); time.sleep(60)"


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A program of the user's that holds a lock of its own."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path / "own.lock")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / ".psjob" / "job-1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"job": "job", "run": "job-1"}))
    return folder


def told(run: Path, pid: object) -> None:
    (run / run_folder.RUN).write_text(json.dumps({"job": "job", "pid": pid, "created": time.time()}))


def ended(tmp_path: Path, name: str = "job-1") -> str:
    try:
        asyncio.run(LocalJobs(tmp_path).delete(name, 1.0))
    except JobProblem as problem:
        return str(problem)
    return ""


@pytest.mark.parametrize("way", ["a link", "a hard link"])
def test_a_lock_of_another_program(tmp_path: Path, run: Path, victim: subprocess.Popen[str], way: str) -> None:
    own = tmp_path / "own.lock"
    (run / run_folder.LOCK).symlink_to(own) if way == "a link" else os.link(own, run / run_folder.LOCK)
    told(run, victim.pid)
    assert run_folder.holder(run) is None
    ended(tmp_path)
    assert victim.poll() is None


@pytest.mark.parametrize("pid", [-1, 0, 1, True, "7", 10**9, None])
def test_a_number_that_is_no_process_of_the_run(tmp_path: Path, run: Path, pid: object) -> None:
    with (run / run_folder.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        told(run, pid)
        assert run_folder.alive(run) and run_folder.holder(run) is None
        assert "is not known" in ended(tmp_path)
    assert run.exists()


def test_another_process_than_the_one_that_holds_the_lock(tmp_path: Path, run: Path, victim: subprocess.Popen[str]) -> None:
    with (run / run_folder.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        told(run, victim.pid)
        assert "is not known" in ended(tmp_path)
        told(run, os.getpid())
        assert run_folder.holder(run) == os.getpid()
    assert victim.poll() is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name",
    [run_folder.RUN, run_folder.JOB, run_folder.LIVE, run_folder.STORY, run_folder.HISTORY, run_folder.LOCK, "status.json", "config.json"],
)
@pytest.mark.parametrize("what", ["a pipe", "a folder", "a link to a device"])
def test_files_that_are_none_hang_nobody(tmp_path: Path, run: Path, name: str, what: str) -> None:
    other = run / name
    other.unlink(missing_ok=True)
    if name != run_folder.RUN:
        told(run, os.getpid())
    if what == "a pipe":
        os.mkfifo(other)
    elif what == "a folder":
        other.mkdir()
    else:
        other.symlink_to("/dev/zero")
    source = LocalJobs(tmp_path)
    found = asyncio.run(source.list())
    assert [job.id for job in found] == ["job-1"]
    for job in found:
        asyncio.run(source.get(job.id))
        asyncio.run(source.history(job.id))
        asyncio.run(source.events(job.id))


def test_a_manifest_that_is_a_pipe(run: Path) -> None:
    os.mkfifo(run / "manifest-v000001-c000001.json")
    for path in manifests(run):
        with pytest.raises(OSError, match="no regular file"):
            read_file(path)


def test_a_file_without_an_end(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"x" * 100)
    assert read_file(tmp_path / "long", 100) == b"x" * 100
    with pytest.raises(OSError, match="more than 99 bytes"):
        read_file(tmp_path / "long", 99)
