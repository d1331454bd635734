"""Starts operator processes quickly: one process imports the operator once and forks a real process of its own for each start.

Forty starts of one test would otherwise spend a minute on imports. Each child is a process like any other: its own pid, signals, exit code.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


class Nursery:
    """One per test process; `get()` starts it at the first wish."""

    _only: Nursery | None = None

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lock = threading.Lock()
        atexit.register(self._process.kill)

    @classmethod
    def get(cls) -> Nursery:
        if cls._only is None or cls._only._process.poll() is not None:
            cls._only = cls()
        return cls._only

    def start(self, arguments: list[str], log: Path) -> int:
        """`psjob-operator` with these arguments; answers its pid."""
        return int(self._ask({"start": arguments, "log": str(log)}))

    def poll(self, pid: int) -> int | None:
        """Its exit code (negative: signal) once it has ended."""
        code = self._ask({"poll": pid})
        return None if code is None else int(code)

    def wait(self, pid: int) -> int:
        """Wait for its end; answers the exit code."""
        return int(self._ask({"wait": pid}))

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())["answer"]


def serve() -> None:
    """Answer until stdin ends."""
    importlib.import_module("psjob_operator.cluster.main")  # what takes the time

    ended: dict[int, int] = {}
    for line in sys.stdin:
        question = json.loads(line)
        answer: int | None = None
        if "start" in question:
            answer = _fork(question["start"], question["log"])
        else:
            pid = question.get("poll") or question["wait"]
            if pid not in ended:
                found, status = os.waitpid(pid, os.WNOHANG if "poll" in question else 0)
                if found:
                    ended[pid] = os.waitstatus_to_exitcode(status)
            answer = ended.get(pid)
        print(json.dumps({"answer": answer}), flush=True)


def _fork(arguments: list[str], log: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (out, 1), (out, 2)):
            os.dup2(source, target)
        from psjob_operator.__main__ import main

        sys.argv = ["psjob-operator", *arguments]
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
