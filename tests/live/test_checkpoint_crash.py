"""P6: a crash, a failing disk or a power cut at any point of a save leaves the old or the new checkpoint, never a mix."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psjob.checkpoint import disk, manifest, states
from tests.live import crash_server
from tests.support import warm
from tests.support.soaking import rotating
from tests.tensors.checkpoint_parts import LAYOUT, RUN, blocks, names, same, save, stays

OLD, NEW = 10, 20
STRACE = shutil.which("strace")


class Server:
    """A crash_server process, a fork of one that has imported torch."""

    def __init__(self) -> None:
        self._line, far = multiprocessing.Pipe()
        self.process = warm.fork(crash_server.serve, far)
        self.process.start()
        far.close()

    def start(self, folder: Path, step: int = NEW, stop: list[Any] | None = None, wait: bool = False, **more: bool) -> int:
        self._line.send({"folder": str(folder), "step": step, "stop": stop, "wait": wait, "large": False, "base": False} | more)
        return int(self._line.recv()["pid"])

    def status(self) -> int:
        return int(self._line.recv()["status"])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.process.kill()
    made.process.join()


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A run with one checkpoint, to be copied for each try."""
    folder = tmp_path / "template"
    folder.mkdir()
    manifest.commit(folder, save(folder, OLD))
    return folder


def fresh(template: Path, name: str) -> Path:
    folder = template.parent / name / "run"
    shutil.copytree(template, folder)
    return folder


def check_old_or_new(folder: Path, must: int | None = None, base: bool = False) -> int:
    """The newest checkpoint is whole and is one of the two; returns its step. `must`: which."""
    made, _ = manifest.newest_manifest(folder, RUN)
    assert made is not None, "no checkpoint is left"
    assert made.step in ((OLD, NEW) if must is None else (must,))
    found = states.read_states(folder, made, range(len(LAYOUT.blocks)))
    expected = blocks(made.step)
    if base:
        expected |= {index: state for index, state in blocks(OLD).items() if stays(index)}
    assert all(same(found[i][0], expected[i]) and found[i][1] == made.step for i in expected)
    return made.step


def check_goes_on(server: Server, folder: Path) -> None:
    """After the crash the next save works and clears what was left."""
    server.start(folder, step=30)
    assert server.status() == 0
    made, problems = manifest.newest_manifest(folder, RUN)
    assert made is not None and (made.step, problems) == (30, [])
    assert set(names(folder)) == {made.name, *(fact.name for fact in made.listed())}


@pytest.mark.parametrize(
    ("name", "side", "large", "base"),
    [
        ("any", "before", False, False), ("_write", "half", False, False), ("any", "before", False, True),
        rotating("any", "before", True, False),
    ],
)  # fmt: skip
def test_killed_at_each_call(server: Server, template: Path, name: str, side: str, large: bool, base: bool) -> None:
    outcomes = []
    for number in range(1, 200):
        folder = fresh(template, f"n{number}")
        server.start(folder, stop=[name, number, side], large=large, base=base)
        status = server.status()
        outcomes.append(check_old_or_new(folder, NEW if status == 0 else None, base))
        if number % 7 == 0:
            check_goes_on(server, folder)
        if status == 0:
            break
        assert status == -9
    assert len(outcomes) > 10
    assert outcomes == sorted(outcomes), "once new, always new"
    assert outcomes[-1] == NEW


@pytest.mark.nodes
@pytest.mark.rotating
@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
@pytest.mark.parametrize("syscall", ["openat", "write", "fsync", "rename,renameat,renameat2", "unlink,unlinkat"])
def test_killed_at_each_system_call(server: Server, template: Path, syscall: str) -> None:
    outcomes = []
    for number in range(1, 200):
        folder = fresh(template, f"n{number}")
        status, hit = traced(server, folder, f"inject={syscall}:signal=KILL:when={number}", syscall)
        outcomes.append(check_old_or_new(folder, NEW if status == 0 else None))
        if not hit:
            break
        assert status == -9
    else:
        pytest.fail("the save never came to its end")
    assert len(outcomes) > 1
    assert outcomes == sorted(outcomes)


@pytest.mark.nodes
@pytest.mark.rotating
@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
@pytest.mark.parametrize(
    ("syscall", "error", "large"),
    [
        ("write", "ENOSPC", False),
        ("write", "ENOSPC", True),
        ("write", "EIO", False),
        ("fsync", "EIO", False),
        ("rename,renameat,renameat2", "EROFS", False),
        ("openat", "EACCES", False),
        ("openat", "EMFILE", True),
    ],
)
def test_each_system_call_failing_once(server: Server, template: Path, syscall: str, error: str, large: bool) -> None:
    failed = 0
    for number in range(1, 200):
        folder = fresh(template, f"n{number}")
        status, hit = traced(server, folder, f"inject={syscall}:error={error}:when={number}", syscall, large)
        check_old_or_new(folder, NEW if status == 0 else None)
        if not hit:
            break
        assert status in (0, 3), "the process must not die of a bad disk"
        if status == 3:
            failed += 1
            text = (folder.parent / "problem.txt").read_text()
            assert error in text and "cannot" in text
        assert names(folder) == [name for name in names(folder) if not name.endswith(".tmp")]
    assert failed >= 1


