"""Writes which functions of psjob's three packages each Python process enters, while the folder of this file is on PYTHONPATH.

A line is `nanoseconds pid thread file function`; the nanoseconds are of the machine's monotonic clock, which its processes share.
Within 10 ms each function is written once per thread. Lines of all processes go to the file that PSJOBTRACE names.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType
from typing import Any

PACKAGES = ("/psjob/", "/psjob_operator/", "/psjob_client/")
NANOSECONDS = 10_000_000
FUNCTION = 2
"""The flag CO_NEWLOCALS of a code object; bodies of modules and classes lack it."""


def install(path: str) -> None:
    out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    places: dict[str, str] = {}
    seen: set[tuple[int, int, str, str]] = set()

    def place(file: str) -> str:
        start = max(file.rfind(package) for package in PACKAGES)
        return file[start + 1 :] if start >= 0 and "/tests/" not in file else ""

    def entered(frame: FrameType, event: str, _arg: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        file = places.get(code.co_filename)
        if file is None:
            file = places[code.co_filename] = place(code.co_filename)
        if not file or not code.co_flags & FUNCTION:
            return
        now = time.monotonic_ns()
        key = (now // NANOSECONDS, threading.get_ident(), file, code.co_name)
        if key not in seen:
            seen.add(key)
            os.write(out, f"{now} {os.getpid()} {key[1]} {file} {code.co_name}\n".encode())

    threading.setprofile(entered)
    sys.setprofile(entered)


if "PSJOBTRACE" in os.environ:
    install(os.environ["PSJOBTRACE"])
