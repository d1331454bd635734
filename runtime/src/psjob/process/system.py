"""What the system gives this process: processes that it starts, open files and memory.

Processes that this one starts wake it when one ends, and end with it; it can kill all of them and theirs. Threads wake each other. Open
files come with a refusal if they cannot be enough. Memory is what it has and may have, in bytes; None if the system does not tell it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Final

from psjob.process.errors import Refused

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG: Final = 1


class ChildExits:
    """Can be read when a child of this process has ended. One at a time, in the main thread."""

    def __init__(self) -> None:
        self._read, self._written = socket.socketpair()
        self._written.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)

    def fileno(self) -> int:
        return self._read.fileno()

    def heard(self) -> None:
        """Take what was said so far."""
        self._read.recv(4096)

    def close(self) -> None:
        """In a child: its own children are its own matter."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._read.close()
        self._written.close()


class Bell:
    """Wakes a thread that watches `fd`. `ring` may be called by any thread."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self.fd = self._in = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self.fd, self._in = os.pipe()
            for end in (self.fd, self._in):
                os.set_blocking(end, False)

    def ring(self) -> None:
        """Wake the thread."""
        with contextlib.suppress(BlockingIOError):  # it was rung often enough
            os.write(self._in, (1).to_bytes(8, "little"))

    def hear(self) -> None:
        """Forget that it was rung."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        """Give its descriptors back."""
        for end in {self.fd, self._in}:
            os.close(end)


def end_with(parent: int) -> None:
    """Has the kernel kill this process when process `parent`, its own, ends in whatever way; ends it if that has gone already."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def end_children(but: int = 0) -> None:
    """Kill and reap every descendant `but` one: loader processes would survive the exec and keep files and memory."""
    for _round in range(3):
        children = [pid for pid in descendants_of(os.getpid()) if pid != but]
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    if but and set(descendants_of(os.getpid())) <= {but}:
                        return
                    time.sleep(0.005)
            except ChildProcessError:
                return


def descendants_of(pid: int) -> list[int]:
    """Numbers of all processes below that one, of each the deepest first."""
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            direct = [int(child) for child in listing.read_text().split()]
        except OSError:
            continue
        for child in direct:
            found.extend([*descendants_of(child), child])
    return found


OWN_FILES = 640
"""Descriptors that a shard needs beside its streams: files, listeners, status requests, handovers of memory, and strangers."""


def cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """That this process may use: those that it may run on, or fewer if its container has a limit."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            limit, period = (int(word) for name in files for word in (cgroup / name).read_text().split())
        except (OSError, ValueError):  # no limit is the word max
            continue
        if limit > 0 and period > 0:
            return max(1, min(own, -(-limit // period)))
    return own


def open_files(workers: int, streams: int, shards: int) -> int:
    """Raise RLIMIT_NOFILE to its hard limit; the limit then. Raises Refused if a shard of such a job needs more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):
            pass  # some systems have a ceiling below an infinite hard limit
    needed = workers * streams + shards + OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise Refused(
            f"this process may open {soft} files (RLIMIT_NOFILE), and {workers} workers with {streams} streams each need {needed}: "
            "raise the hard limit of the container runtime, or use fewer workers or streams"
        )
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
NO_LIMIT = 1 << 60
"""The first version of cgroups says so much, less a page, where there is no limit."""


def memory_limit() -> int | None:
    """Bytes of memory of its container; None: no limit."""
    for path in LIMITS:
        try:
            most = int(path.read_text())
        except (OSError, ValueError):
            continue
        return most if most < NO_LIMIT else None
    return None


def resident_memory(pid: int | None = None) -> int | None:
    """That it, or another process, has in RAM."""
    return _field(Path(f"/proc/{'self' if pid is None else pid}/status"), "VmRSS:")


def peak_memory() -> int | None:
    """The most that it has had in RAM since it began."""
    return _field(Path("/proc/self/status"), "VmHWM:")


def available_memory() -> int | None:
    """That programs of this machine can still have without driving others out."""
    return _field(Path("/proc/meminfo"), "MemAvailable:")


def memory_left(*others: int) -> int | None:
    """That it could have more: what the machine has left, or its container where that is less. `others`: processes beside it."""
    left, most, own = available_memory(), memory_limit(), resident_memory()
    if most is None or own is None:
        return left
    own += sum(resident_memory(pid) or 0 for pid in others)
    return max(0, min(most - own, left if left is not None else most))


def _field(path: Path, name: str) -> int | None:
    try:
        return next(int(line.split()[1]) * 1024 for line in path.read_text().splitlines() if line.startswith(name))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
