"""The control group that all nodes' pods live below, on version 1, version 2 or both; kubelets want it to exist."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from hack.cluster.options import BRIDGE, Options

MOUNTED = Path("/sys/fs/cgroup")
REMOVE_LIMIT = 20.0
SHARES, WEIGHT = "16384", "1600"


def root() -> str:
    """Its path below each hierarchy."""
    return f"/{BRIDGE}"


def create(options: Options) -> None:
    """Make BRIDGE/nodeN in every hierarchy, with its controllers handed down."""
    for hierarchy in _hierarchies():
        for index in range(1, options.nodes + 1):
            _make(hierarchy, Path(BRIDGE) / f"node{index}")


def remove() -> None:
    """Remove them, once the kernel has ended what ran in them; gives up silently after REMOVE_LIMIT."""
    deadline = time.monotonic() + REMOVE_LIMIT
    for hierarchy in _hierarchies():
        while (hierarchy / BRIDGE).exists() and time.monotonic() < deadline:
            for folder, _, _ in os.walk(hierarchy / BRIDGE, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            if (hierarchy / BRIDGE).exists():
                time.sleep(0.1)


def _hierarchies() -> Iterator[Path]:
    if (MOUNTED / "cgroup.controllers").exists():
        yield MOUNTED
        return
    for folder in sorted(MOUNTED.iterdir()):
        if (folder / "cgroup.procs").exists() and not folder.is_symlink():
            yield folder


def _make(hierarchy: Path, below: Path) -> None:
    at = hierarchy
    for part in below.parts:
        parent, at = at, at / part
        at.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):  # a new cpuset of version 1 is empty and takes no process
            if (parent / name).exists() and not (hierarchy / "cgroup.controllers").exists():
                (at / name).write_text((parent / name).read_text())
        # A group has the weight of one process of its parent, and all pods together would starve beside a busy machine's processes.
        for name, value in (("cpu.shares", SHARES), ("cpu.weight", WEIGHT)):
            if (at / name).exists():
                (at / name).write_text(value)
        _delegate(parent)
    _delegate(at)


def _delegate(folder: Path) -> None:
    if not (folder / "cgroup.controllers").exists():
        return
    for controller in (folder / "cgroup.controllers").read_text().split():
        with contextlib.suppress(OSError):
            (folder / "cgroup.subtree_control").write_text(f"+{controller}")
