"""Threads that do not die in silence: an exception that nobody expected ends the process, with the reason where the planner reads it."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from psjob.process.errors import leave_message

EXIT_BROKEN = 1
"""A crash, as the planner counts them."""
log = logging.getLogger("psjob")
_end: Callable[[str], None] | None = None
_ends = threading.RLock()


def guard(end: Callable[[str], None] | None = None) -> None:
    """From now on a broken thread of this process ends it: by `end(sentence)`, or at once with the sentence as termination message."""
    global _end
    _end = end or _leave


def thread(target: Callable[..., None], name: str, *args: Any) -> threading.Thread:
    """A daemon thread that calls `target(*args)`, not started yet. What it raises ends the process, if that is guarded."""

    def run() -> None:
        try:
            target(*args)
        except Exception as error:
            broken(name, error)

    return threading.Thread(target=run, name=name, daemon=True)


def start(target: Callable[..., None], name: str, *args: Any) -> threading.Thread:
    """As `thread`, and start it."""
    made = thread(target, name, *args)
    made.start()
    return made


def timer(seconds: float, target: Callable[..., None], name: str, *args: Any) -> threading.Timer:
    """Call `target(*args)` after some seconds, unless it is cancelled."""

    def run() -> None:
        try:
            target(*args)
        except Exception as error:
            broken(name, error)

    made = threading.Timer(seconds, run)
    made.name, made.daemon = name, True
    made.start()
    return made


def broken(name: str, error: BaseException) -> None:
    """A thread met what it did not expect. Where the process is not guarded (tests share one), it is only logged."""
    sentence = told(name, error)
    log.error("%s\n%s", sentence, "".join(traceback.format_exception(error)))
    if _end is not None:
        with _ends:  # the first ends the process, and says why
            _end(sentence)


def told(name: str, error: BaseException) -> str:
    """The sentence: thread, exception, and the last frame."""
    return f"thread {name} failed: {type(error).__name__}: {str(error)[:300]}{_at(error.__traceback__)}"


def _at(trace: TracebackType | None) -> str:
    frames = traceback.extract_tb(trace)
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno} {frames[-1].name})" if frames else ""


def _leave(sentence: str) -> None:
    print(f"psjob: {sentence}", file=sys.stderr, flush=True)
    leave_message({"problem": sentence})
    logging.shutdown()
    os._exit(EXIT_BROKEN)