@pytest.mark.parametrize("large", [False, True])
def test_every_power_cut_leaves_old_or_new(template: Path, monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    """Un-synced bytes and names may be lost, one by one or all: replay each state that a power cut could leave."""
    folder = fresh(template, "run")
    log = Log(folder)
    if large:
        monkeypatch.setattr(disk, "LARGE", 0)
    for name in ("_create", "_write", "_sync", "_rename"):
        monkeypatch.setattr(disk, name, log.wrap(name, getattr(disk, name)))
    made = save(folder, NEW)
    manifest.commit(folder, made)
    assert len(log.events) > 15
    seen = set()
    for end in range(len(log.events) + 1):
        done = end == len(log.events)
        for number, files in enumerate(log.survivors(end)):
            after = template.parent / f"after{end}-{number}"
            shutil.copytree(template, after)
            for name, raw in files.items():
                (after / name).write_bytes(raw)
            seen.add(check_old_or_new(after, NEW if done else None))
            shutil.rmtree(after)
    assert seen == {OLD, NEW}


class Log:
    """What a save did, in order, and which folders a power cut could leave of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[tuple[str, str, bytes]] = []
        self._names: dict[int, str] = {}

    def wrap(self, kind: str, real: Any) -> Any:
        def recorded(*arguments: Any) -> Any:
            result = real(*arguments)
            if kind == "_create":
                self._names[result] = arguments[0]
                self.events.append(("create", arguments[0], b""))
            elif kind == "_write":
                self.events.append(("write", self._names[arguments[0]], bytes(arguments[1])))
            elif kind == "_rename":
                self.events.append(("rename", arguments[0], arguments[1].encode()))
            elif stat.S_ISDIR(os.fstat(arguments[0]).st_mode):
                self.events.append(("sync folder", "", b""))
            else:
                self.events.append(("sync", self._names[arguments[0]], b""))
            return result

        return recorded

    def survivors(self, end: int) -> Iterator[dict[str, bytes]]:
        """Folders that may be there after a cut before event `end`: of files only synced bytes or zeros, of names any un-synced part."""
        written: dict[str, bytes] = {}
        synced: dict[str, bytes] = {}
        durable: dict[str, str] = {}  # name in the folder -> name that the file was created under
        pending: list[tuple[str, str]] = []
        for kind, name, more in self.events[:end]:
            if kind == "create":
                written[name], synced[name] = b"", b""
                pending.append((name, name))
            elif kind == "write":
                written[name] += more
            elif kind == "sync":
                synced[name] = written[name]
            elif kind == "rename":
                pending.append((more.decode(), name))
            else:
                durable = names_after(durable, pending)
                pending = []
        choices = [[], pending, pending[-1:], pending[:1]]
        for survived in choices if pending else [[]]:
            entries = names_after(durable, survived)
            yield {name: synced[file] for name, file in entries.items()}
            yield {name: synced[file] + bytes(len(written[file]) - len(synced[file])) for name, file in entries.items()}


def names_after(before: dict[str, str], changes: list[tuple[str, str]]) -> dict[str, str]:
    names = dict(before)
    for name, file in changes:
        if name != file:
            names.pop(file, None)
        names[name] = file
    return names


def traced(server: Server, folder: Path, inject: str, syscall: str, large: bool = False) -> tuple[int, bool]:
    """Run one save under strace; (exit status, whether the fault was put in)."""
    assert STRACE is not None
    pid = server.start(folder, wait=True, large=large)
    out = folder.parent / "strace.txt"
    tracer = subprocess.Popen(
        [STRACE, "-p", str(pid), "-e", f"trace={syscall}", "-e", inject, "-o", str(out)], stderr=subprocess.PIPE, text=True
    )
    assert tracer.stderr is not None
    greeting = tracer.stderr.readline()
    if "attached" not in greeting:
        os.kill(pid, 9)
        server.status()
        tracer.wait()
        pytest.skip(f"strace cannot attach here: {greeting.strip()}")
    (folder.parent / "go").touch()
    status = server.status()
    tracer.communicate(timeout=60)
    deadline = time.monotonic() + 10
    while not out.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    text = out.read_text()
    return status, bool(re.search(r"INJECTED|killed by SIGKILL", text))
