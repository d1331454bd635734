"""Processor time of this process and of all that it has started, in seconds: what a test costs, however busy the machine is."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

SUMMANDS, REFERENCE = 60_000, 0.0028
"""A sum of so many took so many seconds on the machine of the budgets, when nothing else ran there."""
TICKS = os.sysconf("SC_CLK_TCK")
LEDGER = "PSJOB_TEST_COSTS"
"""Environment of a runner: a file where processes that a server forked for a test, no children of the runner, say what they spent."""


def spent() -> float:
    """Seconds so far, children that have ended included. A child that left its parent is missing; outside Linux, so are those that run."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return own + (sum(map(_of, _children(os.getpid()))) if sys.platform == "linux" and _has_children() else 0.0)


def slowness() -> float:
    """How many times as long a sum takes this thread's processor as the one of the budgets: a core that two threads share is slower."""
    began, total = time.thread_time(), 0
    for number in range(SUMMANDS):
        total += number * number % 7
    return (time.thread_time() - began) / REFERENCE


def note(ledger: str | None) -> None:
    """Say in this file what this process has spent, before it ends; None: nowhere."""
    if ledger:
        with open(ledger, "a") as file:
            file.write(f"{spent()}\n")


def noted(ledger: Path) -> float:
    """What processes have said there; it is forgotten."""
    try:
        said = ledger.read_text()
        ledger.unlink()
    except OSError:
        return 0.0
    return sum(map(float, said.split()))


def _has_children() -> bool:
    """Most tests have none; a test of threads would have a file read for each of them."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _of(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS + sum(map(_of, _children(pid)))


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.scandir(f"/proc/{pid}/task"):
            found += map(int, Path(task.path, "children").read_text().split())
    except OSError:
        pass  # it has ended meanwhile
    return found
