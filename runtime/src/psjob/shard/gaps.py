"""Background work of a shard runs in the gaps between pushes: pushes come first for processor time and memory bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable

from psjob.process import pulse

CALM = 0.01
"""Seconds without a push after which nobody is held up."""
SHARE = 3
"""Where pushes never cease, a quarter of the time is worked at first,"""
PATIENCE = 5.0
"""and three quarters once so many seconds were waited in all: however large a checkpoint is, it is not slowed for ever."""


class PushGaps:
    """For one thread and one cut. `pushed` tells when the last push came, by the monotonic clock."""

    def __init__(self, pushed: Callable[[], float], patience: float = PATIENCE) -> None:
        self._pushed, self._patience = pushed, patience
        self._since = time.monotonic()
        self.waited = 0.0
        """Seconds in all."""

    def wait(self) -> None:
        """Wait until no push has come for a moment.

        At most SHARE times as long as the caller has worked since the last call; a third as long, once its patience is used up.
        """
        began = now = time.monotonic()
        worked = now - self._since
        until = now + max(min(SHARE * worked, self._patience - self.waited), worked / SHARE)
        while now < until and now - self._pushed() < CALM:
            time.sleep(min(CALM / 4, until - now))
            now = time.monotonic()
        self.waited += now - began
        self._since = now
        pulse.beat()
