"""The end of a worker that hangs: it writes the stacks of its threads to its log and exits.

Shard 0 tells a link's thread, which does it where the interpreter runs. A thread that blocks in C and holds the interpreter lock keeps
every Python thread from running. Then a thread of faulthandler, which needs no lock, writes the stacks, and the planner ends the process.
A process that is stopped (SIGSTOP) writes nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading

from psjob import contract
from psjob.process import supervise
from psjob.process.errors import leave_message

REARM_SECONDS = 0.5
STDERR = 2


def watch(step_timeout: float, over: threading.Event) -> None:
    """From now on, until `over`, write the stacks once the interpreter did not come to this thread for `step_timeout` seconds."""

    def rearm() -> None:
        while not over.is_set():
            faulthandler.dump_traceback_later(step_timeout, file=STDERR)
            over.wait(REARM_SECONDS)
        faulthandler.cancel_dump_traceback_later()

    supervise.start(rearm, "watchdog")


def hung(seconds: float | None) -> None:
    """Write every thread's stack to the log and end this process with EXIT_HUNG. Does not return."""
    limit = "" if seconds is None else f" (workers.stepTimeoutSeconds is {seconds:g})"
    sentence = f"this worker has made no step while others wait for it{limit}; the stacks of its threads are in its log"
    with contextlib.suppress(OSError, ValueError):
        print(f"psjob: {sentence}:", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError, ValueError):
        faulthandler.dump_traceback(file=STDERR, all_threads=True)
    leave_message({"error": sentence})
    os._exit(contract.EXIT_HUNG)
