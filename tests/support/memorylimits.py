"""Limits of memory that the kernel holds real processes to: groups of cgroup v1, which root makes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

MEMORY = Path("/sys/fs/cgroup/memory")
REMOVE_SECONDS = 10.0
NOW = 1
"""MCL_CURRENT of mlockall."""


@dataclass(frozen=True)
class Group:
    """Processes whose ids were written into `procs`, and what they start."""

    folder: Path

    @property
    def procs(self) -> Path:
        return self.folder / "cgroup.procs"

    @property
    def peak(self) -> int:
        """Most bytes that were charged at a time, page cache included."""
        return int((self.folder / "memory.max_usage_in_bytes").read_text())

    @property
    def refused(self) -> int:
        """How often the limit was met."""
        return int((self.folder / "memory.failcnt").read_text())

    def limit(self, nbytes: int) -> None:
        """More is not given: who asks for it is killed."""
        (self.folder / "memory.limit_in_bytes").write_text(str(nbytes))


@contextlib.contextmanager
def groups(*names: str) -> Iterator[Mapping[str, Group]]:
    """A group for each name, without a limit. Skips where this machine has none."""
    if os.geteuid() != 0 or not (MEMORY / "memory.limit_in_bytes").exists():
        pytest.skip(f"a limit of memory needs root and memory groups of cgroup v1 at {MEMORY}")
    lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    inside = next(path for _, controllers, path in lines if "memory" in controllers.split(","))
    own = MEMORY / inside.lstrip("/")
    top = (own if own.is_dir() else MEMORY) / f"psjob-test-{os.getpid()}-{time.monotonic_ns()}"
    made = {name: Group(top / name) for name in names}
    try:
        for group in made.values():
            group.folder.mkdir(parents=True)
        with libraries_in_memory():
            yield made
    finally:
        for folder in [*(group.folder for group in made.values()), top]:
            _remove(folder)


@contextlib.contextmanager
def libraries_in_memory() -> Iterator[None]:
    """What this process has imported stays in memory and is charged to it.

    A file's pages are charged to the process that reads them first. A system that drops pages which were idle would charge them to a group.
    """
    for module in list(sys.modules.values()):
        for path in (getattr(module, "__cached__", None), getattr(module, "__file__", None)):
            with contextlib.suppress(OSError):
                if isinstance(path, str):
                    Path(path).read_bytes()
    libc = ctypes.CDLL(None)
    libc.mlockall(NOW)  # where it is not allowed, peaks are less exact
    try:
        yield
    finally:
        libc.munlockall()


def _remove(folder: Path) -> None:
    """A group is busy until its last process is gone."""
    deadline = time.monotonic() + REMOVE_SECONDS
    while folder.exists():
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
