"""Processes that this one has started, and those that these have started in turn."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def end_children(but: int = 0) -> None:
    """Kill and reap every descendant `but` one: loader processes would survive the exec and keep files and memory."""
    for _round in range(3):
        children = [pid for pid in _children(os.getpid()) if pid != but]
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    if but and set(_children(os.getpid())) <= {but}:
                        return
                    time.sleep(0.005)
            except ChildProcessError:
                return


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            direct = [int(child) for child in listing.read_text().split()]
        except OSError:
            continue
        for child in direct:
            found.extend([*_children(child), child])
    return found
