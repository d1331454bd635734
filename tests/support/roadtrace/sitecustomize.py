"""Writes by which calls the processes of a real run come to the stops of a road, while the folder of this file is on PYTHONPATH.

PSJOBTRACE_STOPS lists the stops as `file:function`, separated by spaces; a method is `Class.method`. When a thread enters one, a line
`nanoseconds stop file@nanoseconds …` is written to the file that PSJOBTRACE names. It has the files of the functions of psjob's packages
that the thread is in, the stop's own last, and when each was entered, or resumed if it is a coroutine. The nanoseconds are of the
machine's monotonic clock, which its processes share. Within 10 ms a thread writes each stop once.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any

PACKAGES = ("/psjob/", "/psjob_operator/", "/psjob_client/")
NANOSECONDS = 10_000_000


def place(code: CodeType) -> str:
    """The file of this code from its package on, or an empty string for code of others."""
    start = max(code.co_filename.rfind(package) for package in PACKAGES)
    return code.co_filename[start + 1 :] if start >= 0 and "/tests/" not in code.co_filename else ""


def install(path: str, stops: frozenset[str]) -> None:
    out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    files: dict[CodeType, str] = {}
    seen: set[tuple[int, int, str]] = set()
    mine = threading.local()

    def profile(frame: FrameType, event: str, _arg: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        file = files.get(code)
        if file is None:
            file = files[code] = place(code)
        if not file:
            return
        stack: list[tuple[FrameType, str]] = mine.__dict__.setdefault("stack", [])
        if event == "return":
            if stack and stack[-1][0] is frame:
                stack.pop()
            return
        now = time.monotonic_ns()
        stack.append((frame, f"{file}@{now}"))
        stop = f"{file}:{code.co_qualname}"
        key = (now // NANOSECONDS, threading.get_ident(), stop)
        if stop in stops and key not in seen:
            seen.add(key)
            os.write(out, f"{now} {stop} {' '.join(entered for _, entered in stack)}\n".encode())

    threading.setprofile(profile)
    sys.setprofile(profile)


if "PSJOBTRACE" in os.environ:
    install(os.environ["PSJOBTRACE"], frozenset(os.environ["PSJOBTRACE_STOPS"].split()))
