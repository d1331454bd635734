"""What the system gives this process: open files, with a refusal if they cannot be enough, and bytes of memory that it has and may have.

Memory is None where the system does not tell it.
"""

from __future__ import annotations

import resource
from pathlib import Path

from psjob.process.errors import Refused

OWN_FILES = 640
"""Descriptors that a shard needs beside its streams: files, listeners, status requests, handovers of memory, and strangers."""


def open_files(workers: int, streams: int, shards: int) -> int:
    """Raise RLIMIT_NOFILE to its hard limit; the limit then. Raises Refused where a shard of such a job needs more."""
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


def limit() -> int | None:
    """Of its container; None: no limit."""
    for path in LIMITS:
        try:
            most = int(path.read_text())
        except (OSError, ValueError):
            continue
        return most if most < NO_LIMIT else None
    return None


def resident(pid: int | None = None) -> int | None:
    """That it, or another process, has in RAM."""
    return _field(Path(f"/proc/{'self' if pid is None else pid}/status"), "VmRSS:")


def peak() -> int | None:
    """The most that it has had in RAM since it began."""
    return _field(Path("/proc/self/status"), "VmHWM:")


def available() -> int | None:
    """That programs of this machine can still have without driving others out."""
    return _field(Path("/proc/meminfo"), "MemAvailable:")


def free(*others: int) -> int | None:
    """That it could have more: what the machine has left, or its container where that is less. `others`: processes beside it."""
    left, most, own = available(), limit(), resident()
    if most is None or own is None:
        return left
    own += sum(resident(pid) or 0 for pid in others)
    return max(0, min(most - own, left if left is not None else most))


def _field(path: Path, name: str) -> int | None:
    try:
        return next(int(line.split()[1]) * 1024 for line in path.read_text().splitlines() if line.startswith(name))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
