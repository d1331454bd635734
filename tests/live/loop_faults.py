"""Kills the process of a script at one of its pushes.

A script that a test runs calls `arm` in its first line, and knows nothing of it otherwise. Nothing is imported here that takes time.
"""

from __future__ import annotations

import os
import signal
from typing import Any

FAULT = "LOOP_FAULT"
"""In the environment: `before 3`, the worker is killed as its fourth push begins; `after 3`, as it is over."""


def arm() -> None:
    """As the environment says; nothing without."""
    words = os.environ.pop(FAULT, "").split()
    if not words:
        return
    from psjob.worker.exchange import Exchange

    push, when, step = Exchange.push, words[0], int(words[1])

    def counted(exchange: Any, *given: Any, **named: Any) -> Any:
        clock = exchange.session.clock
        if clock == step and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        push(exchange, *given, **named)
        if clock == step:
            os.kill(os.getpid(), signal.SIGKILL)

    Exchange.push = counted  # type: ignore[method-assign]
