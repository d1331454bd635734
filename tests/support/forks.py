"""One run of pytest and the processes that it forks to run tests: what they share belongs to the process that collected the tests."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from hack.cluster.proc import started_at

MAIN = os.getpid()
"""The process that runs pytest: tests/conftest.py imports this module before anything is forked."""


def in_ranks(world: int, run: Callable[[int], None]) -> int:
    """Run this for each rank in a process of its own; the worst exit code."""
    children = [_forked(run, rank) for rank in range(world)]
    return max((os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children), key=abs)


def _forked(run: Callable[[int], None], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run(rank)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def in_main() -> bool:
    """Whether this is the process that runs pytest, and no fork of it."""
    return os.getpid() == MAIN


def shared_path(name: str) -> Path:
    """A path that is the same in all processes of this run of pytest, and in no other run. Nothing makes or removes it."""
    return Path(tempfile.gettempdir()) / f"psjob-test-{name}-{MAIN}-{started_at(MAIN)}"
