"""One run of pytest and the processes that it forks to run tests: what they share belongs to the process that collected the tests."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hack.cluster.proc import started_at

MAIN = os.getpid()
"""The process that runs pytest: tests/conftest.py imports this module before anything is forked."""


def in_main() -> bool:
    """Whether this is the process that runs pytest, and no fork of it."""
    return os.getpid() == MAIN


def shared_path(name: str) -> Path:
    """A path that is the same in all processes of this run of pytest, and in no other run. Nothing makes or removes it."""
    return Path(tempfile.gettempdir()) / f"psjob-test-{name}-{MAIN}-{started_at(MAIN)}"
