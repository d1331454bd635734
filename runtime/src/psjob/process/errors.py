"""The sentences a user meets, and how a process leaves with one."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from psjob import contract
from psjob.process import tracebacks

LONGEST_MESSAGE = 2048
"""Bytes of a termination message."""
_REFUSED = '"refused": true'
"""In the message of a process whose exit status is not the worker's."""


class Refused(Exception):
    """What the script or the environment asks cannot be done, and starting again would not help. The text says what to change.

    Outside a job it is raised, in a notebook and in a test too. In a job the process prints the text and ends with status 77.

    Example:
        >>> import psjob as ps
        >>> try:
        ...     ps.epochs(-1)
        ... except ps.Refused as refused:
        ...     print(refused)
        ps.epochs takes a number of epochs, such as ps.epochs(10), or nothing; got -1
    """

    __module__ = "psjob"


class Fenced(Exception):
    """A newer process has taken this one's place."""

    def __init__(self, message: str, term: int = 0) -> None:
        super().__init__(message)
        self.term = term


def leave_message(body: dict[str, object], again: bool = False) -> None:
    """Write the termination message that the planner reads; silently nothing where there is no such file, and outside a job.

    A refusal stays, but for another one of the same process (`again`): what a parent does then, or a sibling, follows from it.
    """
    path = os.environ.get(contract.ENV_TERMINATION_LOG, contract.TERMINATION_LOG if contract.ENV_ROLE in os.environ else "")
    raw = json.dumps(body)
    while len(raw) > LONGEST_MESSAGE and len(body) > 1:
        body = dict(list(body.items())[:-1])  # the first says most
        raw = json.dumps(body)
    data = raw.encode()
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not again and _REFUSED.encode() in os.pread(file, LONGEST_MESSAGE, 0):
                return
            # Another thread may end this process at any line: what is there is whole then, an earlier message or this one.
            os.pwrite(file, data.ljust(os.fstat(file).st_size), 0)
            os.ftruncate(file, len(data))
        finally:
            os.close(file)
    except OSError:
        pass


_ends_refused = False
_is_of_a_script = False


def begin() -> None:
    """This process runs a script of a job and nothing else: a second refusal ends it at once, since the script has caught the first."""
    global _is_of_a_script
    _is_of_a_script = True


@atexit.register  # as one of the last: other handlers, which were registered later, have run
def _end_refused() -> None:
    """The process of a job that was refused ends with EXIT_REFUSED, whatever its script has caught."""
    if _ends_refused and contract.ENV_ROLE in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(contract.EXIT_REFUSED)


def exit_refused(message: str) -> NoReturn:
    """Print the sentence, leave it for the planner and end this process with EXIT_REFUSED."""
    global _ends_refused
    __tracebackhide__ = True
    if _ends_refused and _is_of_a_script:
        _end_refused()
    at = users_line()
    message = f"{message} ({at})" if at else message
    print(f"psjob: {message}", file=sys.stderr, flush=True)
    before, _ends_refused = _ends_refused, True
    # A launcher, a parent or a test runner ends with a status of its own.
    leave_message({"error": message[: LONGEST_MESSAGE // 4], "refused": True}, again=before)
    raise SystemExit(contract.EXIT_REFUSED) from None


def refuse(message: str) -> NoReturn:
    """Refuse what the script asks: in a process of a job as by `exit_refused`, which the planner relies on; elsewhere raise Refused."""
    __tracebackhide__ = True
    if contract.ENV_ROLE in os.environ:
        exit_refused(message)
    tracebacks.shorten_errors()
    raise Refused(message) from None


def users_line() -> str:
    """Where the script is, such as `train.py:12`: the innermost line that is its own; empty in a thread without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(("<frozen", *tracebacks.places())):
        frame = frame.f_back
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


@contextmanager
def refused_after(seconds: float, message: str) -> Iterator[None]:
    """Foreign code runs inside, in this thread: where it does not come back in time, the process ends as by `exit_refused`."""

    def end() -> None:
        try:
            exit_refused(message)
        finally:
            os._exit(contract.EXIT_REFUSED)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
