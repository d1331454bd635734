"""Kills the process of a script at one of its pushes, or lets it wait there until other shards have come.

A script that a test runs calls `arm` in its first line, and knows nothing of it otherwise. Nothing is imported here that takes time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FAULT = "LOOP_FAULT"
"""In the environment: `kill before 3`, the worker is killed as its fourth push begins; `kill after 3`, as it is over. `wait` in place of
`kill`: it waits there until its shards are others."""
WAITS, GOES_ON = "waits", "goes-on"
"""Files, by which it says that it waits, and is told that it may continue."""
AGAIN, EXIT_AGAIN = "again.json", 99
"""A worker that begins again in place leaves its environment here, and ends with this code: who runs it makes another fork, which need not
import torch."""


def arm() -> None:
    """As the environment says."""
    from psjob.worker import rewind
    from psjob.worker.exchange import Exchange

    rewind.start_again = _again
    words = os.environ.pop(FAULT, "").split()
    if not words:
        return
    push, (what, when), step = Exchange.push, words[:2], int(words[2])

    def strike() -> None:
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        Path(WAITS).touch()
        while not Path(GOES_ON).exists():
            time.sleep(0.005)
        for name in (WAITS, GOES_ON):
            Path(name).unlink()

    def counted(exchange: Any, *given: Any, **named: Any) -> Any:
        struck = exchange.state.clock == step
        if struck and when == "before":
            strike()
        push(exchange, *given, **named)
        if struck and when == "after":
            strike()

    Exchange.push = counted  # type: ignore[method-assign]


def _again(rewinds: int, mode: str = "", more: Mapping[str, str] | None = None) -> None:
    Path(AGAIN).write_text(json.dumps({"rewinds": rewinds + 1, "mode": mode, "more": dict(more or {})}))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(EXIT_AGAIN)
