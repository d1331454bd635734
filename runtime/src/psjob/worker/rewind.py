"""A rewind: this process becomes a fresh copy of itself, in place, and joins the job again at the restored clock."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping

from psjob import contract
from psjob.process import began
from psjob.process.descendants import end_children
from psjob.process.errors import Refused


def check_possible() -> None:
    """Raises Refused when this process could not start itself again: a script from stdin or an interactive session."""
    words = sys.orig_argv[1:]
    script = [w for w in words if not w.startswith("-")]
    if not words or "-" in words or (not script and "-c" not in words):
        raise Refused(
            "the script came from standard input or a prompt, so it could not be started again after a failure; "
            "save it to a file and run `python train.py`"
        )


def again(rewinds: int, mode: str = "", more: Mapping[str, str] | None = None) -> None:
    """End child processes and exec the same command with `rewinds` counted up, in `mode` where one is named. Does not return.

    The folder and the environment are those that the process began with, and `more`. What the script and its libraries set since may
    be meant for this process alone, such as the address of a child.
    """
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):  # torch's loader raises from SIGCHLD when its processes end
        signal.signal(number, signal.SIG_DFL)
    end_children()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    os.chdir(began.FOLDER)
    environment = {**began.ENVIRONMENT, **(more or {}), contract.ENV_REWINDS: str(rewinds + 1)}
    if mode:
        environment[contract.ENV_MODE] = mode
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
