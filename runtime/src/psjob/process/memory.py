"""Bytes of memory that this process has and may have, as the system tells them; None where it does not."""

from __future__ import annotations

from pathlib import Path

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
